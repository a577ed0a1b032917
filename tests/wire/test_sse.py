from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.wire.openai import read_chunk
from proxy.wire.sse import EventSplitter

UNLIMITED = 1 << 30


@dataclass
class Reference:
    """The event stream format read byte by byte, as the HTML standard words it."""

    events: list[bytes] = field(default_factory=list)
    oversized: int = 0
    at_boundary: bool = True


def parse_slowly(stream: bytes, limit: int = UNLIMITED) -> Reference:
    result = Reference()
    if stream.startswith(b"\xef\xbb\xbf"):
        stream = stream[3:]
    block: list[bytes] = []
    line = b""
    position = 0
    while position < len(stream):
        byte = stream[position : position + 1]
        position += 1
        if byte not in (b"\r", b"\n"):
            line += byte
            continue
        if byte == b"\r" and stream[position : position + 1] == b"\n":
            position += 1
        if line:
            block.append(line)
        else:
            dispatch(block, limit, result)
            block = []
        line = b""
    unfinished = [*block, line] if line else block
    result.at_boundary = not unfinished
    result.oversized += len(b"\n".join(unfinished)) > limit
    return result


def dispatch(block: list[bytes], limit: int, result: Reference) -> None:
    if len(b"\n".join(block)) > limit:
        result.oversized += 1
        return
    values = []
    for line in block:
        name, _, value = line.partition(b":")
        if name == b"data":
            values.append(value[1:] if value[:1] == b" " else value)
    if values:
        result.events.append(b"\n".join(values))


FRAGMENTS = [
    *(b"data: ", b"data:", b"data", b"datax: ", b" data: ", b"event: delta", b"id: 7", b"retry: 10", b": ping", b":"),
    *(b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r\n", b"data: x\n\n", b"data: [DONE]\n\n"),
    *(
        b" ",
        b"a",
        b"[DONE]",
        b"\x00",
        "é".encode(),
        "😀".encode(),
        "😀".encode()[:2],
        b"\xef\xbb\xbf",
        b"\xef\xbb",
        b"\xff",
    ),
]
streams = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map(b"".join)


def cut(stream: bytes, sizes: list[int]) -> list[bytes]:
    reads: list[bytes] = []
    position = 0
    while position < len(stream):
        size = sizes[len(reads) % len(sizes)]
        reads.append(stream[position : position + size])
        position += size
    return reads


@settings(deadline=None, max_examples=400)
@given(
    streams,
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.one_of(st.just(UNLIMITED), st.integers(3, 20)),
)
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [1], UNLIMITED)
@example(b"data: a\n\n\ndata: b\n\n", [9], UNLIMITED)
@example(b"\xef\xbb\xbfdata: a\n\n", [2], UNLIMITED)
@example(b"data: 345\n\n", [1], 9)
@example(b"data: 3456\n\ndata: b\n\n", [11, 3], 9)
def test_agrees_with_the_standard_after_every_read_for_any_cut(stream: bytes, sizes: list[int], limit: int) -> None:
    splitter = EventSplitter(max_event_bytes=limit)
    events: list[bytes] = []
    seen = b""
    for read in cut(stream, sizes):
        events += splitter.feed(read)
        seen += read
        expected = parse_slowly(seen, limit)
        assert events == expected.events
        assert splitter.at_boundary == expected.at_boundary
        assert splitter.oversized == expected.oversized


def feed_all(splitter: EventSplitter, *reads: bytes) -> list[bytes]:
    return [event for read in reads for event in splitter.feed(read)]


def one_by_one(stream: bytes) -> list[bytes]:
    return [stream[i : i + 1] for i in range(len(stream))]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\n", [b""]),
        (b"data:\ndata:\n\n", [b"\n"]),
        (b"event: ping\n\n", []),
        (b": ping\n\n", []),
        (b": ping\n\ndata: a\n\n: ping\n: ping\n\ndata: b\n: ping\n\n", [b"a", b"b"]),
        (b"event: x\nid: 3\ndata: a\n\n", [b"a"]),
        (b"Data: a\n\ndata : b\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: \xef\xbb\xbfa\n\n\xef\xbb\xbfdata: b\n\n", [b"\xef\xbb\xbfa"]),
        (b"data: a\r\n\r\n", [b"a"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\n\r\ndata: b\r\n\n", [b"a", b"b"]),
        (b"\n\n\ndata: a\n\n\n\n\ndata: b\n\n\n", [b"a", b"b"]),
        (b"data: cut short", []),
        (b"data: without a blank line\n", []),
        ("data: 😀\n\n".encode(), ["😀".encode()]),
    ],
)
def test_gives_the_payloads_whole_and_byte_by_byte(stream: bytes, events: list[bytes]) -> None:
    assert EventSplitter().feed(stream) == events
    assert feed_all(EventSplitter(), *one_by_one(stream)) == events


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_emoji_cut_between_reads_comes_out_whole(at: int) -> None:
    stream = "data: 😀\n\n".encode()
    splitter = EventSplitter()
    assert splitter.feed(stream[: 6 + at]) == []
    assert splitter.feed(stream[6 + at :]) == ["😀".encode()]


@pytest.mark.parametrize("at", range(len(b"data: [DONE]\n\n") + 1))
def test_the_end_marker_is_found_wherever_it_is_cut(at: int) -> None:
    stream = b"data: [DONE]\n\n"
    (event,) = feed_all(EventSplitter(), stream[:at], stream[at:])
    assert read_chunk(event).done


@pytest.mark.parametrize("at", range(0, 120, 7))
def test_the_end_marker_inside_a_tool_call_is_text(at: int) -> None:
    arguments = 'write "data: [DONE]\n\n" to the file'
    chunk = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}}]}
    stream = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    views = [read_chunk(event) for event in feed_all(EventSplitter(), stream[:at], stream[at:])]
    assert [(view.done, view.tokens) for view in views] == [(False, 1)]


def test_a_carriage_return_ends_an_event_without_waiting_for_a_line_feed() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\r\n\r") == [b"a"]
    assert splitter.at_boundary
    assert splitter.feed(b"\n") == []
    assert splitter.at_boundary
    assert splitter.feed(b"data: b\r\n\r\n") == [b"b"]


def test_an_empty_read_changes_nothing() -> None:
    splitter = EventSplitter()
    assert feed_all(splitter, b"", b"data: a\r", b"", b"\n", b"", b"\r\n", b"") == [b"a"]
    assert splitter.at_boundary


@pytest.mark.parametrize(
    ("stream", "at_boundary"),
    [
        (b"", True),
        (b"data: a\n\n", True),
        (b"data: a\r\n\r\n", True),
        (b": ping\n\n", True),
        (b"\n", True),
        (b"data: a\n\n\n", True),
        (b"\xef\xbb\xbf", True),
        (b"\xef", False),
        (b"d", False),
        (b"data: a", False),
        (b"data: a\n", False),
        (b"data: a\r", False),
        (b"data: a\n\n: ping\n", False),
    ],
)
def test_tells_whether_it_is_between_two_events(stream: bytes, at_boundary: bool) -> None:
    whole, bytewise = EventSplitter(), EventSplitter()
    whole.feed(stream)
    feed_all(bytewise, *one_by_one(stream))
    assert whole.at_boundary == bytewise.at_boundary == at_boundary


@settings(deadline=None)
@given(streams)
def test_after_two_line_feeds_an_event_of_our_own_stands_alone(stream: bytes) -> None:
    splitter = EventSplitter()
    splitter.feed(stream)
    ours = b'data: {"error": {}}\n\n'
    padding = b"" if splitter.at_boundary else b"\n\n"
    assert parse_slowly(stream + padding + ours).events[-1] == b'{"error": {}}'


@pytest.mark.timeout(30)  # a splitter that searches the buffer again with every read takes minutes
def test_a_line_of_300_kb_in_reads_of_any_size() -> None:
    payload = b'{"logprobs": "' + b"x" * 300_000 + b'"}'
    stream = b"data: " + payload + b"\n\ndata: next\n\n"
    for size in (1, 16_384, len(stream)):
        assert feed_all(EventSplitter(), *cut(stream, [size])) == [payload, b"next"]


def test_an_event_over_the_limit_is_counted_and_not_kept() -> None:
    splitter = EventSplitter(max_event_bytes=1000)
    assert splitter.feed(b"data: before\n\ndata: ") == [b"before"]
    for _ in range(100):
        assert splitter.feed(b"x" * 16_384) == []
        assert len(splitter._pending) <= 1
    assert splitter.oversized == 1
    assert not splitter.at_boundary
    assert splitter.feed(b"\n") == []
    assert splitter.feed(b"\ndata: after\n\n") == [b"after"]
    assert splitter.oversized == 1


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_the_limit_is_the_same_for_every_cut(size: int) -> None:
    fits, over = b"data: " + b"x" * 14, b"data: " + b"x" * 15
    splitter = EventSplitter(max_event_bytes=20)
    stream = fits + b"\r\n\r\n" + over + b"\r\n\r\n" + fits + b"\n\n"
    assert feed_all(splitter, *cut(stream, [size])) == [b"x" * 14] * 2
    assert splitter.oversized == 1
