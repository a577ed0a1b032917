"""``proxy.core.steplog``: what the last steps held, corrected by what came out of them."""

from typing import Any

import pytest

from proxy.core.feedback import FeedbackDelay
from proxy.core.steplog import _MOST_DOUBTS, Prefill, StepLog
from proxy.core.stepmodel import OnlineStepModel, StepLoad


def make_prefill(remaining: int = 100, *, context: int | None = None, **fields: Any) -> Prefill:
    return Prefill(
        remaining,
        joins=1,
        may_join=1,
        released_at=0.0,
        context=context or remaining,
        tbt_seconds=None,
        **fields,
    )


class Log:
    """Steps of 0.1 s, each with two decodes, that are all seen."""

    def __init__(self, delay_seconds: float = 0.005) -> None:
        self.delay = FeedbackDelay(delay_seconds)
        self.log = StepLog(self.delay)
        self.number = 0

    @property
    def now(self) -> float:
        return self.number / 10

    def step(self, *work: tuple[Prefill, int], observed: bool = True) -> tuple[StepLoad | None, int, int]:
        """End a step that is believed to have held ``work``; what is now known of the one before it."""
        before, self.number = self.now, self.number + 1
        judged = self.log.next_step(before, self.now, 2, 1000, joins=self.number + 1, observed=observed)
        assert judged.seconds == pytest.approx(0.1 if self.number > 1 else 0.0)
        for prefill, tokens in work:
            self.log.add(prefill, tokens)
        return judged.load, judged.undone, judged.spent

    def output(self, prefill: Prefill, after: float = 0.001) -> None:
        prefill.over = True
        self.log.on_output(prefill, self.now + after)


def test_the_first_step_has_none_before_it_to_judge() -> None:
    assert Log().step() == (None, 0, 0)


def test_a_step_without_prompts_is_judged_as_one_of_decodes() -> None:
    log = Log()
    log.step()
    assert log.step() == (StepLoad(0, 2, 1000), 0, 0)


def test_work_that_shows_its_output_is_confirmed() -> None:
    log, prefill = Log(), make_prefill(100, context=400)
    log.step((prefill, 100))
    assert prefill.remaining == 0
    log.output(prefill)
    assert log.step() == (StepLoad(100, 2, 1000, 100 * (300 + 50), 1), 0, 0)


def test_work_whose_output_does_not_come_is_taken_back() -> None:
    log, prefill = Log(), make_prefill(100)
    log.step((prefill, 100))
    assert log.step() == (StepLoad(0, 2, 1000), 100, 0)
    assert (prefill.remaining, prefill.doubts, prefill.joins, prefill.may_join) == (100, 1, 3, 2)


def test_the_output_that_was_not_expected_tells_where_the_work_was() -> None:
    log, prefill = Log(), make_prefill(100)
    log.step()
    log.output(prefill)  # moments after the end of the step that we believed without it
    load, undone, spent = log.step()
    assert load == StepLoad(100, 2, 1000, 5000, 1)
    assert (undone, spent, prefill.remaining) == (0, 0, 0)


def test_an_output_just_before_the_token_that_keeps_the_clock_is_of_the_step_that_ends() -> None:
    log, prefill = Log(), make_prefill(100)
    log.step()
    log.output(prefill, after=0.099)
    load, _, spent = log.step()
    assert load == StepLoad(0, 2, 1000)
    assert spent == 100, "the step that has just ended had that much less for others"
    assert log.step()[0] == StepLoad(100, 2, 1000, 5000, 1)


def test_the_middle_of_a_long_prompt_shows_nothing_and_is_not_doubted() -> None:
    log, prefill = Log(), make_prefill(250)
    log.step((prefill, 100))
    assert log.step((prefill, 100)) == (StepLoad(100, 2, 1000, 5000, 1), 0, 0)
    assert log.step((prefill, 50)) == (StepLoad(100, 2, 1000, 100 * 150, 1), 0, 0)
    assert log.step() == (StepLoad(0, 2, 1000), 50, 0), "but its end is"


def test_an_answer_in_one_piece_is_believed_without_an_output() -> None:
    log, prefill = Log(), make_prefill(100, shows_first_token=False)
    log.step((prefill, 100))
    assert log.step() == (StepLoad(100, 2, 1000, 5000, 1), 0, 0)
    assert prefill.remaining == 0


def test_a_prompt_whose_output_is_kept_back_is_taken_for_done_in_the_end() -> None:
    log, prefill = Log(), make_prefill(100)
    log.step((prefill, 100))
    for _ in range(_MOST_DOUBTS):
        assert log.step()[1] == 100
        log.log.add(prefill, 100)
    for _ in range(3):
        assert log.step()[1] == 0
    assert prefill.remaining == 0


def test_a_request_that_is_over_is_neither_taken_back_nor_doubted() -> None:
    log, prefill = Log(), make_prefill(100)
    log.step((prefill, 100))
    prefill.over = True
    assert log.step() == (StepLoad(100, 2, 1000, 5000, 1), 0, 0)


def test_steps_that_were_not_seen_are_not_learnt_from_but_still_corrected() -> None:
    log, prefill = Log(), make_prefill(100)
    log.step((prefill, 100), observed=False)
    assert log.step() == (None, 100, 0)


# -- the delay --


def delay_after(releases: dict[int, float], *, tells: bool = True, unseen: int = -1) -> FeedbackDelay:
    """Steps of 0.1 s, of which step ``n`` takes in what was released so many seconds before it began."""
    log = Log(0.0)
    for n in range(max(releases) + 3):
        log.step(observed=n != unseen)
        if n in releases:
            prefill = make_prefill(tells_delay=tells)
            prefill.released_at = log.now - 0.1 - releases[n]
            log.output(prefill)
    return log.delay


def is_learnt(delay: FeedbackDelay) -> bool:
    return (delay.seconds, delay.steps) != (0.0, 0)


def test_a_step_missed_tells_of_the_delay() -> None:
    assert is_learnt(delay_after({5: 0.17}))
    assert not is_learnt(delay_after({5: 0.05})), "no delay is as good an explanation"


def test_who_may_have_waited_for_something_else_tells_nothing() -> None:
    assert not is_learnt(delay_after({5: 0.17}, tells=False))


def test_nothing_is_learnt_over_a_gap() -> None:
    assert not is_learnt(delay_after({1: 0.17})), "the step before the one before has not been seen"
    assert not is_learnt(delay_after({5: 0.17}, unseen=4))


# -- judged by its duration --


def trained() -> OnlineStepModel:
    """0.03 s and 0.1 ms for each prompt token, within 2 ms."""
    model = OnlineStepModel()
    for n in range(400):
        tokens = n * 37 % 1000
        model.observe(StepLoad(tokens, 2, 1000, prefills=int(tokens > 0)), 0.03 + 1e-4 * tokens + (n % 5 - 2) * 1e-3)
    assert model.trusted
    assert 0.01 < model.prompt_errors.p95 < 0.05
    return model


def doubted(model: OnlineStepModel, held: int, *sizes: int, observed: bool = True, **fields: bool) -> list[int]:
    """Which of the prompts believed to be in a step are not, when it took as long as ``held`` tokens take."""
    log = StepLog(FeedbackDelay(0.005))
    seconds = 0.03 + 1e-4 * held
    log.next_step(0.0, seconds, 2, 1000, joins=2, observed=observed)
    prefills = [make_prefill(size, **fields) for size in sizes]
    for prefill in prefills:
        log.add(prefill, prefill.remaining)
    undone = log.doubt(model, joins=2)
    assert undone == sum(p.remaining for p in prefills)
    return [n for n, p in enumerate(prefills) if p.remaining]


def test_a_step_too_short_for_what_was_sent_last_did_not_hold_it() -> None:
    model = trained()
    assert doubted(model, 700, 300, 400) == []
    assert doubted(model, 300, 300, 400) == [1]
    assert doubted(model, 0, 300, 400) == [0, 1]


def test_a_step_that_took_longer_than_all_of_it_held_all_of_it() -> None:
    assert doubted(trained(), 3000, 300, 400) == []


def test_a_difference_within_the_models_error_settles_nothing() -> None:
    assert doubted(trained(), 300, 300, 20) == []


def test_a_model_that_has_seen_little_and_a_step_not_seen_settle_nothing() -> None:
    assert doubted(OnlineStepModel(), 0, 3000) == []
    assert doubted(trained(), 0, 300, observed=False) == []


def test_what_is_over_was_there_whatever_the_step_took() -> None:
    assert doubted(trained(), 0, 300, over=True) == []
