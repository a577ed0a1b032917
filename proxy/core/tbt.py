"""TBT admission: what a prompt, released whole, would do to the streams in flight.

An engine gives every decode one token per step, so a stream's TBT is the step's duration, and the last time at which it
can be scheduled is its last token plus its deadline minus the next step (paper, eq. 8). A prompt is therefore harmless
if the step that takes it in, as the step model predicts it with its p95 error, keeps the tightest deadline.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.engine import EngineBelief


def harm_seconds(engine: EngineBelief, prompt_tokens: int, now: float, *, alone: bool = False) -> float:
    """Seconds by which the prompt would overrun the TBT deadlines in flight, summed over streams and steps.

    ``alone``: in a step that holds no other prompt. Zero while the engine's steps are not known yet, and where the
    engine makes them as long as it wants (``plugin``).
    """
    if not engine.deadlines or not engine.model.trusted or engine.plugin is not None:
        return 0.0
    load = engine.forecast(now).loads[engine.intake(now, now)[0]]
    if alone:
        load = load._replace(prefill_tokens=0, attention=0.0, prefills=0)
    tokens = min(prompt_tokens, engine.prefill_budget - load.prefill_tokens)
    if tokens <= 0:
        return 0.0
    load = load._replace(
        prefill_tokens=load.prefill_tokens + tokens,
        attention=load.attention + tokens * tokens / 2,
        prefills=load.prefills + 1,
    )
    seconds = engine.model.predict(load) + engine.model.margin_seconds(load)
    overrun = sum(count * max(0.0, seconds - deadline) for deadline, count in engine.deadlines.items())
    return overrun * ceil(prompt_tokens / engine.prefill_budget)


def slack_seconds(engine: EngineBelief) -> float | None:
    """By how much the step under way, as predicted, keeps the tightest deadline in flight (eq. 8); may be negative.

    ``None`` while there is no deadline.
    """
    strictest = engine.strictest_tbt_seconds
    if strictest is None:
        return None
    under_way = engine.forecast(0.0).loads[0]  # what is in it does not depend on the time
    return strictest - engine.model.predict(under_way) - engine.model.margin_seconds(under_way)
