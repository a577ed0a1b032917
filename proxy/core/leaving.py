"""How requests leave: they are over, their engine gives them back, or they are another replica's from now on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.membership import judge
from proxy.core.request import RejectReason
from proxy.core.slicing import unslice

if TYPE_CHECKING:
    from proxy.core.actions import Action
    from proxy.core.ledger import Ledger


def forget(ledger: Ledger, request_id: str, now: float, tokens: int | None, *, served: bool | None) -> None:
    """A request is over, whatever state it is in; see ``events.Ended``."""
    entry = ledger.entries.get(request_id)
    if entry is None:
        return
    if entry.engine is None:
        ledger.drop(entry.waiting)
    elif entry.sliced:
        entry.engine.drop_slices(request_id)
        del ledger.sliced[request_id]
    else:
        assert entry.bill is not None
        if tokens is not None:
            tokens = min(tokens, entry.engine.limits.longest_answer)
        generated = entry.engine.context_tokens(request_id) - entry.waiting.request.prompt_tokens
        entry.bill.settle(max(tokens or 0, generated))
        entry.engine.end(request_id, now, tokens)
        judge(ledger, entry.engine, request_id, served=served, now=now)
    del ledger.entries[request_id]


def give_up(ledger: Ledger, request_id: str, now: float) -> None:
    """A request is not ours any more; nothing is learnt from it, as it has not ended."""
    entry = ledger.entries.pop(request_id, None)
    if entry is None:
        return
    ledger.prefixes.end(request_id, None)
    if entry.engine is None:
        ledger.drop(entry.waiting)
    elif entry.sliced:
        entry.engine.drop_slices(request_id)
        del ledger.sliced[request_id]
    else:
        assert entry.bill is not None
        entry.bill.cancel()
        entry.engine.end(request_id, now, whole=False)
        judge(ledger, entry.engine, request_id, served=None, now=now)


def take_back(
    ledger: Ledger, request_id: str, asked_seconds: float | None, now: float, *, draining: bool
) -> list[Action]:
    """An engine did not start a request, which waits again; see ``events.NotStarted``."""
    entry = ledger.entries.get(request_id)
    if entry is None or entry.engine is None or entry.sliced:
        return []
    engine, entry.engine = entry.engine, None
    engine.end(request_id, now)
    judge(ledger, engine, request_id, served=None, now=now)
    ledger.prefixes.take_back(request_id)
    until = engine.back_off.refused(asked_seconds, now)
    engine.closed_until = max(until, engine.closed_until or 0.0)
    for half_way in [e for e in ledger.sliced.values() if e.engine is engine]:
        unslice(ledger, half_way, now)  # bound to it, they could go on nowhere, however long it stays closed
    ledger.wait(entry.waiting, now)
    if draining:
        return [ledger.reject(entry.waiting, RejectReason.DRAINING, now)]
    if not ledger.any_up(ledger.backlog.servers_of(entry.waiting)):
        return [ledger.reject(entry.waiting, RejectReason.NO_ENGINE, now)]
    return []
