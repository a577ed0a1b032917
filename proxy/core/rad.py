"""Throughput mode: how many sequences an engine should have, and when to let more in (after the paper's RAD).

RAD works on decodes alone once there is a tile of them, and on prompts until there is. An engine mixes both in one
step, so all that is left for us to choose is how many sequences it has. With ``D`` of them, in equilibrium, an engine
completes requests at a rate proportional to ``D / (a + k * D)``: ``a`` is what a step takes whatever is in it, ``k``
what it takes for one decode and for the share of the prompts that keep one decode going. That rises ever more slowly,
so from some ``D`` on more sequences bring next to nothing but longer steps and a fuller KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.core.engine import EngineBelief

TILE_TOKENS = 128
"""Tokens that a GPU multiplies at once: those of a step are rounded up to whole tiles in what they cost."""


@dataclass(frozen=True, slots=True)
class RadConfig:
    """When an engine is full, and when it has room again. Shares are of the most that it could complete per second."""

    full_share: float = 0.97
    """Prompts are released until the engine has as many sequences as this takes."""
    room_share: float = 0.95
    """Then none is, until it has as few as this takes. One sequence at a time, prompts would come in every step."""
    max_hold_seconds: float = 10.0
    """A prompt that has waited this long does not wait for room, only for the gate."""

    def __post_init__(self) -> None:
        if not 0 < self.room_share <= self.full_share < 1 or not 0 < self.max_hold_seconds < inf:
            raise ValueError("shares lie in (0, 1), room_share is at most full_share, max_hold_seconds is positive")


def most_sequences(engine: EngineBelief) -> float:
    """How many sequences the engine can keep going: by its slots, its KV cache and its token budget.

    The last two by what its steps have had in them so far; until there is such, they count for nothing.
    """
    past, limits = engine.model.past_load(), engine.limits
    most = float(limits.max_num_seqs)
    if past.decodes > 0:
        if limits.kv_tokens is not None and past.kv_tokens > 0:
            most = min(most, limits.kv_tokens * past.decodes / past.kv_tokens)
        most = min(most, limits.token_budget / (1 + past.prefill_tokens / past.decodes))
    return max(1.0, most)


def sequences_for(engine: EngineBelief, share: float) -> int:
    """The fewest sequences with which the engine completes ``share`` of the most requests that it can per second.

    From ``D / (a + k * D) >= share * M / (a + k * M)``. As long as the step model is not to be trusted, all that it
    can have; and the model's own error counts as part of ``a``, so that a doubt means more sequences and not fewer.
    """
    most, model = most_sequences(engine), engine.model
    past = model.past_load()
    if not model.trusted or past.decodes <= 0:
        return ceil(most)
    fixed = model.coefficients.fixed
    per_sequence = (model.predict(past) - fixed) / past.decodes
    fixed *= 1 + model.prompt_errors.p95
    if fixed <= 0:
        return ceil(most)
    return max(1, ceil(share * most * fixed / (fixed + (1 - share) * per_sequence * most)))


def tile_advice(token_budget: int) -> str | None:
    """What to tell whoever set an engine's token budget, if anything."""
    if token_budget % TILE_TOKENS == 0:
        return None
    below, above = token_budget // TILE_TOKENS * TILE_TOKENS, -(-token_budget // TILE_TOKENS) * TILE_TOKENS
    multiples = f"{below} or {above}" if below else f"{above}"
    return (
        f"token budget {token_budget} is not a multiple of {TILE_TOKENS}: a GPU works in whole tiles, so a full step "
        f"costs as much as one of {above} tokens; {multiples} would waste nothing"
    )


class ModeSwitch:
    """Which engines are full. Looked at only while something waits, so it changes with a scheduler's events."""

    def __init__(self, config: RadConfig) -> None:
        self.config = config
        self._full: set[str] = set()
        self._looked_at = -inf

    def __repr__(self) -> str:
        return f"<ModeSwitch full: {sorted(self._full)}>"

    def open(self, engines: Iterable[EngineBelief], arrived_at: float, now: float) -> list[EngineBelief]:
        """Those of ``engines`` that have room for a request; all, if it came so long ago that it no longer minds."""
        self._looked_at = now
        engines = list(engines)
        with_room = [engine for engine in engines if not self._is_full(engine)]
        return with_room if now < arrived_at + self.config.max_hold_seconds else engines

    def due_at(self, arrived_at: float) -> float | None:
        """When the request that came at ``arrived_at`` will no longer wait for room; ``None`` if it does not now."""
        due = arrived_at + self.config.max_hold_seconds
        return due if self._full and due > self._looked_at else None

    def limit(self, engine: EngineBelief) -> int:
        """Return with how many sequences the engine is full, as things are."""
        limit = sequences_for(engine, self.config.full_share)
        if engine.id in self._full:  # at least one sequence has to end before another may come
            limit = min(limit, 1 + sequences_for(engine, self.config.room_share))
        return limit

    def forget(self, engine_id: str) -> None:
        """The engine is gone."""
        self._full.discard(engine_id)

    def _is_full(self, engine: EngineBelief) -> bool:
        full = engine.outstanding >= self.limit(engine)
        (self._full.add if full else self._full.discard)(engine.id)
        return full
