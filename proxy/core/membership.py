"""Engines come and go: who counts as one, and what becomes of those who waited for it.

An engine that is removed gets nothing new from that moment on and leaves when the last of its requests is over; a limit
says when those that are not are cut. Until it has left it may come back, and then it is the same engine. One that
comes back later is a new one: whatever was believed of its predecessor is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.actions import Cut
from proxy.core.backoff import BackOff
from proxy.core.engine import EngineBelief
from proxy.core.health import Condition
from proxy.core.hitrate import HitRate
from proxy.core.limits import EngineLimits
from proxy.core.request import RejectReason
from proxy.core.slicing import unslice

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.core.actions import Action
    from proxy.core.config import SchedulerConfig
    from proxy.core.events import EngineUp
    from proxy.core.lane import Waiting
    from proxy.core.ledger import Ledger
    from proxy.core.queue import Servers, WaitingQueue
    from proxy.core.selfreport import EngineReport


def join(ledger: Ledger, event: EngineUp, config: SchedulerConfig, now: float) -> list[Action]:
    """An engine may be used, or what is known about it has changed; refuse those whom nobody serves any more."""
    known = ledger.engines.get(event.engine_id)
    regroup = known is None or known.leaving or known.models != event.models
    engine = _member(ledger, event.engine_id, config)
    if not engine.up:
        start_anew(ledger, engine, now)
    engine.limits, engine.models, engine.up, engine.plugin = event.limits, event.models, True, event.plugin
    if event.learnt is not None:
        engine.model.restore(event.learnt)
    if event.delay is not None:
        engine.delay.restore(event.delay)
    return _regroup(ledger, RejectReason.UNKNOWN_MODEL, now) if regroup else []


def mark_down(ledger: Ledger, engine_id: str, config: SchedulerConfig, now: float) -> list[Action]:
    """An engine exists but gets nothing new; refuse those whom no other can serve."""
    known = ledger.engines.get(engine_id)
    regroup = known is None or known.leaving
    engine = _member(ledger, engine_id, config)
    engine.up = False
    engine.reports.forget()
    refused = _regroup(ledger, RejectReason.UNKNOWN_MODEL, now) if regroup else []
    _take_half_way_back(ledger, engine, now)
    return refused + _refuse_where_none_is_up(ledger, now)


def remove(ledger: Ledger, engine_id: str, drain_seconds: float, now: float) -> list[Action]:
    """An engine is to leave; refuse those whom no other serves. Unknown ones are ignored, and so is a second time."""
    engine = ledger.engines.get(engine_id)
    if engine is None or engine.leaving:
        return []
    engine.leaving, engine.leaves_at = True, now + drain_seconds
    engine.up = False
    _take_half_way_back(ledger, engine, now)
    refused = _regroup(ledger, RejectReason.NO_ENGINE, now) + _refuse_where_none_is_up(ledger, now)
    let_go(ledger)
    return refused


def let_go(ledger: Ledger) -> None:
    """Forget the engines that are to leave and have nothing of ours any more."""
    for engine in [e for e in ledger.engines.values() if e.leaving and not e.outstanding]:
        del ledger.engines[engine.id]
        ledger.prefixes.clear(engine.id)
        if ledger.modes is not None:
            ledger.modes.forget(engine.id)


def cut_late(ledger: Ledger, now: float) -> list[Action]:
    """Cut what is still in flight at engines whose time to leave has come; each is cut once."""
    actions: list[Action] = []
    for engine in ledger.engines.values():
        if engine.leaving and engine.leaves_at is not None and now >= engine.leaves_at:
            engine.leaves_at = None
            for request_id, entry in ledger.entries.items():
                if entry.engine is engine and not entry.sliced and not entry.cut:
                    entry.cut = True
                    actions.append(Cut(request_id, engine.id))
    return actions


def cuts_due(ledger: Ledger) -> Iterable[float]:
    """When ``cut_late`` has something to do."""
    return (e.leaves_at for e in ledger.engines.values() if e.leaving and e.leaves_at is not None)


def report(ledger: Ledger, engine_id: str, report: EngineReport | None, now: float) -> None:
    """Take in an engine's own figures; they may tell that it has started anew without anybody having seen it down."""
    engine = ledger.engines.get(engine_id)
    if engine is None:
        return
    if report is not None and engine.reports.tells_restart(report):
        engine.restarts += 1
        engine.reports.forget()
        start_anew(ledger, engine, now)
    engine.on_report(report, now)


def start_anew(ledger: Ledger, engine: EngineBelief, now: float) -> None:
    """An engine has started anew, or may have: its cache is empty, and whatever it turned away, that was before."""
    engine.closed_until, engine.back_off = None, BackOff()
    ledger.prefixes.clear(engine.id)
    engine.hit_rate = HitRate()
    # Where nothing has been released yet there is nobody to be compared with, and nothing to be spared.
    engine.health.join(now, gently=ledger.released > 0)


def judge(ledger: Ledger, engine: EngineBelief, request_id: str, *, served: bool | None, now: float) -> None:
    """Take in how an engine has treated a request that is over; eject it if it fails too often."""
    health = engine.health
    if served is None:
        health.left(request_id)
    elif served:
        health.served(request_id, now)
    else:
        health.failed(request_id)
        if health.condition in _EJECTABLE and health.fails_too_often() and _is_spare(ledger, engine):
            health.eject(now)
            _take_half_way_back(ledger, engine, now)
    if not engine.outstanding:
        health.emptied(now)


def watch(ledger: Ledger, now: float) -> None:
    """Look which engines do not work on what they have, and whose time is over for which."""
    for engine in ledger.engines.values():
        health = engine.health
        health.tick(now)
        if health.condition is not Condition.STALLED and engine.up and engine.is_stalled(now):
            health.stall(now)
            _take_half_way_back(ledger, engine, now)


_EJECTABLE = (Condition.HEALTHY, Condition.SLOW_START, Condition.PROBATION)
_OUT = (Condition.EJECTED, Condition.STALLED, Condition.PROBATION)


def _is_spare(ledger: Ledger, engine: EngineBelief) -> bool:
    """Whether the others can do without an engine: not too many are out, and each of its models has another."""
    up = [e for e in ledger.engines.values() if e.up]
    out = [e for e in up if e.health.condition in _OUT and e is not engine]
    if len(out) + 1 > engine.health.most_ejected_share * len(up):
        return False
    fit = [e for e in up if e is not engine and e not in out]
    return all(any(e.serves(model) for e in fit) for model in engine.models or {""})


def reject_all(ledger: Ledger, queue: WaitingQueue, reason: RejectReason, now: float) -> list[Action]:
    """Refuse everybody in a queue."""
    refusals: list[Action] = []
    while queue:
        refusals.append(ledger.reject(queue.oldest, reason, now))
    return refusals


def _member(ledger: Ledger, engine_id: str, config: SchedulerConfig) -> EngineBelief:
    engine = ledger.engines.get(engine_id)
    if engine is None:
        limits, outputs = EngineLimits(), ledger.growth.pooled
        feedback = config.gate.feedback_seconds
        number, health = ledger.joined, config.health
        engine = EngineBelief(engine_id, limits, frozenset(), number, feedback, outputs=outputs, health=health)
        engine.up = False  # until that is said
        ledger.engines[engine_id] = engine
        ledger.joined += 1
    engine.leaving, engine.leaves_at = False, None
    return engine


def _take_half_way_back(ledger: Ledger, engine: EngineBelief, now: float) -> None:
    """Put those back into the queue of whose prompts the engine has only some slices."""
    for entry in [e for e in ledger.sliced.values() if e.engine is engine]:
        unslice(ledger, entry, now)


def _refuse_where_none_is_up(ledger: Ledger, now: float) -> list[Action]:
    refused: list[Action] = []
    for servers, queue in ledger.backlog.queues():
        if not ledger.any_up(servers):
            refused += reject_all(ledger, queue, RejectReason.NO_ENGINE, now)
    return refused


def _regroup(ledger: Ledger, reason: RejectReason, now: float) -> list[Action]:
    """Sort the waiting requests into queues anew, as other engines serve other models now."""
    backlog, overload = ledger.backlog, ledger.overload
    served = {m: ledger.servers(m) for _, queue in backlog.queues() for m in queue.models}
    apart: list[Waiting] = []
    whole: dict[Servers, WaitingQueue] = {}  # by the engines that serve all of a queue now
    for servers, queue in backlog.queues():
        others = {served[model] for model in queue.models}
        to = next(iter(others))
        if others == {servers}:
            continue
        if len(others) == 1 and to and to not in backlog and to not in whole:
            whole[to] = queue
        else:
            apart += [w for w in queue if served[w.request.model] != servers]
    for w in apart:
        ledger.drop(w)
    overload.forget_idle()
    for servers, queue in whole.items():
        overload.hand_over(queue.servers, servers, now)
        backlog.hand_over(queue, servers)
    refused: list[Action] = []
    for w in apart:
        ledger.wait(w, now)
        if not backlog.servers_of(w):
            refused.append(ledger.reject(w, reason, now))
    return refused
