"""Release of whole prompts: whoever is next in the order, to the engine that begins it soonest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.actions import Dispatch
from proxy.core.admission import is_shut
from proxy.core.lane import urgency
from proxy.core.placement import soonest
from proxy.core.tbt import harm_seconds

if TYPE_CHECKING:
    from proxy.core.config import SchedulerConfig
    from proxy.core.lane import Waiting
    from proxy.core.ledger import Ledger


def next_whole(ledger: Ledger, config: SchedulerConfig, now: float) -> Dispatch | None:
    """Release the first prompt that finds a place; ``None`` when none does."""
    # As it usually is after each release, whoever is next. But modes are switched, and deadlines looked at, when asked.
    unasked = ledger.modes is None and not ledger.backlog.with_deadline
    if unasked and all(is_shut(e, config.gate, now) for e in ledger.engines.values()):
        return None
    # One queue is the usual case; with several, a head that finds no place must not block another's. But one that
    # has waited for too long keeps its engines from the others until it fits.
    reserved: set[str] = set()
    pace = ledger.pace()

    def order(waiting: Waiting) -> tuple[object, ...]:
        tokens = waiting.request.prompt_tokens
        return urgency(
            waiting, tokens, waiting.key, now, pace=pace, max_wait_seconds=config.max_wait_seconds
        ), waiting.number

    heads = [queue.head(now, pace) for _, queue in ledger.backlog.queues()]
    if len(heads) > 1:
        heads.sort(key=order)
    for waiting in heads:
        servers = ledger.backlog.servers_of(waiting)
        engine = soonest(
            ledger.engines_for(waiting.arrived_at, now),
            waiting.request,
            config.gate,
            now,
            ledger.prefixes,
            arrived_at=waiting.arrived_at,
            reserved=reserved | ledger.kept_from(waiting.request, servers, config.gate, now),
        )
        if engine is not None:
            cached = ledger.prefixes.cached_tokens(waiting.request, engine)
            if config.gate.keep_tbt and harm_seconds(engine, waiting.request.prompt_tokens - cached, now):
                ledger.harmful_releases += 1
            ledger.dispatch(waiting, engine, now)
            return Dispatch(waiting.request.id, engine.id)
        if now - waiting.arrived_at >= config.max_wait_seconds:
            reserved |= servers
    return None
