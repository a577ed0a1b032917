"""Why a stream's token came late: what the engine did between it and the one before.

The steps that ended in the gap tell. One that took long for its prompt tokens is the work of whoever's prompt that was,
and the scheduler's affair; one that took long for nothing is the engine's. Where all steps were short, either the
engine passed the stream over, or it worked in time and its tokens were on the way for too long.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.core.stepmodel import OnlineStepModel, StepLoad

_EXPLAINED = 0.5
"""Share of a step's duration that the step model must predict for the step's prompt tokens to explain it."""
_PASSED_OVER_STEPS = 3
"""Steps that ended in a gap without a token of the stream: one may have been under way, one was composed before."""


class Cause(StrEnum):
    """Why a TBT deadline was missed."""

    PREFILL = "prefill"
    """A step held more prompt tokens than the deadline allowed."""
    STALL = "stall"
    """The engine took far longer for a step than for others like it, or did nothing."""
    PREEMPTION = "preemption"
    """The engine made steps without this stream, and says that it has preempted somebody meanwhile."""
    PASSED_OVER = "passed_over"
    """As before, but it says nothing of the kind, or not yet: it was preempted, or held back."""
    DELIVERY = "delivery"
    """The engine's steps were short enough: its server or the network held the tokens back."""
    STEP = "step"
    """Every step of this engine is about as long as the deadline, by its decodes alone."""


class PastStep(NamedTuple):
    """A step that has ended, as far as it is known."""

    ended_at: float
    seconds: float
    load: StepLoad
    largest: str | None
    """The request that most of its prompt tokens were of."""
    largest_tokens: int


@dataclass(frozen=True, slots=True)
class Blame:
    """Why one token came late."""

    cause: Cause
    step_seconds: float = 0.0
    """How long the longest step in the gap took; 0 where none was seen to end."""
    prompt_tokens: int = 0
    """That it held."""
    request_id: str | None = None
    """Whose prompt most of these were."""
    request_tokens: int = 0


def blame(
    steps: Sequence[PastStep],
    gap_seconds: float,
    deadline: float,
    chunks: int,
    model: OnlineStepModel,
    *,
    preempted: bool = False,
) -> Blame:
    """Say why a gap of ``gap_seconds`` was longer than ``deadline``.

    ``steps``: those that ended in it, the last one with the token that ended it; ``chunks``: token-bearing chunks that
    came at once then; ``preempted``: whether the engine has told in the gap of sequences that it has preempted.
    """
    if not steps:
        return Blame(Cause.STALL)
    longest = max(steps, key=lambda step: step.seconds)
    seen = longest.seconds, longest.load.prefill_tokens, longest.largest, longest.largest_tokens
    if longest.seconds <= max(deadline, gap_seconds) / 2:
        # Several tokens at once were made one by one, unless the engine speculates, and then it makes few steps.
        on_time = chunks > 1 or len(steps) < _PASSED_OVER_STEPS
        held_back = Cause.PREEMPTION if preempted else Cause.PASSED_OVER
        return Blame(Cause.DELIVERY if on_time else held_back, *seen)
    expected = model.predict(longest.load)
    without = model.predict(longest.load._replace(prefill_tokens=0, attention=0.0, prefills=0))
    if expected < _EXPLAINED * longest.seconds:
        return Blame(Cause.STALL, *seen)
    avoidable = without <= deadline or without < _EXPLAINED * expected
    return Blame(Cause.PREFILL if longest.load.prefill_tokens and avoidable else Cause.STEP, *seen)
