"""Who may join the queue: asked once of every request, when it comes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from proxy.core.placement import soonest, takes_a_piece
from proxy.core.request import RejectReason

if TYPE_CHECKING:
    from proxy.core.actions import Action, Reject
    from proxy.core.config import SchedulerConfig
    from proxy.core.ledger import Ledger
    from proxy.core.queue import Servers
    from proxy.core.request import Request


def why_refuse(
    ledger: Ledger, config: SchedulerConfig, request: Request, *, key: float, arrived_at: float, now: float
) -> Reject | None:
    """Refuse a request that cannot be served, or only later than is of use; ``None`` if it may come in."""
    overload = ledger.overload
    servers = ledger.servers(request.model)
    if not servers:
        is_there = any(not e.leaving for e in ledger.engines.values())
        unknown = RejectReason.UNKNOWN_MODEL if is_there else RejectReason.NO_ENGINE
        return overload.refuse(request, unknown, arrived_at, now)
    if not ledger.any_up(servers):
        return overload.refuse(request, RejectReason.NO_ENGINE, arrived_at, now)
    engines = ledger.engines.values()
    share = ledger.backlog.share_of(request, servers)
    estimated_wait = overload.first_token_seconds(request, key, servers, engines, now, share=share)
    least = estimated_wait or 0.0
    if not request.may_wait:
        reason = RejectReason.NO_QUEUE
    elif overload.is_full(request, ledger.backlog) and not overload.has_even_part_for(request):
        reason = RejectReason.QUEUE_FULL
        least = max(least, overload.emptied_seconds(servers, engines))
    elif now - arrived_at + least > overload.limit_seconds(request):
        reason = RejectReason.TOO_LATE
    else:
        return None
    # None of that matters to a request that need not wait.
    if _starts_now(ledger, config, request, servers, now):
        return None
    if reason is RejectReason.TOO_LATE:
        least = max(least, overload.let_in_seconds(request, key, servers, engines, now, share=share))
    return overload.refuse(request, reason, arrived_at, now, least_seconds=least, estimated_wait_seconds=estimated_wait)


def refused_unread(
    ledger: Ledger, config: SchedulerConfig, request: Request, now: float, *, draining: bool
) -> Request | None:
    """Say whether a request will be refused whatever is in its body, of which nothing is known yet.

    ``request`` has what its head tells, and is as small as one can be. Returns it as one that is refused when it
    arrives now; ``None`` if some body would be let in.
    """
    engines = [engine for engine in ledger.engines.values() if not engine.leaving]
    if draining or not engines:
        return request
    overload, backlog = ledger.overload, ledger.backlog
    if not overload.is_full(request, backlog) or overload.has_even_part_for(request):
        return None
    models = {"", *(model for engine in engines for model in engine.models)}
    asked = {ledger.servers(model): replace(request, model=model) for model in sorted(models)}
    if not ledger.any_up(ledger.servers("")) or any(
        _starts_now(ledger, config, one, servers, now) for servers, one in asked.items()
    ):
        return None
    # One whose queue is known tells best when to come back.
    return next((one for servers, one in asked.items() if servers in backlog), asked[ledger.servers("")])


def make_room(ledger: Ledger, config: SchedulerConfig, request: Request, now: float) -> list[Action]:
    """Refuse the newest of those tenants that hold most of a full queue, until a request has room."""
    overload, backlog = ledger.overload, ledger.backlog
    refused: list[Action] = []
    if overload.is_full(request, backlog) and not _starts_now(
        ledger, config, request, ledger.servers(request.model), now
    ):
        while overload.is_full(request, backlog):
            refused.append(ledger.reject(overload.first_to_make_room(), RejectReason.QUEUE_FULL, now))
    return refused


def hold_bounds(ledger: Ledger, request_id: str, now: float) -> list[Action]:
    """Refuse as ``make_room`` does where a newcomer was let into a full queue to start at once, and yet waits.

    Who may start now is told from its own queue. But another queue's head may be released to that engine first, or
    the engine is kept for one that has waited for too long.
    """
    overload, backlog = ledger.overload, ledger.backlog
    entry = ledger.entries.get(request_id)
    refused: list[Action] = []
    if entry is not None and entry.engine is None:
        while overload.overflows(backlog):
            refused.append(ledger.reject(overload.first_to_make_room(), RejectReason.QUEUE_FULL, now))
    return refused


def _starts_now(ledger: Ledger, config: SchedulerConfig, request: Request, servers: Servers, now: float) -> bool:
    """Whether a request that comes now will be released at once, before anybody."""
    if servers in ledger.backlog:
        return False
    gate, tiles = config.gate, config.tiles
    kept = ledger.kept_from(request, servers, gate, now)
    engines = [e for e in ledger.engines_for(now, now) if e.id not in kept]
    if tiles is None:
        return soonest(engines, request, gate, now, ledger.prefixes, arrived_at=now) is not None
    return takes_a_piece(engines, request, tiles, gate, now)
