from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.wire.usage import UsageRemover, ask_for_usage

REPORT = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
OTHERS = [
    b'data: {"choices":[{"index":0,"text":"a"}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"a"}],"usage":null}\n\n',
    b'data: {"choices":[{"index":0,"text":"\\"usage\\""}],"usage":{"completion_tokens":1}}\n\n',
    b'data: {"choices":[],"usage":null}\n\n',
    b'data: {"choices":[]}\n\n',
    b'data: "usage"\n\n',
    b'data: {"usage": oops\n\n',
    b'data: {"usage":{}}\r\n\r\n',
    b": ping\n\n",
    b"\n",
    b"\r",
    b"event: x\r\ndata: y\r\n\r\n",
    b"data: z\r\r",
    "data: 🙂\n\n".encode(),
    b"data: [DONE]\n\n",
]
REPORTS = [
    REPORT,
    REPORT.replace(b"\n\n", b"\r\n\r\n"),
    REPORT.replace(b"\n\n", b"\r\r"),
    REPORT.replace(b"data: ", b"data:"),
    b'data: {"choices":[],\ndata: "usage":{}}\n\n',
]


def fed(stream: bytes, sizes: list[int], **more: int) -> tuple[bytes, UsageRemover]:
    remover = UsageRemover(**more)
    passed, position, reads = [], 0, 0
    while position < len(stream):
        size = sizes[reads % len(sizes)]
        passed.append(remover.feed(stream[position : position + size]))
        position, reads = position + size, reads + 1
    return b"".join([*passed, remover.end()]), remover


@given(
    before=st.lists(st.sampled_from(OTHERS), max_size=6).map(b"".join),
    report=st.sampled_from(REPORTS),
    after=st.lists(st.sampled_from([o for o in OTHERS if o[:1] not in b"\r\n"]), max_size=3).map(b"".join),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
)
@example(before=b"", report=REPORTS[2], after=b"", sizes=[1])
@example(before=b": ping\n\n", report=REPORTS[2], after=b": ping\n\n", sizes=[17, 22])
@example(before=b": ping\n\n", report=REPORTS[2], after=b": ping\n\n", sizes=[98, 1])
@example(before=b"", report=REPORTS[1], after=OTHERS[-1], sizes=[len(REPORTS[1]) - 1, 1])
def test_the_report_is_taken_out_and_not_a_byte_more(
    before: bytes, report: bytes, after: bytes, sizes: list[int]
) -> None:
    # An event that has begun ends first.
    before += b"" if before.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) or not before else b"\n\n"
    if before.endswith(b"\r"):
        before += b": x\n\n"
    passed, remover = fed(before + report + after, sizes)
    assert passed == before + after
    assert remover.removed == 1


@given(
    stream=st.lists(st.sampled_from([*OTHERS, b"data: ", b"x", b"\r\n"]), max_size=10).map(b"".join),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
)
def test_where_there_is_none_nothing_changes(stream: bytes, sizes: list[int]) -> None:
    passed, remover = fed(stream, sizes)
    assert (passed, remover.removed) == (stream, 0)


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("size", [1, 100])
def test_a_report_that_ends_the_stream_without_its_blank_line_is_one(report: bytes, size: int) -> None:
    passed, remover = fed(OTHERS[0] + report.rstrip(), [size])
    assert (passed.rstrip(), remover.removed) == (OTHERS[0].rstrip(), 1)


def test_whole_events_are_not_held_back() -> None:
    remover = UsageRemover()
    for event in OTHERS:
        if event.endswith((b"\n\n", b"\r\n\r\n")):
            assert remover.feed(event) == event


def test_comments_in_the_same_event_stay() -> None:
    assert fed(b": ping\n" + REPORT, [1000])[0] == b": ping\n\n"


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_what_is_too_long_for_a_report_passes_and_is_not_kept(size: int) -> None:
    long = b'data: {"choices":[],"usage":{"x":"' + b"y" * 5000 + b'"}}\n\n'
    stream = OTHERS[0] + long + REPORT + OTHERS[-1]
    passed, remover = fed(stream, [size], max_event_bytes=500)
    assert remover.removed == (1 if size < 100_000 else 2)
    assert passed == stream.replace(REPORT, b"").replace(b"" if size < 100_000 else long, b"")
    remover = UsageRemover(max_event_bytes=500)
    for _ in range(100):
        remover.feed(b"data: " + b"z" * 400)
        assert len(remover._held) <= 500


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","stream":true}',
        b' \n{ "stream" : true , "x": 1e400, "s": "\\ud800", "big": 123456789012345678901234567890}',
        b'{"stream":false,"stream":true}',
    ],
)
def test_a_stream_is_asked_for_usage_and_the_rest_stays(body: bytes) -> None:
    asked = ask_for_usage(body)
    assert asked is not None
    assert asked.replace(b'"stream_options":{"include_usage":true},', b"", 1) == body
    assert json.loads(asked)["stream_options"] == {"include_usage": True}
    assert json.loads(asked) == {**json.loads(body), "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    "body",
    [
        b'{"stream":false}',
        b"{}",
        b'{"stream":null}',
        b'{"stream":true,"stream_options":null}',
        b'{"stream":true,"stream_options":{"include_usage":false}}',
        b'{"stream_options":{},"stream":true}',
        b'{"stream":true,"stream\\u005foptions":{"include_usage":true}}',
        b'{"stream":true',
        b"[" * 100_000,
        b'[{"stream":true}]',
        b"",
    ],
)
def test_who_does_not_stream_or_has_options_is_not_asked(body: bytes) -> None:
    assert ask_for_usage(body) is None
