"""Release of whole prompts: whoever is next in the order, to the engine that begins it soonest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.actions import Dispatch
from proxy.core.placement import soonest

if TYPE_CHECKING:
    from proxy.core.config import SchedulerConfig
    from proxy.core.ledger import Ledger
    from proxy.core.queue import Waiting


def next_whole(ledger: Ledger, config: SchedulerConfig, now: float) -> Dispatch | None:
    """Release the first prompt that finds a place; ``None`` when none does."""
    # One queue is the usual case; with several, a head that finds no place must not block another's. But one that
    # has waited for too long keeps its engines from the others until it fits.
    reserved: set[str] = set()
    heads = [queue.head(now) for _, queue in ledger.backlog.queues()]
    for waiting in sorted(heads, key=lambda w: (urgency(w, config, now), w.number)):
        engine = soonest(
            ledger.engines_for(waiting.arrived_at, now),
            waiting.request,
            config.gate,
            now,
            ledger.prefixes,
            arrived_at=waiting.arrived_at,
            reserved=reserved,
        )
        if engine is not None:
            ledger.dispatch(waiting, engine, now)
            return Dispatch(waiting.request.id, engine.id)
        if now - waiting.arrived_at >= config.max_wait_seconds:
            reserved |= ledger.backlog.servers_of(waiting)
    return None


def urgency(waiting: Waiting, config: SchedulerConfig, now: float) -> tuple[bool, float]:
    """What to order heads of several queues by: those that waited too long first, oldest first, then by key."""
    overdue = now - waiting.arrived_at >= config.max_wait_seconds
    return not overdue, waiting.arrived_at if overdue else waiting.key
