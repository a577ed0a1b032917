"""Tiles: the prompt tokens of one engine step, chosen by the proxy.

A prompt is cut by sending growing prefixes of it ahead (``max_tokens: 1``), which leave their keys and values in the
engine's prefix cache; the client's own request goes last, unchanged, and finds them there. So the proxy decides how
many prompt tokens each step of an unmodified engine works on, and a short prompt can overtake a long one half-way.

One tile per step, never none and never two: when the token clock shows that a step has ended, the tile queued before
has just been taken in, and the next is sent while the step runs. A tile may hold the ends of several short prompts and
the beginning of a longer one. A slice goes at the last moment at which it reaches the next step: who comes until then
and is shorter goes first.

A tile is never larger than the tightest deadline of the streams in flight allows. Nor is it larger than pays. What a
step costs without any prompt, and what a slice costs whatever its size (``c`` seconds together), is paid once a tile
by all ``n`` prompts in line. But who comes while the step runs waits for its end: of ``r`` newcomers a second, ``r *
T`` come during a tile of ``T`` seconds and wait for ``T / 2`` on average. For each second ``w = T - c`` of work on
prompts that is ``(n * c + r * T**2 / 2) / w``, which is least at ``w = sqrt(c**2 + 2 * c * n / r)``: the economic lot
size of production planning (Harris, 1913). So tiles are short where few wait, and grow with the line; an engine whose
slices cost much gets few. A prompt of ``R`` seconds is best cut into ``k`` even pieces with the least ``k * (k + 1) >=
(R / w)**2``: up to 1.4 ``w`` it goes whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from typing import TYPE_CHECKING, NamedTuple

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
    max_sliced: int = 4
    """Prompts half-way on one engine at a time: their cached prefixes are the first to be evicted."""

    def __post_init__(self) -> None:
        if min(self.smallest_tokens, self.most_slices, self.max_sliced) < 1 or not 0 <= self.margin < 1:
            raise ValueError("smallest_tokens, most_slices and max_sliced are at least 1, margin lies in [0, 1)")


class Room(NamedTuple):
    """Tokens of one prompt that may go into the next step."""

    most: int
    """For every TBT deadline in flight to be kept."""
    paying: int
    """At most as many: for the step to be no longer than pays."""


def room(
    engine: EngineBelief,
    offset: int,
    now: float,
    tiles: TileConfig,
    *,
    prompt_tokens: int = 0,
    line_seconds: float = 0.0,
) -> Room:
    """What may be sent now of a prompt of ``prompt_tokens`` after its first ``offset`` ones.

    A step that has got nothing yet gets the smallest slice of it whatever the deadline, or work would stop.
    ``line_seconds``: in what time as many prompts come as are in line now.
    """
    least = smallest_slice(engine, tiles, prompt_tokens)
    forecasts = engine.forecast(now), engine.forecast(now, soonest=True)
    steps = engine.intake(now, now)
    rooms = [
        _room_in(engine, forecast.loads, step, offset, tiles, least, line_seconds)
        for forecast in forecasts
        for step in steps
    ]
    return Room(min(r.most for r in rooms), min(r.paying for r in rooms))


def _room_in(  # noqa: PLR0917
    engine: EngineBelief,
    loads: list[StepLoad],
    step: int,
    offset: int,
    tiles: TileConfig,
    least: int,
    line_seconds: float,
) -> Room:
    """As ``room``, for the step that comes so many after the one under way."""
    space = engine.prefill_budget - engine.backlog + sum(load.prefill_tokens for load in loads[:step])
    strictest = engine.strictest_tbt_seconds
    if strictest is None:
        return Room(space, space)
    # Of the steps, not of the streams: one lives for hundreds of steps, and the 95th percentile would fail each some 20
    # times.
    seconds = strictest * (1 - tiles.margin) / (1 + engine.model.prompt_errors.p99)
    # What is in the steps before may decode in this one, and has its context read there.
    kv_tokens = loads[step].kv_tokens + engine.backlog
    load = loads[step]._replace(decodes=engine.outstanding, kv_tokens=kv_tokens)
    cost = engine.model.predict(load._replace(prefill_tokens=0, attention=0.0, prefills=1))
    longest = cost + sqrt(cost * (cost + 2 * line_seconds))
    within = engine.model.prefill_tokens_within
    fits, pays = within(seconds, load, offset), within(min(seconds, longest), load, offset)
    if not load.prefill_tokens:
        fits, pays = max(fits, least), max(pays, least)
    return Room(min(space, fits), min(space, pays))


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
    engine: EngineBelief,
    request: Request,
    now: float,
    tiles: TileConfig,
    gate: GateConfig,
    *,
    sliceable: bool,
    line_seconds: float = 0.0,
) -> int:
    """Return up to which token of a request's prompt to send now: all of it, a prefix, or 0 for nothing."""
    prompt_tokens, held_tokens = request.prompt_tokens, engine.held_tokens(request.id)
    if not engine.outstanding:
        return prompt_tokens
    if engine.plugin is not None:  # it cuts prompts itself
        return prompt_tokens if admits(engine, prompt_tokens - held_tokens, gate, now) else 0
    most, paying = room(engine, held_tokens, now, tiles, prompt_tokens=prompt_tokens, line_seconds=line_seconds)
    remaining = prompt_tokens - held_tokens
    if paying <= 0 or engine.is_full or not fits_kv(engine, remaining, gate):
        return 0
    if engine.strictest_tbt_seconds is None:
        return prompt_tokens
    may_cut = sliceable and engine.limits.caches_prefixes and engine.hit_rate.pays(now)
    smallest, block = smallest_slice(engine, tiles, prompt_tokens), engine.limits.block_tokens
    pieces = min(_even_pieces(remaining / paying), remaining // smallest)
    if remaining <= most and (pieces <= 1 or not may_cut):
        return prompt_tokens
    if not may_cut:
        return prompt_tokens if not engine.untaken() else 0  # it breaks a deadline, now or later
    piece = most if paying >= most else min(most, max(smallest, ceil(remaining / max(2, pieces)) + block - 1))
    upto = (held_tokens + piece) // block * block
    return upto if upto - held_tokens >= smallest and upto < prompt_tokens else 0


def _even_pieces(lots: float) -> int:
    """Into how many pieces to cut what is so many times as large as pays; see the module's docstring."""
    return ceil(sqrt(lots * lots + 0.25) - 0.5)
