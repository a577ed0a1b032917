from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from loadgen.arrivals import Arrivals, Process, Rate, parse_arrivals, parse_rate
from loadgen.planning import Demand, PlanError, SharedPrefix, plan, without_longer
from loadgen.traces import Format, Row, RowTrace
from proxy.core.request import RequestClass
from proxy.sim.workload import ClassShare, ScheduledRequest

LENGTHS = tuple(Row(n, n + 1) for n in range(10, 30))
TIMED = tuple(Row(n, n + 1, float(n - 10)) for n in range(10, 30))
TALK = (
    Row(10, 5, session="a", grows=True),
    Row(20, 5, session="a", grows=True, after=0, think_s=2.5),
    Row(30, 5, session="a", grows=True, after=1),
    Row(7, 5, session="b", grows=True),
)
BLOCKS = (Row(40, 5, 0.0, (1, 2, 3), 16), Row(33, 5, 1.0, (1, 2, 9), 16), Row(8, 5, 1.0, (4,), 16))
TWO = Demand(rate=Rate.constant(2.0), requests=200, seed=1)


def trace_of(rows: tuple[Row, ...]) -> RowTrace:
    return RowTrace("t", Format.LENGTHS, rows, len(rows), len(rows))


def drawn(demand: Demand, rows: tuple[Row, ...] = LENGTHS) -> tuple[ScheduledRequest, ...]:
    requests = plan(trace_of(rows), demand).schedule.requests
    assert [r.index for r in requests] == list(range(len(requests)))
    assert all(a.at_seconds <= b.at_seconds for a, b in pairwise(requests))
    assert all(r.after is None or r.after < r.index for r in requests)
    return requests


Requests = Sequence[ScheduledRequest]


# What each stream decides.


def times(requests: Requests) -> list[float]:
    return [r.at_seconds for r in requests]


def lengths(requests: Requests) -> list[tuple[int, int]]:
    return [(r.prompt_tokens, r.output_tokens) for r in requests]


def kinds(requests: Requests) -> list[str]:
    return [r.request_class.name for r in requests]


def contents(requests: Requests) -> list[int]:
    return [r.content_seed for r in requests]


STREAMS: tuple[Callable[[Requests], Sequence[object]], ...] = (times, lengths, kinds, contents)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"arrivals": Arrivals(Process.GAMMA, 3.0)}, times),
        ({"rate": Rate.constant(7.0)}, times),
        ({"classes": (ClassShare(RequestClass("one"), 0.5), ClassShare(RequestClass("two"), 0.5))}, kinds),
        ({"scale_lengths": 2.0}, lengths),
        ({"shared_prefix": SharedPrefix(4, 3)}, None),
    ],
)
def test_changing_what_one_stream_is_drawn_for_changes_no_other(change: dict[str, object], changed: object) -> None:
    before, after = drawn(TWO), drawn(replace(TWO, **change))  # type: ignore[arg-type]
    for stream in STREAMS:
        assert (stream(before) != stream(after)) == (stream is changed)


def test_one_seed_gives_one_schedule_and_another_seed_another_in_every_stream() -> None:
    other = drawn(replace(TWO, seed=2))
    assert drawn(TWO) == drawn(TWO)
    assert all(stream(drawn(TWO)) != stream(other) for stream in STREAMS)


def test_a_longer_schedule_begins_with_the_shorter_one() -> None:
    assert drawn(replace(TWO, requests=300))[:200] == drawn(TWO)


def test_a_seed_at_two_rates_gives_the_same_requests_only_closer_together() -> None:
    fast = drawn(replace(TWO, rate=Rate.constant(8.0)))
    assert times(fast) == pytest.approx([t / 4 for t in times(drawn(TWO))], abs=2e-6)


@pytest.mark.parametrize(
    ("arrivals", "cv"), [("poisson", 1.0), ("gamma:3", 3.0), ("gamma:0.3", 0.3), ("constant", 0.0)]
)
def test_intervals_have_the_rate_and_variation_asked_for(arrivals: str, cv: float) -> None:
    found = times(drawn(replace(TWO, arrivals=parse_arrivals(arrivals), requests=4000)))
    intervals = [b - a for a, b in pairwise(found)]
    assert fmean(intervals) == pytest.approx(0.5, rel=0.03 + 0.03 * cv)
    assert pstdev(intervals) / fmean(intervals) == pytest.approx(cv, abs=0.005 + 0.1 * cv)


def test_a_rate_may_change_and_a_time_may_end_it() -> None:
    found = drawn(replace(TWO, rate=parse_rate("10@100,40@50"), requests=None, seconds=150.0))
    counts = Counter(r.at_seconds < 100 for r in found)
    assert counts[True] == pytest.approx(1000, rel=0.1)
    assert counts[False] == pytest.approx(2000, rel=0.1)
    assert found[-1].at_seconds < 150


def test_lengths_are_a_shuffle_of_the_trace_again_and_again() -> None:
    found = lengths(drawn(replace(TWO, requests=40)))
    assert sorted(found[:20]) == sorted(found[20:]) == [(n, n + 1) for n in range(10, 30)]
    assert found[:20] != found[20:]


def test_a_trace_may_come_at_its_own_times_or_faster() -> None:
    own = Demand(Arrivals(Process.TRACE), speedup=4.0)
    found = drawn(own, TIMED)
    assert times(found) == [n / 4 for n in range(20)]
    assert lengths(found) == [(n, n + 1) for n in range(10, 30)]
    assert len(drawn(replace(own, requests=5), TIMED)) == 5
    assert len(drawn(replace(own, seconds=1.0), TIMED)) == 4


def test_a_tenant_sends_the_same_whoever_else_there_is() -> None:
    alone = drawn(replace(TWO, tenants={"calm": 1.0}, requests=100))
    beside = drawn(replace(TWO, tenants={"calm": 1.0, "flood": 4.0}, rate=Rate.constant(10.0), requests=450))
    calm = [r for r in beside if r.tenant == "calm"]
    assert 60 < len(calm) < 120
    common = min(len(calm), 100)
    assert [replace(r, index=0) for r in calm[:common]] == [replace(r, index=0) for r in alone[:common]]


def test_turns_of_a_conversation_wait_for_the_answer_before_and_grow() -> None:
    found = drawn(replace(TWO, sessions=True, requests=8, think_seconds=3.0), TALK)
    talks = [r for r in found if r.session in ("a", "a.1")]
    assert [r.prompt_tokens for r in talks] == [10, 20, 30] * 2
    first, second, third = talks[:3]
    assert (first.after, second.after, third.after) == (None, first.index, second.index)
    assert second.think_seconds == 2.5
    assert third.think_seconds > 0
    assert first.content_seed == second.content_seed == third.content_seed != talks[3].content_seed
    assert {talks[0].session, talks[3].session} == {"a", "a.1"}


def test_turns_as_requests_of_their_own_have_texts_of_their_own() -> None:
    found = drawn(replace(TWO, requests=8), TALK)
    assert len(set(contents(found))) == 8
    assert all(r.after is None and not r.session for r in found)


def test_turns_at_their_own_times_are_not_before_the_answer() -> None:
    rows = (Row(10, 5, 0.0, session="a"), Row(9, 5, 1.0), Row(20, 5, 6.0, session="a", after=0, think_s=2.5))
    found = drawn(Demand(Arrivals(Process.TRACE), sessions=True), rows)
    assert [(r.at_seconds, r.after, r.think_seconds) for r in found] == [(0, None, 0), (1, None, 0), (6, 0, 0)]


def test_blocks_are_kept_in_order_and_new_in_every_round() -> None:
    found = drawn(replace(TWO, requests=6), BLOCKS)
    assert [r.blocks for r in found[:3]] == [(1, 2, 3), (1, 2, 9), (4,)]
    assert [r.prompt_tokens for r in found[3:]] == [40, 33, 8]
    assert not {b for r in found[:3] for b in r.blocks} & {b for r in found[3:] for b in r.blocks}
    assert not any(r.blocks or r.block_tokens for r in drawn(replace(TWO, requests=6, share=False), BLOCKS))
    # A prompt has one beginning only.
    assert not any(r.prefix for r in drawn(replace(TWO, requests=6, shared_prefix=SharedPrefix(4)), BLOCKS))


def test_blocks_shrink_with_their_prompts() -> None:
    found = drawn(replace(TWO, requests=3, scale_lengths=0.5, max_prompt_tokens=16), BLOCKS)
    assert [(r.prompt_tokens, r.block_tokens, r.blocks) for r in found] == [
        (16, 8, (1, 2)),
        (16, 8, (1, 2)),
        (4, 8, (4,)),
    ]


def test_a_shared_prefix_leaves_every_prompt_something_of_its_own() -> None:
    found = drawn(replace(TWO, shared_prefix=SharedPrefix(15, 3)))
    assert {r.prefix for r in found} == {"1:0", "1:1", "1:2"}
    assert all(r.prefix_tokens == min(15, r.prompt_tokens - 1) for r in found)


def test_in_a_closed_loop_every_user_waits_for_the_answer_before() -> None:
    found = drawn(Demand(concurrency=3, requests=9, think_seconds=1.0))
    assert [r.after for r in found] == [None, None, None, 0, 1, 2, 3, 4, 5]
    assert all((r.think_seconds > 0) == (r.after is not None) for r in found)
    assert set(times(found)) == {0.0}


def test_clipped_requests_are_counted() -> None:
    found = plan(trace_of(LENGTHS), replace(TWO, requests=20, max_prompt_tokens=15, max_output_tokens=12))
    assert found.clipped == 18
    assert max(r.prompt_tokens for r in found.schedule.requests) == 15
    assert max(r.output_tokens for r in found.schedule.requests) == 12


def test_a_context_is_shared_in_proportion() -> None:
    rows = (Row(600, 200), Row(100, 50), Row(10, 990), Row(799, 1))
    found = plan(trace_of(rows), replace(TWO, requests=4, max_total_tokens=400))
    assert sorted(lengths(found.schedule.requests)) == [(4, 396), (100, 50), (300, 100), (399, 1)]
    assert found.clipped == 3


def test_what_is_too_long_may_be_left_out_and_is_counted() -> None:
    rows = (
        Row(10, 5, session="a", grows=True),
        Row(500, 5, session="a", grows=True, after=0),
        Row(30, 5, session="a", grows=True, after=1),
        Row(7, 5, session="b", grows=True),
    )
    demand = replace(TWO, requests=3, max_total_tokens=100, drop_longer=True, sessions=True)
    left = without_longer(trace_of(rows), demand)
    assert [(r.prompt_tokens, r.after) for r in left.rows] == [(10, None), (30, 0), (7, None)]
    assert (left.emitted, left.dropped) == (3, {"longer than allowed": 1})
    assert sorted(r.prompt_tokens for r in drawn(demand, rows)) == [7, 10, 30]
    with pytest.raises(PlanError, match="every row"):
        drawn(replace(demand, max_prompt_tokens=1), rows)


def test_the_schedule_is_the_same_on_every_machine() -> None:
    tenants = {"a": 1.0, "b": 2.5}
    demand = Demand(parse_arrivals("gamma:2.5"), parse_rate("1..5@60,3"), requests=500, seed=7, tenants=tenants)
    assert (
        plan(trace_of(LENGTHS), demand).schedule.digest
        == "432a9cff6e6526b81bacc3a5300141dfbb83694031509e78c53ec95fc3820953"
    )
    talk = replace(demand, arrivals=Arrivals(), tenants={}, sessions=True, think_seconds=4.0)
    assert (
        plan(trace_of(TALK), talk).schedule.digest == "10f4a9ff963bf2f04bcff577a3af757cce46bdf570da0537868a247d50844c4b"
    )


@pytest.mark.parametrize(
    ("demand", "told"),
    [
        (Demand(requests=5), "need a rate"),
        (Demand(rate=Rate.constant(1.0)), "how many --requests"),
        (Demand(Arrivals(Process.TRACE)), "has no times"),
        (replace(TWO, classes=(ClassShare(RequestClass("x"), 0.5),)), "add up to 1"),
        (replace(TWO, concurrency=3), "closed loop"),
        (replace(TWO, seconds=1e-6), "no request comes"),
    ],
)
def test_what_cannot_be_planned_is_told(demand: Demand, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        drawn(demand)


def test_own_times_take_no_rate() -> None:
    with pytest.raises(PlanError, match="--speedup"):
        drawn(Demand(Arrivals(Process.TRACE), Rate.constant(1.0)), TIMED)
