from math import log
from typing import Any

import pytest

from proxy.sim.capacity import Capacity, capacities
from proxy.sim.study import Study
from proxy.sim.workload import parse_class, sharegpt_like

Row = tuple[float, float | None, float | None]
"""Rate, median TTFT in seconds, p99 TBT of the strict class in seconds."""


def found(*rows: Row, limit: float = 0.5) -> Capacity:
    classes = (parse_class("strict:0.5:tbt=0.1"), parse_class("free:0.5"))
    study = Study(sharegpt_like(10), ("p",), tuple(rate for rate, _, _ in rows), (1,), 10, classes)
    return capacities(study, [run(*row) for row in rows], limit)["p"]


def run(rate: float, p50: float | None, p99: float | None, seed: int = 1) -> dict[str, Any]:
    tbt = {"strict": {"p99": p99}, "free": {"p99": 9.0}}
    return {"policy": "p", "rate": rate, "seed": seed, "ttft_s": {"p50": p50}, "tbt_s": tbt}


def test_the_two_rates_and_a_straight_line_between_their_logarithms() -> None:
    capacity = found((1.0, 0.3, 0.08), (2.0, 0.7, 0.09))
    assert (capacity.kept_at, capacity.broken_at, capacity.broken) == (1.0, 2.0, "TTFT")
    assert capacity.estimate == pytest.approx(2 ** (log(0.6) / log(0.6 / 1.4)))


def test_what_crosses_its_limit_first_is_what_breaks() -> None:
    capacity = found((1.0, 0.3, 0.09), (2.0, 0.7, 0.19))
    assert capacity.broken == "TBT strict"
    assert capacity.estimate == pytest.approx(2 ** (log(0.9) / log(0.9 / 1.9)))


def test_a_rate_above_a_broken_one_does_not_count() -> None:
    assert found((1.0, 0.3, 0.08), (1.5, 0.9, 0.08), (2.0, 0.4, 0.08)).kept_at == 1.0


def test_rates_may_be_given_in_any_order() -> None:
    assert found((2.0, 0.7, 0.09), (1.0, 0.3, 0.08)).kept_at == 1.0


def test_the_limit_itself_is_kept() -> None:
    assert found((1.0, 0.5, 0.1)) == Capacity(1.0, None, None, None, None)


def test_beyond_the_study_there_is_no_estimate() -> None:
    assert found((1.0, 0.6, 0.08), (2.0, 0.7, 0.08)) == Capacity(None, 1.0, None, None, "TTFT")
    assert found((1.0, 0.1, 0.08), (2.0, 0.2, 0.08)) == Capacity(2.0, None, None, None, None)


def test_a_median_that_never_came_breaks_the_limit() -> None:
    capacity = found((1.0, 0.3, 0.08), (2.0, None, 0.08))
    assert (capacity.kept_at, capacity.broken_at, capacity.broken) == (1.0, 2.0, "TTFT")
    assert capacity.estimate is not None
    assert 1.0 < capacity.estimate < 1.2, "near the rate where it came"


def test_a_class_that_some_run_lacks_is_held_against_none() -> None:
    assert found((1.0, 0.3, None), (2.0, 0.4, 0.5)) == Capacity(2.0, None, None, None, None)


def test_seeds_that_differ_make_an_interval() -> None:
    study = Study(sharegpt_like(10), ("p",), (1.0, 1.1), (1, 2, 3), 10, ())
    runs = [
        run(rate, p50 * (1 + 0.02 * seed), None, seed) for rate, p50 in ((1.0, 0.4), (1.1, 0.6)) for seed in (1, 2, 3)
    ]
    capacity = capacities(study, runs, 0.5)["p"]
    assert capacity.interval is not None
    assert capacity.estimate is not None
    assert 1.0 < capacity.interval[0] < capacity.estimate < capacity.interval[1] < 1.1


def test_a_policy_that_was_stopped_early_has_none() -> None:
    study = Study(sharegpt_like(10), ("p",), (1.0, 2.0), (1,), 10)
    assert capacities(study, [run(1.0, 1.0, None)], 0.5) == {}
