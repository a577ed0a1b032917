"""The way past empty queues, for a request that finds an engine open.

Most requests meet nobody who waits. To put one into a queue of its own, and to take it out again at the same moment,
would be half of what it costs to decide on it. What is decided, and what is remembered of it, is as if it had waited
(``tests/core/test_bypass.py`` goes both ways).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.actions import Dispatch
from proxy.core.lane import Waiting
from proxy.core.placement import soonest

if TYPE_CHECKING:
    from proxy.core.config import SchedulerConfig
    from proxy.core.ledger import Ledger
    from proxy.core.request import Request


def bypass(
    ledger: Ledger, config: SchedulerConfig, request: Request, *, key: float, arrived_at: float, number: int, now: float
) -> Dispatch | None:
    """Release a newcomer at once; ``None``, and nothing has changed, if it is to go the long way."""
    gate = config.gate
    if ledger.backlog or config.tiles is not None or ledger.modes is not None or gate.keep_tbt:
        return None
    servers = ledger.servers(request.model)
    if not servers:
        return None
    engine = soonest(
        ledger.engines.values(),
        request,
        gate,
        now,
        ledger.prefixes,
        arrived_at=arrived_at,
        reserved=ledger.kept_from(request, servers, gate, now),
    )
    if engine is None:
        return None
    ledger.bypass(Waiting(request, arrived_at, key, number), servers, engine, now)
    return Dispatch(request.id, engine.id)
