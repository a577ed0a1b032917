"""The order in which waiting requests are released: a key per request, smallest first, fixed on arrival."""

from __future__ import annotations

from collections.abc import Callable
from math import log2

Ordering = Callable[[int, float], float]
"""``(prompt_tokens, arrived_at) -> key``."""


def first_come_first_served() -> Ordering:
    """Order by arrival, as an engine does by itself."""
    return lambda _prompt_tokens, arrived_at: arrived_at


def shortest_prompt_first(halving_seconds: float) -> Ordering:
    """Order by prompt length, which halves with every ``halving_seconds`` of waiting.

    A request with ``p`` tokens that waited ``w`` counts as ``p * 2**(-w / H)``. All waiting requests age at the
    same pace, so comparing two of them now, later or by ``log2(p) + arrived_at / H`` gives the same answer: the key
    never changes and nothing has to be sorted again. A request is overtaken by a fresh one of ``q`` tokens only
    while it has waited less than ``H * log2(p / q)`` seconds.

    Raises:
        ValueError: ``halving_seconds`` is not positive.
    """
    if not halving_seconds > 0:
        raise ValueError("halving_seconds must be positive")
    return lambda prompt_tokens, arrived_at: log2(prompt_tokens) + arrived_at / halving_seconds
