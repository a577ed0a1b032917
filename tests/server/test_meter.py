"""What counts as a token, and which gaps its coming ends: bytes and times in, a report out."""

import json
import sys
from itertools import pairwise
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import DONE, delta, event, last, token, usage

from proxy.core.request import STRICT
from proxy.server.meter import StreamMeter
from proxy.telemetry.metrics import TbtHistogram
from proxy.telemetry.report import RequestReport, TokenTimes
from proxy.wire.openai import read_chunk
from proxy.wire.sse import EventSplitter

ROLE = delta(role="assistant", content="")


class Metered:
    """A meter with everything that it writes to."""

    def __init__(self, arrived_at: float = 0.0, tbt_seconds: float | None = None) -> None:
        self.report = RequestReport("r", "client", "chat", arrived_at, STRICT)
        self.report.times = TokenTimes(tbt_seconds)
        self.histogram = TbtHistogram()
        self.told: list[tuple[str, int, float]] = []
        """What the scheduler heard."""
        self.meter = StreamMeter(self.report, self.histogram, lambda *told: self.told.append(told))

    def read(self, *reads: tuple[float, bytes]) -> "Metered":
        for now, data in reads:
            self.meter.on_read(data, now)
        return self

    @property
    def times(self) -> TokenTimes:
        return self.report.times

    @property
    def gaps(self) -> list[float]:
        return [round(gap, 6) for gap in self.times.gaps]


def test_tokens_one_by_one() -> None:
    metered = Metered(arrived_at=1.0).read((1.5, token()), (1.6, token()), (1.9, token()), (1.9, last() + DONE))
    assert metered.report.ttft_seconds == 0.5
    assert metered.gaps == [0.1, 0.3]
    assert metered.times.chunks == 3
    assert metered.told == [("r", 1, 1.5), ("r", 1, 1.6), ("r", 1, 1.9)]
    assert (metered.meter.done, metered.meter.finished, metered.meter.error) == (True, True, False)


@pytest.mark.parametrize(
    "silent",
    [
        pytest.param(ROLE, id="role-only first chunk"),
        pytest.param(delta(role="assistant", content=None), id="role with null content"),
        pytest.param(b": ping\n\n", id="comment"),
        pytest.param(b":\n", id="comment within an event"),
        pytest.param(usage(5, 0), id="usage without choices"),
        pytest.param(event({"id": "x"}), id="no choices at all"),
        pytest.param(event({"choices": []}), id="empty choices"),
        pytest.param(last(), id="finish reason without text"),
        pytest.param(b"event: message\nid: 7\nretry: 3\n\n", id="fields without data"),
        pytest.param(b"\n\n\n\n", id="blank lines"),
        pytest.param(b"data: {not json\n\n", id="undecodable"),
        pytest.param(DONE, id="end marker"),
    ],
)
def test_what_is_no_token(silent: bytes) -> None:
    """It stops no TTFT clock, ends no gap, and tells the scheduler nothing."""
    metered = Metered().read((0.1, silent), (0.5, token()), (0.6, silent), (0.9, token()), (1.5, silent))
    assert metered.report.ttft_seconds == 0.5
    assert metered.gaps == [0.4]
    assert metered.told == [("r", 1, 0.5), ("r", 1, 0.9)]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(token("x"), id="text"),
        pytest.param(delta(content="x"), id="content"),
        pytest.param(delta(reasoning_content="hm"), id="reasoning_content"),
        pytest.param(delta(reasoning="hm"), id="reasoning"),
        pytest.param(delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f"}}]), id="tool call"),
        pytest.param(delta(tool_calls=[{"index": 0, "id": None, "function": {"arguments": "{"}}]), id="tool arguments"),
        pytest.param(delta(refusal="no"), id="refusal"),
        pytest.param(delta(role="assistant", content="Hi"), id="role and text in one"),
        pytest.param(token("data: [DONE]\n\n"), id="text that looks like the end marker"),
        pytest.param(b'data:{"choices":[{"text":"x"}]}\r\n\r\n', id="CRLF, no space"),
        pytest.param(b': ping\nid: 1\ndata: {"choices":\ndata: [{"text":"x"}]}\n\n', id="several data lines"),
        pytest.param(b'data: {"choices":[{"text":"\\ud83d"}]}\n\n', id="lone surrogate"),
    ],
)
def test_what_is_a_token(first: bytes) -> None:
    metered = Metered().read((0.25, ROLE), (0.5, first))
    assert metered.report.ttft_seconds == 0.5
    assert metered.told == [("r", 1, 0.5)]
    assert not metered.meter.done


def test_chunks_that_came_together_are_one_gap() -> None:
    metered = Metered(tbt_seconds=0.25).read((1.0, token()), (1.5, token() * 4), (1.6, token() * 2))
    assert metered.gaps == [0.5, 0.1]
    assert metered.times.misses == 1
    assert metered.times.chunks == 7
    assert metered.told == [("r", 1, 1.0), ("r", 4, 1.5), ("r", 2, 1.6)], (
        "the scheduler hears of every chunk: they are steps"
    )
    assert sum(metered.histogram.counts) == 2


def test_the_first_read_may_bring_several_chunks() -> None:
    metered = Metered().read((1.0, ROLE + token() + token()))
    assert metered.report.ttft_seconds == 1.0
    assert metered.gaps == []
    assert metered.told == [("r", 2, 1.0)]


def test_a_token_comes_when_its_event_is_complete() -> None:
    data = token("late")
    metered = Metered().read((1.0, data[:10]), (2.0, data[10:-1]), (3.0, data[-1:]))
    assert metered.report.ttft_seconds == 3.0
    assert metered.meter.at_boundary


def test_one_byte_per_read_changes_no_count() -> None:
    stream = ROLE + token("🙂") + b": ping\r\n\r\n" + token("b") + usage(4, 2) + DONE
    metered = Metered().read(*((number / 1000, bytes([byte])) for number, byte in enumerate(stream)))
    assert metered.times.chunks == 2
    assert metered.times.gap_count == 1
    assert metered.meter.done
    assert (metered.report.prompt_tokens, metered.report.completion_tokens) == (4, 2)


def compact(text: str, **more: object) -> bytes:
    """A chunk as vLLM writes it."""
    told = {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **more}]}
    return b"data: " + json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode(errors="replace") + b"\n\n"


chunks = st.one_of(
    st.text(max_size=4).map(compact),
    st.text(max_size=4).map(token),
    st.sampled_from(
        [ROLE, DONE, b": ping\n\n", b"\n", b"data: {\n\n", compact("a").replace(b"\n", b"\r"), compact("a")[:-1]]
    ),
    st.sampled_from(
        [compact("a", token_ids=[1, 2]), compact("a", finish_reason="stop"), compact("\\").replace(b"\\", b"")]
    ),
)


@given(st.lists(chunks, max_size=12), st.data())
@settings(max_examples=400, deadline=None)
def test_however_a_stream_is_cut_each_read_has_the_tokens_of_the_events_that_it_completes(
    parts: list[bytes], data: st.DataObject
) -> None:
    """As a splitter and a decoder have them that know nothing of the events before."""
    if data.draw(st.booleans(), label="each event is a read"):
        reads = parts
    else:
        stream = b"".join(parts)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=10)))
        reads = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    metered, splitter, expected = Metered(), EventSplitter(), []
    for now, read in enumerate(reads):
        metered.read((float(now), read))
        views = [read_chunk(payload) for payload in splitter.feed(read)]
        if tokens := sum(view.visible or view.held_back for view in views):
            expected.append(("r", tokens, float(now)))
        assert metered.meter.at_boundary == splitter.at_boundary
    assert metered.told == expected


def test_a_held_back_token_is_a_sign_of_life_but_shows_nothing() -> None:
    held_back = delta(content="")
    metered = Metered().read((0.1, ROLE), (0.2, held_back), (0.5, token()), (0.6, held_back), (0.9, token()))
    assert metered.told == [("r", 1, t) for t in (0.2, 0.5, 0.6, 0.9)]
    assert metered.report.ttft_seconds == 0.5
    assert metered.gaps == [0.1, 0.3], "after the first visible token each token counts"


def test_usage_in_every_chunk_leaves_the_last_one() -> None:
    chunks = [token(usage={"prompt_tokens": 9, "completion_tokens": n}) for n in (1, 2, 3)]
    metered = Metered().read(*((float(n), chunk) for n, chunk in enumerate(chunks)))
    assert (metered.report.prompt_tokens, metered.report.completion_tokens) == (9, 3)
    assert metered.times.chunks == 3


def test_usage_of_nothing_keeps_the_estimate_of_the_prompt() -> None:
    metered = Metered()
    metered.report.prompt_tokens = 7
    metered.read((0.0, event({"choices": [], "usage": {"completion_tokens": 2}})))
    assert (metered.report.prompt_tokens, metered.report.completion_tokens) == (7, 2)


def test_an_error_inside_the_stream_is_noticed() -> None:
    metered = Metered().read((0.1, token()), (0.2, event({"error": {"message": "EngineDead", "code": 500}})))
    assert metered.meter.error
    assert metered.times.chunks == 1


def test_an_event_that_is_too_long_is_passed_over_and_the_next_one_counts() -> None:
    metered = Metered().read((0.1, b"data: " + b"x" * (5 << 20)), (0.2, b"x\n\n"), (0.3, token()))
    assert metered.report.ttft_seconds == 0.3
    assert not metered.meter.done


def test_the_pooled_histogram_gets_just_the_gaps() -> None:
    times = (1.0, 1.004, 1.02, 1.5, 13.0)
    metered = Metered().read(*((now, token()) for now in times))
    assert metered.histogram.sum == pytest.approx(12.0)
    assert sum(metered.histogram.counts) == len([*pairwise(times)])
    assert metered.histogram.counts[0] == 1, "at most 5 ms"
    assert metered.histogram.counts[-1] == 1, "more than 10 s"


def test_every_chunk_of_a_long_stream_costs_the_same() -> None:
    """In calls, which no load of the machine changes."""
    metered = Metered(tbt_seconds=0.05)
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def cost(begin: int, end: int) -> int:
        nonlocal calls
        calls = 0
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for number in range(begin, end):
                metered.meter.on_read(token("a"), number * 0.01)
        finally:
            sys.setprofile(before)
        return calls

    cost(0, 100)
    early = cost(100, 300)
    cost(300, 9_800)
    assert cost(9_800, 10_000) <= early * 1.01
