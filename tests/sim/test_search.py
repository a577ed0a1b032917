import math
from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.sim.search import Finding, Margin, Outcome, SearchPlan, Trial, judged, next_step

Measure = Callable[[Trial], Finding]


def finding(trial: Trial, margin: float, *, deviation: float = 0.01, unstable: bool = False) -> Finding:
    return Finding(trial, {"ttft_p50": Margin(math.exp(margin), margin, deviation)}, unstable)


def server(capacity: float, *, steepness: float = 3.0, noise: float = 0.0) -> Measure:
    """One whose margin is zero at ``capacity``; chance goes by the seed, and is the same at every rate."""

    def measure(trial: Trial) -> Finding:
        chance = Random(trial.seed).gauss(0, noise) if noise else 0.0
        return finding(trial, steepness * math.log(trial.rate / capacity) + chance)

    return measure


def search(plan: SearchPlan, measure: Measure) -> tuple[Outcome, list[Trial]]:
    found: dict[Trial, Finding] = {}
    order: list[Trial] = []
    while not isinstance(step := next_step(plan, found), Outcome):
        assert step
        assert len(step) <= max(1, plan.at_once)
        for trial in step:
            assert trial not in found
            found[trial] = measure(trial)
            order.append(trial)
    return step, order


@given(st.floats(0.1, 100), st.floats(0.1, 100))
def test_the_capacity_is_found_to_the_tolerance_from_anywhere(capacity: float, start: float) -> None:
    outcome, _ = search(SearchPlan(start, (1, 2, 3)), server(capacity))
    assert outcome.kept_at is not None
    assert outcome.broken_at is not None
    assert outcome.estimate is not None
    assert outcome.kept_at <= capacity * 1.0001
    assert outcome.broken_at >= capacity * 0.9999
    assert outcome.broken_at / outcome.kept_at <= 1.0251
    assert outcome.estimate == pytest.approx(capacity, rel=0.001)
    assert outcome.breaks == ("ttft_p50",)


def test_a_clear_run_needs_no_other_seed_and_an_unclear_one_all() -> None:
    _, order = search(SearchPlan(1.0, tuple(range(6))), server(1.42, noise=0.2))
    runs = {rate: sum(t.rate == rate for t in order) for rate in {t.rate for t in order}}
    assert runs[2.0] in (1, 3)
    assert runs[max(rate for rate in runs if rate < 1.42)] == 6
    assert all(number in (1, 3, 4, 5, 6) for number in runs.values())
    assert 1 in runs.values()


def test_every_rate_gets_the_same_seeds() -> None:
    _, order = search(SearchPlan(1.0, (7, 8, 9, 10)), server(1.42, noise=0.1))
    for rate in {t.rate for t in order}:
        seeds = [t.seed for t in order if t.rate == rate]
        assert seeds == [7, 8, 9, 10][: len(seeds)]


def test_runs_at_once_do_not_change_the_outcome() -> None:
    alone, _ = search(SearchPlan(1.0, tuple(range(5))), server(1.42, noise=0.3))
    together, _ = search(SearchPlan(1.0, tuple(range(5)), at_once=2), server(1.42, noise=0.3))
    assert alone == together


def test_an_interrupted_search_goes_on_from_its_findings() -> None:
    plan, measure = SearchPlan(1.0, tuple(range(4))), server(1.42, noise=0.1)
    whole, order = search(plan, measure)
    kept = {trial: measure(trial) for trial in order[: len(order) // 2]}
    rest = 0
    while not isinstance(step := next_step(plan, kept), Outcome):
        kept |= {trial: measure(trial) for trial in step}
        rest += len(step)
    assert step == whole
    assert rest == len(order) - len(order) // 2
    assert judged(plan, kept) == list(whole.judgements)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    hits = 0
    for base in range(40):
        plan = SearchPlan(1.0, tuple(range(100 * base, 100 * base + 6)))
        outcome, _ = search(plan, server(1.42, noise=0.1))
        assert outcome.interval is not None
        hits += outcome.interval[0] <= 1.42 <= outcome.interval[1]
    assert hits >= 34


def test_a_queue_that_grows_breaks_what_its_median_keeps() -> None:
    def measure(trial: Trial) -> Finding:
        return finding(trial, -0.1, unstable=trial.rate > 3.0)

    outcome, _ = search(SearchPlan(1.0, (1, 2, 3)), measure)
    assert outcome.breaks == ("queue",)
    assert outcome.kept_at is not None
    assert outcome.kept_at == pytest.approx(3.0, rel=0.025)


def test_the_first_limit_to_break_decides() -> None:
    def measure(trial: Trial) -> Finding:
        def margin(capacity: float) -> Margin:
            return Margin(None, 3 * math.log(trial.rate / capacity), 0.01)

        return Finding(trial, {"ttft_p50": margin(2.0), "tbt_p99[strict]": margin(1.5)})

    outcome, _ = search(SearchPlan(1.0, (1, 2, 3)), measure)
    assert outcome.breaks == ("tbt_p99[strict]",)
    assert outcome.estimate == pytest.approx(1.5, rel=0.002)


@pytest.mark.parametrize(("capacity", "kept", "broken"), [(1e9, 8.0, None), (1e-9, None, 0.5)])
def test_a_capacity_out_of_reach_is_told_as_such(capacity: float, kept: float | None, broken: float | None) -> None:
    outcome, _ = search(SearchPlan(1.0, (1,), least_seeds=1, lowest=0.5, highest=8.0), server(capacity))
    assert (outcome.kept_at, outcome.broken_at, outcome.estimate) == (kept, broken, None)


def test_what_was_given_up_early_is_broken() -> None:
    def measure(trial: Trial) -> Finding:
        if trial.rate < 3:
            return finding(trial, -2.0)
        return Finding(trial, {"ttft_p50": Margin(0.1, -2.0, 0.01)}, ended_early="ttft_p50")

    outcome, order = search(SearchPlan(1.0, (1, 2, 3)), measure)
    assert outcome.breaks == ("ttft_p50",)
    assert {t.seed for t in order if t.rate > 3} == {1}


def test_of_shares_the_difference_counts_and_a_single_run_is_clear_only_beyond_chance() -> None:
    def share(margin: float, deviation: float) -> Mapping[str, Margin]:
        return {"attainment": Margin(0.99 - margin, margin, deviation, share=True)}

    plan, trial = SearchPlan(1.0, (1, 2, 3)), Trial(1.0, 1)
    assert next_step(plan, {trial: Finding(trial, share(-0.01, 0.005))}) == [Trial(1.0, 2)]
    assert next_step(plan, {trial: Finding(trial, share(-0.01, 0.002))}) == [Trial(2.0, 1)]


@pytest.mark.parametrize(
    ("start", "seeds", "least"), [(0.0, (1,), 1), (1.0, (), 1), (1.0, (1, 1), 1), (1.0, (1, 2), 3), (math.inf, (1,), 1)]
)
def test_a_plan_that_makes_no_sense_is_refused(start: float, seeds: tuple[int, ...], least: int) -> None:
    with pytest.raises(ValueError, match=r"a search needs|seeds differ"):
        SearchPlan(start, seeds, least)
