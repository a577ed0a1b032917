"""Tiles: the prompt tokens of one engine step, chosen by the proxy.

A prompt is cut by sending growing prefixes of it ahead (``max_tokens: 1``), which leave their keys and values in the
engine's prefix cache; the client's own request goes last, unchanged, and finds them there. So the proxy decides how
many prompt tokens each step of an unmodified engine works on, and a short prompt can overtake a long one half-way.

One tile per step, never none and never two: when the token clock shows that a step has ended, the tile queued before
has just been taken in, and the next is sent while the step runs. A tile may hold the ends of several short prompts and
the beginning of a longer one. It is as large as the tightest deadline of the streams in flight allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.admission import GateConfig, admits, fits_kv

if TYPE_CHECKING:
    from proxy.core.engine import EngineBelief
    from proxy.core.request import Request
    from proxy.core.stepmodel import StepLoad


BUDGET_TOKENS = 2048
"""Engines with a smaller token budget cut prompts themselves, and tiles no larger than that have nothing to add."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How prompts are cut. Tokens and shares."""

    smallest_tokens: int = 128
    """No slice is smaller, and no step gets less while work waits: each slice has a cost of its own."""
    most_slices: int = 63
    """Of one prompt. Each has the whole prefix in it: all of them together are at most half as many times as large as
    the prompt. Prompts of some 25,000 tokens and more are therefore cut into larger tiles than a deadline may want."""
    margin: float = 0.03
    """Share of a TBT deadline kept free, beside the step model's own error."""
    knee: float = 2.5
    """A step lasts at most this many times as long as it would with a prompt's slice of no tokens.

    A step of an engine costs the least per token where it has about as much to compute as to read: a few prompt tokens
    in each step come nearly free beside the decodes, many in one step do not, and every stream waits for their end.
    So several even steps do more than one long and some empty ones. Chosen by simulation (docs/tiles.md).
    """
    least_share: float = 0.2
    """But it may last this share of the tightest deadline in flight. An engine whose steps without prompts are short
    would else get slices that cost more than they hold, and long prompts would wait behind their own many slices."""
    max_sliced: int = 4
    """Prompts half-way on one engine at a time: their cached prefixes are the first to be evicted."""

    def __post_init__(self) -> None:
        if min(self.smallest_tokens, self.most_slices, self.max_sliced) < 1 or self.knee <= 1:
            raise ValueError("smallest_tokens, most_slices and max_sliced are at least 1, knee is more than 1")
        if not (0 <= self.margin < 1 and 0 <= self.least_share <= 1):
            raise ValueError("margin lies in [0, 1), least_share in [0, 1]")


def room(engine: EngineBelief, offset: int, now: float, tiles: TileConfig, prompt_tokens: int = 0) -> int:
    """Prompt tokens that may be sent now, with every TBT deadline in flight kept in the step that they come into.

    They are those of a prompt after its first ``offset`` ones. A step that has got nothing yet gets the smallest
    slice of it whatever the deadline, or work would stop.
    """
    least = smallest_slice(engine, tiles, prompt_tokens)
    forecasts = engine.forecast(now), engine.forecast(now, soonest=True)
    steps = engine.intake(now, now)
    return min(_room_in(engine, forecast.loads, step, offset, tiles, least) for forecast in forecasts for step in steps)


def _room_in(  # noqa: PLR0917
    engine: EngineBelief, loads: list[StepLoad], step: int, offset: int, tiles: TileConfig, least: int
) -> int:
    """As ``room``, for the step that comes so many after the one under way."""
    space = engine.prefill_budget - engine.backlog + sum(load.prefill_tokens for load in loads[:step])
    strictest = engine.strictest_tbt_seconds
    if strictest is None:
        return space
    # Of the steps, not of the streams: one lives for hundreds of steps, and the 95th percentile would fail each some 20
    # times.
    seconds = strictest * (1 - tiles.margin) / (1 + engine.model.prompt_errors.p99)
    # What is in the steps before may decode in this one, and has its context read there.
    kv_tokens = loads[step].kv_tokens + engine.backlog
    load = loads[step]._replace(decodes=engine.outstanding, kv_tokens=kv_tokens)
    empty = engine.model.predict(load._replace(prefill_tokens=0, attention=0.0, prefills=1))
    fits = engine.model.prefill_tokens_within(
        min(seconds, max(tiles.knee * empty, tiles.least_share * seconds)), load, offset
    )
    return min(space, fits if load.prefill_tokens else max(fits, least))


def smallest_slice(engine: EngineBelief, tiles: TileConfig, prompt_tokens: int = 0) -> int:
    """Tokens of the smallest slice of such a prompt, in whole blocks of the engine's KV cache."""
    block = engine.limits.block_tokens
    tokens = max(tiles.smallest_tokens, -(-prompt_tokens // (tiles.most_slices + 1)))
    return -(-tokens // block) * block


def budget_advice(token_budget: int) -> str | None:
    """What to tell whoever wants tiles of engines with this token budget, if anything."""
    if token_budget >= BUDGET_TOKENS:
        return None
    return (
        f"--tiles needs a token budget of {BUDGET_TOKENS} or more: with {token_budget} the engine itself cuts prompts"
    )


def next_piece(
    engine: EngineBelief, request: Request, now: float, tiles: TileConfig, gate: GateConfig, *, sliceable: bool
) -> int:
    """Return up to which token of a request's prompt to send now: all of it, a prefix, or 0 for nothing."""
    prompt_tokens, held_tokens = request.prompt_tokens, engine.held_tokens(request.id)
    if not engine.outstanding:
        return prompt_tokens
    if engine.plugin is not None:  # it cuts prompts itself
        return prompt_tokens if admits(engine, prompt_tokens - held_tokens, gate, now) else 0
    space = room(engine, held_tokens, now, tiles, prompt_tokens)
    remaining = prompt_tokens - held_tokens
    if space <= 0 or engine.is_full or not fits_kv(engine, remaining, gate):
        return 0
    if remaining <= space or engine.strictest_tbt_seconds is None:
        return prompt_tokens
    if not sliceable or not engine.limits.caches_prefixes or not engine.hit_rate.pays(now):
        return prompt_tokens if not engine.untaken() else 0  # it breaks a deadline, now or later
    block = engine.limits.block_tokens
    upto = (held_tokens + space) // block * block
    return upto if upto - held_tokens >= smallest_slice(engine, tiles, prompt_tokens) and upto < prompt_tokens else 0
