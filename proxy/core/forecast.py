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


def spread(
    prefills: Iterable[tuple[Prefill, int]], step_under_way: int, prefill_budget: int, decodes: int, kv_tokens: int
) -> list[StepLoad]:
    """Return what the next ``HORIZON`` steps hold, the one under way first, each with all decodes.

    ``prefills``: in the order of their release, each with the step that it joins.
    A step takes prompts in the order of their release, as far as its budget goes; the next takes what is left of
    those, and what came meanwhile.
    """
    tokens, attention, pieces = [0] * HORIZON, [0.0] * HORIZON, [0] * HORIZON
    last = HORIZON - 1
    for prefill, joins in prefills:  # once for each prompt of each request that comes or goes: no calls in here
        left = prefill.remaining
        step = joins - step_under_way
        if step > last:
            step = last
        elif step < 0:
            step = 0
        while left and step <= last:
            worked_on = prefill_budget - tokens[step]
            if worked_on > left:  # noqa: PLR1730 - see above
                worked_on = left
            if worked_on > 0:
                tokens[step] += worked_on
                attention[step] += worked_on * (prefill.context - left + worked_on / 2)
                pieces[step] += 1
                left -= worked_on
            step += 1
    return [StepLoad(tokens[i], decodes, kv_tokens, attention[i], pieces[i]) for i in range(HORIZON)]


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
    ends_at, end = [], began_at
    for load in loads:
        end = max(now, end + model.predict(load))
        ends_at.append(end)
    return Forecast(loads, began_at, ends_at)
