"""The order in which waiting requests are released: a key per request, smallest first, fixed on arrival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

Ordering = Callable[[int, float], float]
"""``(prompt_tokens, arrived_at) -> key``."""

AGING_SECONDS = 3.0
"""In what time of waiting a prompt comes to count as half as long, unless told otherwise. Longer, and the median TTFT
gains a little near capacity, and much beyond it, but the longest prompts wait for it: docs/results.md has both."""


# Values and not closures, so that they can be written down, compared and told.


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """Order by arrival, as an engine does by itself."""

    def __call__(self, prompt_tokens: int, arrived_at: float) -> float:  # noqa: ARG002
        return arrived_at


@dataclass(frozen=True, slots=True)
class ShortestPromptFirst:
    """Order by prompt length, which halves with every ``halving_seconds`` of waiting.

    A request with ``p`` tokens that waited ``w`` counts as ``p * 2**(-w / H)``. All waiting requests age at the
    same pace, so comparing two of them now, later or by ``log2(p) + arrived_at / H`` gives the same answer: the key
    never changes and nothing has to be sorted again. A request is overtaken by a fresh one of ``q`` tokens only
    while it has waited less than ``H * log2(p / q)`` seconds.
    """

    halving_seconds: float

    def __post_init__(self) -> None:
        if not self.halving_seconds > 0:
            raise ValueError("halving_seconds must be positive")

    def __call__(self, prompt_tokens: int, arrived_at: float) -> float:
        return log2(prompt_tokens) + arrived_at / self.halving_seconds


first_come_first_served: Callable[[], Ordering] = FirstComeFirstServed
shortest_prompt_first: Callable[[float], Ordering] = ShortestPromptFirst
