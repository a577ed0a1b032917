"""``proxy.core.feedback``: the delay of the loop, from which step took a prompt in."""

from collections.abc import Sequence
from itertools import cycle
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.feedback import DelaySnapshot, FeedbackDelay


def catching_step(truth: float, steps: Sequence[float], phase: float, steps_ahead: int = 0) -> list[float]:
    """When the step that takes a prompt in began, and the two before it, in seconds after its release.

    The engine is ``truth`` seconds away and its ``steps``, over and over, last so long; the prompt is released when
    ``phase`` of one step is over, the third.
    """
    begins = [-(steps[0] + steps[1] + phase * steps[2])]
    for seconds in cycle(steps):
        if len(begins) > 2 and begins[-1 - steps_ahead] >= truth:
            return begins[:-4:-1]
        begins.append(begins[-1] + seconds)
    raise AssertionError


def learn_all(
    delay: FeedbackDelay, truth: float, *, count: int = 1000, steps_ahead: int = 0, spread: float = 0
) -> None:
    """Prompts released at any phase of steps that last 25 to 95 ms, on a way that lasts up to ``spread`` longer."""
    random = Random(1)
    for _ in range(count):
        steps = [random.uniform(0.025, 0.095) for _ in range(20)]
        delay.learn(catching_step(truth + random.uniform(0, spread), steps, random.random(), steps_ahead))


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("truth", [0.005, 0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("start", [0.0, 0.005, 0.15])
def test_the_delay_and_the_steps_ahead_are_learnt_wherever_it_starts(
    start: float, truth: float, steps_ahead: int
) -> None:
    delay = FeedbackDelay(start)
    learn_all(delay, truth, steps_ahead=steps_ahead)
    assert delay.steps == steps_ahead
    assert truth * 0.7 - 0.002 < delay.least_seconds <= truth * 1.05
    assert truth * 0.95 <= delay.seconds < truth * 1.3 + 0.005


@given(
    start=st.floats(0, 0.2),
    truth=st.floats(0.001, 0.12),
    samples=st.lists(
        st.tuples(st.lists(st.floats(0.02, 0.09), min_size=20, max_size=20), st.floats(0.01, 0.99)), max_size=60
    ),
)
def test_a_delay_that_never_changes_is_passed_by_no_more_than_a_quarter(
    start: float, truth: float, samples: list[tuple[list[float], float]]
) -> None:
    delay = FeedbackDelay(start)
    for steps, phase in samples:
        delay.learn(catching_step(truth, steps, phase))
        assert delay.least_seconds <= max(truth, delay.seconds)
        assert delay.seconds <= max(start, 1.25 * truth)


@given(st.lists(st.tuples(st.floats(-1, 20), st.floats(0, 1), st.floats(0, 1)), max_size=100))
def test_whatever_is_seen_the_bounds_stay_within_reason(samples: list[tuple[float, float, float]]) -> None:
    delay = FeedbackDelay(0.005)
    for began, last, before_last in samples:
        delay.learn([began, began - last, began - last - before_last])
        assert 0 <= delay.least_seconds <= delay.seconds
        assert delay.seconds <= 1.25 * 0.25
        assert delay.steps in (0, 1)


def test_a_delay_too_short_is_corrected_within_a_few_prompts_one_too_long_in_many() -> None:
    short, long = FeedbackDelay(0.005), FeedbackDelay(0.1)
    learn_all(short, 0.1, count=12)
    learn_all(long, 0.005, count=12)
    assert short.seconds + short.steps * 0.06 > 0.08, "a step ahead makes up for a delay of one"
    assert long.seconds > 0.05


def test_a_way_that_grew_longer_or_shorter_is_followed() -> None:
    delay = FeedbackDelay(0.005)
    for truth in (0.08, 0.01, 0.12):
        learn_all(delay, truth)
        assert truth * 0.95 <= delay.seconds < truth * 1.3 + 0.005


def test_with_jitter_the_bounds_enclose_most_of_it() -> None:
    delay = FeedbackDelay(0.005)
    learn_all(delay, 0.03, spread=0.04)
    assert delay.least_seconds < 0.045
    assert 0.055 < delay.seconds < 0.08
    assert delay.steps == 0


def test_a_prompt_that_waited_inside_the_engine_for_long_tells_nothing() -> None:
    delay = FeedbackDelay(0.005)
    learn_all(delay, 0.04)
    before = (delay.seconds, delay.least_seconds, delay.steps)
    for waited in (0.3, 2.0, 60.0):
        for _ in range(50):
            delay.learn([waited + 0.04, waited, waited - 0.04])
    assert (delay.seconds, delay.least_seconds, delay.steps) == before


def test_the_delay_stays_below_what_a_prompt_may_wait_for_nothing_else() -> None:
    delay = FeedbackDelay(0.005)
    for _ in range(50):
        delay.learn([2.1, 1.1, 0.1])
        assert delay.seconds <= 0.35


def test_an_engine_that_begins_to_schedule_ahead_is_noticed() -> None:
    delay = FeedbackDelay(0.005)
    learn_all(delay, 0.03)
    assert delay.steps == 0
    learn_all(delay, 0.03, steps_ahead=1)
    assert delay.steps == 1
    learn_all(delay, 0.03)
    assert delay.steps == 0


class TestSnapshot:
    """What an earlier run has learnt of an engine's delay."""

    def test_one_that_begins_with_it_believes_and_learns_the_same(self) -> None:
        first = FeedbackDelay(0.005)
        learn_all(first, 0.08, count=60, steps_ahead=1)
        learnt = first.snapshot()
        assert learnt is not None
        second = FeedbackDelay(0.005)
        second.restore(learnt)
        for _ in range(2):
            assert second.steps == first.steps == 1
            assert (second.seconds, second.least_seconds) == (first.seconds, first.least_seconds)
            assert second.snapshot() == first.snapshot()
            learn_all(first, 0.05, count=30)
            learn_all(second, 0.05, count=30)

    def test_what_was_hardly_learnt_is_not_kept(self) -> None:
        delay = FeedbackDelay(0.005)
        learn_all(delay, 0.08, count=10)
        assert delay.snapshot() is None

    def test_a_beginning_above_all_that_is_learnt_can_be_kept(self) -> None:
        delay = FeedbackDelay(5.0)
        learn_all(delay, 0.02, count=20)
        learnt = delay.snapshot()
        assert learnt is not None
        assert max(learnt.most_seconds) <= 0.3125

    @pytest.mark.parametrize(
        "figures",
        [
            ((0.0,), (0.0, 0.0), (0.0, 0.0)),
            ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0, 0.0)),
            ((0.0, -0.1), (0.0, 0.0), (0.0, 0.0)),
            ((0.0, 0.0), (0.0, 9.0), (0.0, 0.0)),
            ((0.0, 0.0), (float("nan"), 0.0), (0.0, 0.0)),
            ((0.0, 0.0), (0.0, 0.0), (0.0, 1.1)),
        ],
    )
    def test_no_other_figures_can_be_one(self, figures: tuple[tuple[float, ...], ...]) -> None:
        with pytest.raises(ValueError, match=r"delay|misses"):
            DelaySnapshot(*figures)
