"""The steps to come of an engine: what they will hold, and which of them takes in what is sent now."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from proxy.core.stepmodel import StepLoad

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.core.steplog import Prefill
    from proxy.core.stepmodel import OnlineStepModel

HORIZON = 5
"""Steps looked ahead: one under way, one composed already, two for prompts on their way, one for whatever is left."""


class Spread:
    """Prompts over the next ``HORIZON`` steps, the one under way first.

    A step takes prompts in the order of their release, as far as its budget goes; the next takes what is left of
    those, and what came meanwhile. So one that is released adds to what is there, and changes nothing of it.
    """

    __slots__ = ("attention", "prefill_budget", "prefills", "step_under_way", "tokens")

    def __init__(self, step_under_way: int, prefill_budget: int) -> None:
        self.step_under_way = step_under_way
        self.prefill_budget = prefill_budget
        # For each step, what ``StepLoad`` has of it.
        self.tokens = [0] * HORIZON
        self.attention = [0.0] * HORIZON
        self.prefills = [0] * HORIZON

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

    def loads(self, decodes: int, kv_tokens: int) -> list[StepLoad]:
        """What the steps hold, each with all decodes."""
        pieces = zip(self.tokens, self.attention, self.prefills, strict=True)
        return [StepLoad(tokens, decodes, kv_tokens, attention, prefills) for tokens, attention, prefills in pieces]


class Forecast(NamedTuple):
    """The step under way and those to come."""

    loads: list[StepLoad]
    began_at: float
    """When the step under way began."""
    ends_at: list[float]
    """When each is expected to end."""

    def intake(self, soonest: float, latest: float, steps_ahead: int, error_seconds: float) -> range:
        """Return the steps, counted from the one under way, any of which may take in what arrives between two times.

        ``steps_ahead``: how many steps before it begins a step is composed; ``error_seconds``: of the ends of steps.
        """
        first = last = steps_ahead  # for what was there before the step under way began, which is certain
        ends_at = self.ends_at[: HORIZON - 2 - steps_ahead]
        if soonest >= self.began_at:
            first += 1 + sum(end + error_seconds < soonest for end in ends_at)
        if latest >= self.began_at:
            last += 1 + sum(end - error_seconds < latest for end in ends_at)
        return range(first, last + 1)


def foresee(loads: list[StepLoad], model: OnlineStepModel, began_at: float, now: float) -> Forecast:
    """Return when the steps that hold ``loads`` will end, by the step model: the one under way not before ``now``."""
    ends_at, end, predict = [], began_at, model.predict
    for load in loads:
        end += predict(load)
        if end < now:  # noqa: PLR1730 - it is asked for twice with each prompt that is released
            end = now
        ends_at.append(end)
    return Forecast(loads, began_at, ends_at)
