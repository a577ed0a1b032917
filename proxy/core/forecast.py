"""The steps to come of an engine: what they will hold, and which of them takes in what is sent now."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from proxy.core.stepmodel import StepLoad

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from proxy.core.steplog import Prefill
    from proxy.core.stepmodel import OnlineStepModel

HORIZON = 5
"""Steps looked ahead: one under way, one composed already, two for prompts on their way, one for whatever is left."""


class Spread:
    """Prompts over the next ``HORIZON`` steps, the one under way first.

    A step takes prompts in the order of their release, as far as its budget goes; the next takes what is left of
    those, and what came meanwhile. So one that is released adds to what is there, and changes nothing of it.
    """

    __slots__ = ("attention", "prefill_budget", "prefills", "step_under_way", "tokens", "whole")

    def __init__(self, step_under_way: int, prefill_budget: int) -> None:
        self.step_under_way = step_under_way
        self.prefill_budget = prefill_budget
        # For each step, what ``StepLoad`` has of it.
        self.tokens = [0] * HORIZON
        self.attention = [0.0] * HORIZON
        self.prefills = [0] * HORIZON
        self.whole = True
        """Whether each prompt is in one step with all that is left of it: none was too long for what was free there."""

    def add(self, prefills: Iterable[tuple[Prefill, int]]) -> None:
        """Add prompts that were released after all others, in the order of their release, each with the step it joins.

        For each prompt that waits in an engine, whenever another ends: no calls in here.
        """
        tokens, attention, pieces = self.tokens, self.attention, self.prefills
        under_way, budget, last = self.step_under_way, self.prefill_budget, HORIZON - 1
        for prefill, joins in prefills:
            left = prefill.remaining
            step = joins - under_way
            if step > last:
                step = last
            elif step < 0:
                step = 0
            if left <= budget - tokens[step]:
                if left:
                    tokens[step] += left
                    attention[step] += left * (prefill.context - left / 2)
                    pieces[step] += 1
                continue
            self.whole = False
            while left and step <= last:
                worked_on = budget - tokens[step]
                if worked_on > left:  # noqa: PLR1730 - see above
                    worked_on = left
                if worked_on > 0:
                    tokens[step] += worked_on
                    attention[step] += worked_on * (prefill.context - left + worked_on / 2)
                    pieces[step] += 1
                    left -= worked_on
                step += 1

    def copy(self) -> Spread:
        """Return one that goes its own way from here."""
        made = Spread(self.step_under_way, self.prefill_budget)
        made.tokens, made.attention, made.prefills = self.tokens[:], self.attention[:], self.prefills[:]
        made.whole = self.whole
        return made

    def take_out(self, prefill: Prefill, joins: int) -> None:
        """Take out a prompt that was added with ``joins``, where all are ``whole``: then no other moves up for it.

        What is left is exact, as all figures are halves of whole numbers.
        """
        left, step = prefill.remaining, min(max(joins - self.step_under_way, 0), HORIZON - 1)
        self.tokens[step] -= left
        self.attention[step] -= left * (prefill.context - left / 2)
        self.prefills[step] -= 1

    def loads(self, decodes: int, kv_tokens: int) -> Iterator[StepLoad]:
        """What the steps hold, each with all decodes."""
        for tokens, attention, prefills in zip(self.tokens, self.attention, self.prefills, strict=True):
            yield StepLoad(tokens, decodes, kv_tokens, attention, prefills)


class Forecast(NamedTuple):
    """The step under way and those to come."""

    loads: list[StepLoad]
    ends_at: list[float]
    """When each is expected to end."""


def foresee(loads: Iterable[StepLoad], model: OnlineStepModel, began_at: float, now: float) -> Iterator[float]:
    """Give when the steps that hold ``loads`` will end, by the step model: the one under way not before ``now``."""
    end, predict = began_at, model.predict
    for load in loads:
        end += predict(load)
        if end < now:  # noqa: PLR1730 - it is asked for with each prompt that is released
            end = now
        yield end


def intake(
    began_at: float, ends_at: Iterable[float], soonest: float, latest: float, *, steps_ahead: int, error_seconds: float
) -> range:
    """Return the steps, counted from the one under way, any of which may take in what arrives between two times.

    ``began_at``: when the step under way did; ``ends_at``: as foreseen, of which no more are asked for than it takes.
    ``steps_ahead``: how many steps before it begins a step is composed; ``error_seconds``: of the ends of steps.
    """
    first = last = steps_ahead  # for what was there before the step under way began, which is certain
    if latest < began_at:
        return range(first, last + 1)
    last += 1
    sooner = soonest >= began_at
    first += sooner
    for end in islice(ends_at, HORIZON - 2 - steps_ahead):
        if end - error_seconds >= latest and end + error_seconds >= soonest:
            break  # and so do all that follow
        last += end - error_seconds < latest
        first += sooner and end + error_seconds < soonest
    return range(first, last + 1)
