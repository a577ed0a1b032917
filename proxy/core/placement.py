"""Which engine: bound when a request is released, not when it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.admission import admits
from proxy.core.health import Condition
from proxy.core.tbt import harm_seconds
from proxy.core.tiles import next_piece

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from proxy.core.admission import GateConfig
    from proxy.core.engine import EngineBelief
    from proxy.core.prefix import Prefixes
    from proxy.core.request import Request
    from proxy.core.tiles import TileConfig


_AT_WORK = (Condition.HEALTHY, Condition.SLOW_START)


def soonest(
    engines: Iterable[EngineBelief],
    request: Request,
    gate: GateConfig,
    now: float,
    prefixes: Prefixes,
    *,
    arrived_at: float,
    reserved: Collection[str] = (),
) -> EngineBelief | None:
    """The engine that would begin the request soonest among those whose gate is open; ``None`` if all are shut.

    One that has the prompt's beginning cached has less to do for it, so it is taken unless its backlog is longer by
    more than that. It is not waited for while another is open: nothing waits for an engine that could begin it.
    ``reserved`` engines are kept for somebody else.
    """
    serving = [e for e in engines if e.id not in reserved and e.serves(request.model)]
    open_ones = [e for e in serving if admits(e, request.prompt_tokens, gate, now)]
    if not open_ones or (len(open_ones) == 1 and not gate.keep_tbt):
        return open_ones[0] if open_ones else None
    uncached = {e.id: request.prompt_tokens - prefixes.cached_tokens(request, e) for e in serving}
    best = min(
        open_ones,
        key=lambda e: (
            harm_seconds(e, uncached[e.id], now) if gate.keep_tbt else 0.0,
            e.estimated_wait_seconds(uncached[e.id]) / e.health.share(now),
            e.outstanding,
            e.number,
        ),
    )
    if not gate.keep_tbt or not best.outstanding:
        return best
    return best if may_harm(best, serving, uncached, now - arrived_at, now) else None


def may_harm(
    engine: EngineBelief,
    others: Iterable[EngineBelief],
    prompt_tokens: Mapping[str, int],
    waited_seconds: float,
    now: float,
) -> bool:
    """Whether what the prompt does to the streams of ``engine`` cannot be helped by waiting.

    ``prompt_tokens``: what there is of it to work on, by engine.
    """
    harm = harm_seconds(engine, prompt_tokens[engine.id], now)
    alone = min(harm_seconds(e, prompt_tokens[e.id], now, alone=True) for e in others if e.up)
    # Waiting helps where a later step or another engine does better; at most for as long as the harm itself lasts.
    return harm <= alone or waited_seconds >= harm


def takes_a_piece(
    engines: Iterable[EngineBelief], request: Request, tiles: TileConfig, gate: GateConfig, now: float
) -> bool:
    """Whether some engine would take the request, or a first slice of it, now."""
    return any(
        next_piece(e, request, now, tiles, gate, sliceable=request.sliceable)
        for e in engines
        if e.is_open(now) and e.serves(request.model)
    )


def least_busy(engines: Iterable[EngineBelief], model: str) -> EngineBelief | None:
    """The engine with the least to do, for a request that is not scheduled (no generation); a sick one if need be."""
    up = (e for e in engines if e.up and e.serves(model))
    return min(
        up, key=lambda e: (e.health.condition not in _AT_WORK, e.outstanding + e.passing, e.number), default=None
    )
