"""Which engine: bound when a request is released, not when it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.admission import admits
from proxy.core.tiles import next_piece

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from proxy.core.admission import GateConfig
    from proxy.core.engine import EngineBelief
    from proxy.core.prefix import Prefixes
    from proxy.core.request import Request
    from proxy.core.tiles import TileConfig


def soonest(
    engines: Iterable[EngineBelief],
    request: Request,
    gate: GateConfig,
    now: float,
    prefixes: Prefixes,
    *,
    reserved: Collection[str] = (),
) -> EngineBelief | None:
    """The engine that would begin the request soonest among those whose gate is open; ``None`` if all are shut.

    One that has the prompt's beginning cached has less to do for it, so it is taken unless its backlog is longer by
    more than that. It is not waited for while another is open: nothing waits for an engine that could begin it.
    ``reserved`` engines are kept for somebody else.
    """
    tokens = request.prompt_tokens
    return min(
        (e for e in engines if e.id not in reserved and e.serves(request.model) and admits(e, tokens, gate, now)),
        key=lambda e: (
            e.estimated_wait_seconds(tokens - prefixes.cached_tokens(request, e)),
            e.outstanding,
            e.number,
        ),
        default=None,
    )


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
    """The engine with the least to do, for a request that is not scheduled (no generation)."""
    up = (e for e in engines if e.up and e.serves(model))
    return min(up, key=lambda e: (e.outstanding, e.number), default=None)
