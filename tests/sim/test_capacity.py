from typing import Any

import pytest

from proxy.sim.capacity import Capacity, capacities
from proxy.sim.study import Study
from proxy.sim.workload import parse_class, sharegpt_like

Row = tuple[float, float | None, float]
"""Rate, median TTFT in seconds, p99 TBT of the strict class in seconds."""


def found(*rows: Row, limit: float = 0.5) -> Capacity:
    classes = (parse_class("strict:0.5:tbt=0.1"), parse_class("free:0.5"))
    study = Study(sharegpt_like(10), ("p",), tuple(rate for rate, _, _ in rows), (1,), 10, classes)
    summary: dict[str, dict[str, dict[str, Any]]] = {
        f"{rate:g}": {
            "p": {"median": {"ttft_s": {"p50": p50}, "tbt_s": {"strict": {"p99": p99}, "free": {"p99": 9.0}}}}
        }
        for rate, p50, p99 in rows
    }
    return capacities(study, summary, limit)["p"]


def test_the_interval_and_a_straight_line_within_it() -> None:
    capacity = found((1.0, 0.3, 0.08), (2.0, 0.7, 0.09))
    assert (capacity.kept_at, capacity.broken_at, capacity.broken) == (1.0, 2.0, "TTFT")
    assert capacity.estimate == pytest.approx(1.5)


def test_what_crosses_its_limit_first_is_what_breaks() -> None:
    capacity = found((1.0, 0.3, 0.09), (2.0, 0.7, 0.19))
    assert capacity.broken == "TBT strict"
    assert capacity.estimate == pytest.approx(1.1)


def test_a_rate_above_a_broken_one_does_not_count() -> None:
    assert found((1.0, 0.3, 0.08), (1.5, 0.9, 0.08), (2.0, 0.4, 0.08)).kept_at == 1.0


def test_rates_may_be_given_in_any_order() -> None:
    assert found((2.0, 0.7, 0.09), (1.0, 0.3, 0.08)).kept_at == 1.0


def test_the_limit_itself_is_kept() -> None:
    assert found((1.0, 0.5, 0.1)) == Capacity(1.0, None, None, None)


def test_beyond_the_study_there_is_no_estimate() -> None:
    assert found((1.0, 0.6, 0.08), (2.0, 0.7, 0.08)) == Capacity(None, 1.0, None, "TTFT")
    assert found((1.0, 0.1, 0.08), (2.0, 0.2, 0.08)) == Capacity(2.0, None, None, None)


def test_a_median_that_never_came_breaks_the_limit() -> None:
    assert found((1.0, 0.3, 0.08), (2.0, None, 0.08)) == Capacity(1.0, 2.0, 1.0, "TTFT")


def test_a_policy_that_was_stopped_early_has_none() -> None:
    study = Study(sharegpt_like(10), ("p",), (1.0, 2.0), (1,), 10)
    assert capacities(study, {"1": {"p": {"median": {"ttft_s": {"p50": 1.0}, "tbt_s": {}}}}, "2": {}}, 0.5) == {}
