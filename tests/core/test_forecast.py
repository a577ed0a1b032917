"""``proxy.core.forecast``: what the steps to come hold, when they end, and which takes in what is sent now."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.forecast import HORIZON, Spread, foresee, intake
from proxy.core.steplog import Prefill
from proxy.core.stepmodel import OnlineStepModel, StepLoad


def make_prefill(remaining: int, context: int | None = None) -> Prefill:
    return Prefill(remaining, joins=0, may_join=0, released_at=0.0, context=context or remaining, tbt_seconds=None)


def tokens(loads: list[StepLoad]) -> list[int]:
    return [load.prefill_tokens for load in loads]


def spread_of(*prefills: tuple[int, int], budget: int = 100, under_way: int = 7) -> list[StepLoad]:
    """``prefills``: tokens, and how many steps after the one under way each joins."""
    spread = Spread(under_way, budget)
    spread.add((make_prefill(size), under_way + later) for size, later in prefills)
    return list(spread.loads(decodes=3, kv_tokens=500))


# -- what the steps hold --


def test_nothing_released_leaves_decodes_in_every_step() -> None:
    assert spread_of() == [StepLoad(0, 3, 500)] * HORIZON


def test_a_prompt_is_worked_on_from_the_step_that_it_joins_a_budget_at_a_time() -> None:
    assert tokens(spread_of((250, 0))) == [100, 100, 50, 0, 0]
    assert tokens(spread_of((250, 2))) == [0, 0, 100, 100, 50]
    assert tokens(spread_of((250, -5))) == [100, 100, 50, 0, 0]


def test_what_is_released_first_goes_first_and_the_next_fills_the_step() -> None:
    loads = spread_of((30, 0), (90, 0), (10, 1))
    assert tokens(loads) == [100, 30, 0, 0, 0]
    assert [load.prefills for load in loads] == [2, 2, 0, 0, 0]


def test_a_prompt_that_joins_later_does_not_hold_up_those_after_it() -> None:
    assert tokens(spread_of((80, 1), (80, 0))) == [80, 80, 0, 0, 0]


def test_who_joins_beyond_the_horizon_is_counted_in_its_last_step() -> None:
    assert tokens(spread_of((40, 30))) == [0, 0, 0, 0, 40]


def test_attention_is_over_all_of_the_prompt_before_each_token() -> None:
    spread = Spread(0, 100)
    spread.add([(make_prefill(150, context=1000), 0)])
    loads = list(spread.loads(0, 0))
    assert [load.attention for load in loads] == [100 * (850 + 50), 50 * (950 + 25), 0, 0, 0]


@given(prefills=st.lists(st.tuples(st.integers(0, 400), st.integers(-2, 9)), max_size=12), budget=st.integers(1, 300))
def test_no_step_holds_more_than_its_budget_and_no_prompt_counts_twice(
    prefills: list[tuple[int, int]], budget: int
) -> None:
    loads = spread_of(*prefills, budget=budget)
    assert len(loads) == HORIZON
    assert all(0 <= load.prefill_tokens <= budget for load in loads)
    released = sum(size for size, _ in prefills)
    assert sum(tokens(loads)) <= released
    if sum(tokens(loads)) < released:
        assert loads[-1].prefill_tokens == budget, "what is left is left for want of room alone"


@given(
    prefills=st.lists(st.tuples(st.integers(1, 400), st.integers(-2, 9)), max_size=12),
    budget=st.integers(1, 5000),
    data=st.data(),
)
def test_who_is_taken_out_leaves_what_there_would_be_without(
    prefills: list[tuple[int, int]], budget: int, data: st.DataObject
) -> None:
    added = [(make_prefill(size, context=size + 77), 7 + later) for size, later in prefills]
    spread = Spread(7, budget)
    spread.add(added)
    while added and spread.whole:
        spread.take_out(*added.pop(data.draw(st.integers(0, len(added) - 1))))
        left = Spread(7, budget)
        left.add(added)
        assert list(spread.loads(3, 500)) == list(left.loads(3, 500))


def test_whole_is_a_spread_whose_prompts_all_find_room_in_the_step_that_they_join() -> None:
    for budget, whole in ((100, True), (99, False)):
        spread = Spread(0, budget)
        spread.add([(make_prefill(40), 1), (make_prefill(60), 1), (make_prefill(20), 0)])
        assert spread.whole is whole


# -- when they end --


def test_the_steps_follow_each_other_as_long_as_the_model_says() -> None:
    model = OnlineStepModel()
    loads = spread_of((250, 1))
    ends = [5.0, *foresee(loads, model, began_at=5.0, now=5.001)]
    assert [b - a for a, b in pairwise(ends)] == pytest.approx([model.predict(load) for load in loads])


def test_a_step_that_lasts_longer_than_predicted_ends_now_at_the_earliest() -> None:
    model = OnlineStepModel()
    loads = spread_of()
    ends = list(foresee(loads, model, began_at=5.0, now=7.0))
    assert ends[:2] == [7.0, 7.0 + model.predict(loads[1])]


# -- which step takes it in --


def taken_in(
    soonest: float,
    latest: float,
    ahead: int,
    error: float,
    ends_at: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5),
) -> range:
    """The step under way began at 0."""
    return intake(0.0, ends_at, soonest, latest, steps_ahead=ahead, error_seconds=error)


@pytest.mark.parametrize(
    ("arrives", "step"), [(-0.01, 0), (0.0, 1), (0.05, 1), (0.1, 1), (0.11, 2), (0.25, 3), (0.35, 4), (9.0, 4)]
)
def test_a_step_takes_in_what_came_before_it_began(arrives: float, step: int) -> None:
    assert taken_in(arrives, arrives, 0, 0.0) == range(step, step + 1)


@pytest.mark.parametrize(("arrives", "step"), [(-0.01, 1), (0.0, 2), (0.05, 2), (0.11, 3), (0.25, 4), (9.0, 4)])
def test_an_engine_that_schedules_ahead_takes_it_in_a_step_later(arrives: float, step: int) -> None:
    assert taken_in(arrives, arrives, 1, 0.0) == range(step, step + 1)


def test_who_may_come_before_or_after_a_steps_end_may_be_in_either() -> None:
    assert taken_in(0.05, 0.15, 0, 0.0) == range(1, 3)
    assert taken_in(0.05, 0.25, 0, 0.0) == range(1, 4)


def test_the_ends_of_steps_are_known_only_within_the_models_error() -> None:
    assert taken_in(0.095, 0.095, 0, 0.0) == range(1, 2)
    assert taken_in(0.095, 0.095, 0, 0.01) == range(1, 3)
    assert taken_in(0.105, 0.105, 0, 0.01) == range(1, 3)


@given(
    durations=st.lists(st.floats(0.001, 1), min_size=HORIZON, max_size=HORIZON),
    soonest=st.floats(-1, 3),
    spread_seconds=st.floats(0, 1),
    error=st.floats(0, 0.2),
    ahead=st.integers(0, 1),
)
def test_there_is_always_a_step_and_it_is_foreseen(
    durations: list[float], soonest: float, spread_seconds: float, error: float, ahead: int
) -> None:
    ends = [sum(durations[: n + 1]) for n in range(HORIZON)]
    steps = taken_in(soonest, soonest + spread_seconds, ahead, error, ends)
    assert len(steps) >= 1
    assert ahead <= steps[0] <= steps[-1] < HORIZON
    certain = taken_in(soonest, soonest, ahead, 0.0, ends)
    assert certain[0] in steps, "doubt adds steps and takes none away"


def test_no_further_step_is_foreseen_than_it_takes() -> None:
    asked_for: list[float] = []

    def ends() -> Iterator[float]:
        for end in (0.1, 0.2, 0.3):
            asked_for.append(end)
            yield end

    assert intake(0.0, ends(), 0.05, 0.05, steps_ahead=0, error_seconds=0.01) == range(1, 2)
    assert asked_for == [0.1]
    assert intake(0.0, ends(), -0.05, -0.01, steps_ahead=0, error_seconds=0.01) == range(1)
    assert asked_for == [0.1]
