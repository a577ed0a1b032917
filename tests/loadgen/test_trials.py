"""A run judged, and the whole search against queues whose answer is known."""

from dataclasses import replace
from math import exp, factorial
from random import Random

import numpy as np
import pytest
from samples import failed, result
from scripted_upstream import request_at

from loadgen.load import SearchedLoad, at_exact_rate, evenly
from loadgen.planning import Demand
from loadgen.results import Result
from loadgen.slo import Slo, parse_slo
from loadgen.stability import growth_of, waiting_at
from loadgen.traces import RowTrace, load
from loadgen.trials import broken_for_sure, find
from proxy.sim.search import Finding, Outcome, SearchPlan, Trial, next_step
from proxy.sim.workload import SHAREGPT_LIKE, ScheduledRequest

SERVICE_SECONDS = 1.0


def arrivals(trial: Trial, requests: int) -> list[ScheduledRequest]:
    rng, at = Random(trial.seed), 0.0
    times = [at := at + rng.expovariate(1.0) for _ in range(requests)]
    return at_exact_rate([request_at(t / trial.rate, index=i) for i, t in enumerate(times)], trial.rate)


def serve_in_turn(workload: list[ScheduledRequest]) -> list[Result]:
    """M/D/1: one server, first come first served, each request takes the same time; its only token comes at the end."""
    free, served = 0.0, []
    for request in workload:
        free = max(free, request.at_seconds) + SERVICE_SECONDS
        record = Result(request, sent_at=request.at_seconds, first_byte_at=free)
        record.on_tokens(free)
        record.finished_at = free
        served.append(record)
    return served


def search(slo: Slo, seeds: range, requests: int) -> Outcome:
    plan, found = SearchPlan(0.3, tuple(seeds)), dict[Trial, Finding]()
    while not isinstance(step := next_step(plan, found), Outcome):
        found |= {t: find(t, serve_in_turn(arrivals(t, requests)), slo, warmup=0.1) for t in step}
    return step


def waits_at_most(seconds: float, load: float) -> float:
    """The distribution of the wait in M/D/1 by Crommelin (1932), for times in units of the service."""
    k = int(seconds)
    return (1 - load) * sum(
        (load * (j - seconds)) ** j / factorial(j) * exp(-load * (j - seconds)) for j in range(k + 1)
    )


def test_the_capacity_of_a_queue_by_its_mean_is_the_one_of_the_formula() -> None:
    # Pollaczek and Khinchine: 1 + load / (2 (1 - load)) is 3 at a load of 0.8.
    outcome = search(parse_slo("ttft_mean<=3s"), range(6), 4000)
    assert outcome.estimate == pytest.approx(0.8, rel=0.02)
    assert outcome.interval is not None
    assert outcome.interval[0] < 0.8 < outcome.interval[1]


def test_the_capacity_of_a_queue_by_its_p90_is_the_one_of_the_formula() -> None:
    load = 0.75
    limit = next(t for t in (i / 1000 for i in range(20_000)) if waits_at_most(t, load) >= 0.9) + SERVICE_SECONDS
    outcome = search(parse_slo(f"ttft_p90<={limit:g}s"), range(6), 4000)
    assert outcome.estimate == pytest.approx(load, rel=0.02)


def test_beyond_its_capacity_a_queue_is_seen_to_grow_and_below_it_not() -> None:
    for utilisation, unstable in ((0.5, False), (0.9, False), (1.1, True), (2.0, True)):
        found = [growth_of(serve_in_turn(arrivals(Trial(utilisation, seed), 1000)), 50.0) for seed in range(8)]
        assert [growth.unstable for growth in found] == [unstable] * 8
    assert found[0].share == pytest.approx(0.5, abs=0.05)


def test_a_queue_of_refused_requests_does_not_wait() -> None:
    refused = [failed(float(i)) for i in range(100)]
    assert not growth_of(refused).unstable
    assert waiting_at([*refused, Result(request_at(5.0))], np.array([6.0])).tolist() == [1.0]


def test_a_run_is_judged_without_its_warm_up() -> None:
    records = [result(float(i), ttft=5.0 if i < 2 else 0.5, index=i) for i in range(11)]
    cold = find(Trial(1.0, 1), records, parse_slo("ttft_max<=1s"))
    warm = find(Trial(1.0, 1), records, parse_slo("ttft_max<=1s"), warmup=0.2)
    assert cold.margins["ttft_max"].margin > 0
    assert warm.margins["ttft_max"].margin < 0
    assert warm.figures["requests"] == 9


def test_a_figure_that_never_came_is_a_finite_margin() -> None:
    found = find(Trial(1.0, 1), [failed(), failed()], parse_slo("ttft_p50<=1s"))
    assert (found.margins["ttft_p50"].value, found.margins["ttft_p50"].margin) == (None, 99.0)


def test_a_limit_is_given_up_only_when_nothing_can_save_it() -> None:
    slo = parse_slo("ttft_p50<=1s, attainment>=50%")
    waiting = [Result(request_at(float(i), index=i), sent_at=float(i)) for i in range(6)]
    served = [result(float(6 + i), index=6 + i) for i in range(4)]
    planned = ["gold"] * 10
    assert broken_for_sure(slo, [*waiting, *served], 1.0, planned) is None
    assert broken_for_sure(slo, [*waiting, *served], 5.5, planned) is None  # five are too late by then
    assert broken_for_sure(slo, [*waiting, *served], 6.5, planned) == "ttft_p50"
    assert broken_for_sure(slo, [failed(index=i) for i in range(6)], 0.0, planned) == "ttft_p50"
    assert broken_for_sure(parse_slo("attainment[other]>=50%"), waiting, 9.0, planned) is None


@pytest.fixture(scope="module")
def trace() -> RowTrace:
    found = load(SHAREGPT_LIKE)
    assert isinstance(found, RowTrace)
    return found


def test_even_draws_have_the_traces_lengths_and_exactly_the_rate(trace: RowTrace) -> None:
    whole = sum(row.prompt_tokens for row in trace.rows) / len(trace.rows)
    even = SearchedLoad(trace, Demand(requests=400))
    for seed in range(3):
        drawn = even.draw(2.0, seed)
        assert drawn[-1].at_seconds == pytest.approx(200.0)
        assert sum(r.prompt_tokens for r in drawn) / 400 == pytest.approx(whole, rel=0.01)
    assert even.draw(2.0, 2) == drawn
    assert even.draw(2.0, 1) != drawn


def test_a_trace_whose_requests_share_text_keeps_its_order(trace: RowTrace) -> None:
    shared = replace(trace, rows=tuple(replace(row, blocks=(1,), block_tokens=16) for row in trace.rows[:5]))
    assert evenly(shared, 3, 0) is shared
    assert len(evenly(trace, 3, 0).rows) == 3


def test_draws_at_two_rates_are_the_same_requests_closer_together(trace: RowTrace) -> None:
    for even in (True, False):
        slow, quick = (SearchedLoad(trace, Demand(requests=50), even=even).draw(rate, 1) for rate in (1.0, 2.0))
        assert [r.prompt_tokens for r in slow] == [r.prompt_tokens for r in quick]
        assert [r.at_seconds / 2 for r in slow] == pytest.approx([r.at_seconds for r in quick], abs=1e-5)
