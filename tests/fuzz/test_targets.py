"""Some hundred inputs of each target, by hypothesis; ``python -m fuzz`` runs for as long as you like."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuzz.oracle import parse
from fuzz.targets import SEEDS, TARGETS

pieces = {
    "sse": [
        b"data: ",
        b"data:",
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b": x",
        b"[DONE]",
        b'{"choices":[],"usage":{}}',
        b"\xff",
    ],
    "headers": [bytes([n]) for n in range(32)]
    + [b": ", b"\n", b"1", b"nan", b"1e999", b"close, X-A", b"\xff", b"c", b" "],
    "answer": [
        *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 C\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"),
        *(
            b"\r\n",
            b"abc",
            b"3\r\nabc\r\n",
            b"0\r\n\r\n",
            b"0\r\n",
            b"X: y\r\n",
            b"Connection: close\r\n",
            b"\n",
            b"zz\r\n",
        ),
    ],
}
values: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    ["model", "stream", "max_tokens", "max_completion_tokens", "prompt", "messages", "stream_options"]
)
bodies = st.dictionaries(names, values, max_size=7).map(lambda fields: json.dumps(fields).encode())


@pytest.mark.parametrize("target", TARGETS)
def test_seeds(target: str) -> None:
    for seed in SEEDS[target]:
        TARGETS[target](seed)


@settings(deadline=None, max_examples=150)
@given(data=st.binary(max_size=200))
@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes(target: str, data: bytes) -> None:
    TARGETS[target](data)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), sizes=st.lists(st.integers(0, 30), max_size=7))
@pytest.mark.parametrize("target", pieces)
def test_bytes_that_mean_something(target: str, data: st.DataObject, sizes: list[int]) -> None:
    stream = b"".join(data.draw(st.lists(st.sampled_from(pieces[target]), max_size=25)))
    TARGETS[target](stream if target == "headers" else bytes([len(sizes), *sizes]) + stream)


@settings(deadline=None, max_examples=300)
@given(body=bodies | bodies.map(lambda body: body.replace(b" ", b"\n\t ")))
@example(body=b'{"stream":true,"model":"\\ud800"}')
@example(body=b"[" * 100_000)
def test_bodies_that_mean_something(body: bytes) -> None:
    TARGETS["body"](body)


def test_the_oracle_against_the_standards_own_examples() -> None:
    """Of the HTML standard's section on interpreting an event stream."""
    assert parse(b"data: YHOO\ndata: +2\ndata: 10\n\n").payloads == [b"YHOO\n+2\n10"]
    first, *others = parse(
        b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n"
    ).payloads
    assert (first, others) == (b"first event", [b"second event"])
    assert parse(b"data\n\ndata\ndata\n\ndata:").payloads == [b"", b"\n"]
    assert parse(b"data:test\n\ndata: test\n\n").payloads == [b"test", b"test"]


def test_a_library_of_others_agrees() -> None:
    """httpx-sse reads text, and has events without data as well; otherwise the payloads are the same."""
    httpx_sse = pytest.importorskip("httpx_sse._decoders")

    @settings(deadline=None, max_examples=300)
    @given(stream=st.lists(st.sampled_from(pieces["sse"][:-1]), max_size=25).map(b"".join))
    def agrees(stream: bytes) -> None:
        lines, decoder = httpx_sse.SSELineDecoder(), httpx_sse.SSEDecoder()
        found = [decoder.decode(line) for line in lines.decode(stream.decode()) + lines.flush()]
        theirs = [event.data for event in found if event is not None and event.data]
        assert theirs == [payload.decode() for payload in parse(stream).payloads if payload]

    agrees()
