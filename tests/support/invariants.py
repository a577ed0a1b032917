"""What must hold of the scheduler after every call, and of the records of every run, whatever happened."""

from collections.abc import Iterable

import pytest

from proxy.core.engine import EngineBelief
from proxy.core.forecast import Spread
from proxy.core.lane import Band
from proxy.core.overload import MAX_SENT_AWAY, has_limit
from proxy.core.prefix import PrefixIndex
from proxy.core.queue import WaitingQueue, flow_of
from proxy.core.scheduler import Scheduler
from proxy.sim.records import RequestRecord


def check_scheduler(scheduler: Scheduler, now: float) -> None:
    """Assert everything that holds after any call at ``now``."""
    check_accounts(scheduler)
    if not is_tick_owed(scheduler, now):
        check_work_conserving(scheduler, now)
        check_nothing_more_to_release(scheduler, now)


def check_after_tick(scheduler: Scheduler, now: float) -> None:
    """Assert that a tick did all that was due."""
    check_scheduler(scheduler, now)
    deadline = scheduler.next_deadline()
    assert deadline is None or deadline > now, f"due at {deadline}, but it was done at {now}"


def check_accounts(scheduler: Scheduler) -> None:
    """Assert that every sum equals the sum over its parts and that nothing is kept of what is over."""
    waiting = {i: e.waiting for i, e in scheduler._ledger.entries.items() if e.engine is None}
    queued = [w for queue in scheduler._ledger.backlog._queues.values() for w in queue]
    assert sorted(w.request.id for w in queued) == sorted(waiting), "the queues hold just the waiting requests"
    assert all(waiting[w.request.id] is w for w in queued)
    for queue in scheduler._ledger.backlog._queues.values():
        assert len(queue) > 0, "an empty queue is removed"
        check_lanes(queue)
    assert scheduler._ledger.backlog.with_deadline == sum(w.ttft_deadline is not None for w in queued)
    assert scheduler.waiting == len(waiting)
    assert scheduler.waiting_bytes == sum(w.request.size_bytes for w in queued)
    assert scheduler.waiting_tokens == sum(w.request.prompt_tokens for w in queued)
    for servers, queue in scheduler._ledger.backlog._queues.items():
        for w in queue:
            serving = frozenset(e.id for e in scheduler.engines if e.serves(w.request.model))
            assert scheduler._ledger.backlog.servers_of(w) == servers == serving, "a queue is of those who serve it"

    overload = scheduler._ledger.overload
    for servers, outflow in overload._outflows.items():
        here = scheduler._ledger.backlog._queues.get(servers, ())
        assert outflow.tokens == sum(max(1, w.request.prompt_tokens) for w in here), (
            "an outflow has the work of its queue"
        )
        assert len(outflow) == len(here)
        assert outflow._flows.keys() == {flow_of(w.request) for w in here}
        for flow, line in outflow._flows.items():
            tokens = [max(1, w.request.prompt_tokens) for w in here if flow_of(w.request) == flow]
            assert (line.work.tokens, len(line.work)) == (sum(tokens), len(tokens))
    assert set(scheduler._ledger.backlog._queues) <= set(overload._outflows)
    holdings = overload._holdings._held
    assert holdings.keys() == {w.request.tenant for w in queued}
    for tenant, holding in holdings.items():
        own = [w.request for w in queued if w.request.tenant == tenant]
        assert [w.request.tenant for w in holding.newest_first] == [tenant] * len(own)
        assert (holding.requests, holding.size_bytes, holding.tokens) == (
            len(own),
            sum(r.size_bytes for r in own),
            sum(r.prompt_tokens for r in own),
        )
    assert sorted(w.number for w in overload._due) == sorted(w.number for w in queued if has_limit(w.request))
    assert all(w.request.may_wait for w in queued), "who may not wait does not"
    assert len(overload._sent_away) <= MAX_SENT_AWAY

    engaged = {i: e for i, e in scheduler._ledger.entries.items() if e.engine is not None}
    sliced = {i: e for i, e in engaged.items() if e.sliced}
    assert scheduler._ledger.sliced == sliced, "a request is waiting, sliced or dispatched"
    if waiting:
        assert scheduler.next_deadline() is not None, "what waits can time out, so there is a deadline"
    if not waiting and not sliced and all(e.leaves_at is None for e in scheduler.engines):
        assert scheduler.next_deadline() is None
    assert scheduler.dispatched == len(engaged) - len(sliced) + sum(len(slices_of(e)) for e in scheduler.engines)
    assert scheduler.prefixes._uses.keys() <= engaged.keys() - sliced.keys(), "nothing is kept of what is over"
    for engine in scheduler.engines:
        check_engine(engine)
        check_prefix_index(scheduler.prefixes.index(engine.id))
        at_it = {i for i, e in engaged.items() if e.engine is engine}
        assert at_it - sliced.keys() == {*engine._prefills, *engine._streams} - slices_of(engine)
        assert at_it & sliced.keys() == engine._held.keys()
        for request_id, held in engine._held.items():
            assert 0 < held < engaged[request_id].waiting.request.prompt_tokens


def check_prefix_index(index: PrefixIndex) -> None:
    assert index.tokens == sum(tokens for tokens, _ in index._blocks.values())
    assert index.tokens <= index.capacity_tokens
    assert 0 <= index.trust <= 1


def check_lanes(queue: WaitingQueue) -> None:
    """Assert that every waiting request is in its flow's lane, there in one band, and that just these flows wait."""
    assert sorted(w.request.id for lane in queue._lanes.values() for w in lane._by_age) == sorted(
        w.request.id for w in queue
    )
    for flow, lane in queue._lanes.items():
        assert len(lane) > 0, "an empty lane is removed"
        assert {flow_of(w.request) for w in lane._by_age} == {flow}
        bands = [w.request.id for band in (lane._by_key, lane._hopeless) for w in band]
        assert sorted(bands) == sorted(w.request.id for w in lane._by_age)
        assert lane._timed.keys() == {w.request.id for w in lane._by_age if w.ttft_deadline is not None}
        for timed in lane._timed.values():
            assert (timed.waiting in lane._hopeless) == (timed.band is Band.HOPELESS)
            assert (timed.waiting in lane._urgent) == (timed.band is Band.URGENT)
        assert set(lane._checks) <= set(lane._timed.values())
    assert sum(queue._shares.share_of(flow) for flow in queue._lanes) == pytest.approx(1.0), "they share all there is"
    weights = {flow.class_weight for flow in queue._lanes}
    assert {c.key for c in queue._shares._classes._waiting} == weights
    for weight, level in queue._shares._tenants.items():
        waiting = {c.key for c in level._waiting}
        assert waiting == {flow.tenant for flow in queue._lanes if flow.class_weight == weight}
        assert level._counters.keys() == waiting | level._idle.keys()
        assert not waiting & level._idle.keys()


def slices_of(engine: EngineBelief) -> set[str]:
    """Ids of the slices that are on their way; those of requests have no slash in tests."""
    return {key for key in engine._prefills if "/" in key}


def check_engine(engine: EngineBelief) -> None:
    prefills, streams = engine._prefills, engine._streams
    assert not prefills.keys() & streams.keys(), "a request is in exactly one of prefills, streams"
    assert engine.outstanding == len(prefills) + len(streams)
    assert engine.decodes == len(streams)
    assert all(0 <= p.remaining <= p.context for p in prefills.values())
    assert engine.backlog == sum(p.remaining for p in prefills.values()) >= 0
    contexts = sum(s.context for s in streams.values())
    whole = sum(p.context for key, p in prefills.items() if key not in slices_of(engine))
    # What a slice has cached is its request's, for as long as that is not over.
    assert engine.kv_tokens == whole + sum(engine._held.values()) + contexts >= 0
    assert engine.sliced == len(engine._held)
    assert engine._outlook._given.keys() == (prefills.keys() | streams.keys()) - slices_of(engine)
    deadlines = [p.tbt_seconds for p in prefills.values()] + [s.tbt_seconds for s in streams.values()]
    assert sorted(engine._deadlines.elements()) == sorted(d for d in deadlines if d is not None)
    assert 0 <= engine.untaken() <= engine.backlog
    for soonest in (False, True):
        spread = Spread(engine.step, engine.prefill_budget)
        spread.add((p, p.may_join if soonest else p.joins) for p in prefills.values())
        loads = list(spread.loads(engine.decodes, engine._stream_context))
        assert engine._loads(soonest=soonest) == loads, "it is kept up"
    assert engine.step_seconds > 0
    assert 1 <= engine.prefill_budget <= engine.limits.token_budget
    assert engine.reports.foreign >= 0
    assert 0 <= engine.reports.caution < 1


def is_open(engine: EngineBelief, now: float) -> bool:
    return engine.up and (engine.closed_until is None or engine.closed_until <= now) and engine.health.takes(now)


def is_tick_owed(scheduler: Scheduler, now: float) -> bool:
    """Whether the shell still has to call ``tick``: only then is all done that can be."""
    deadline = scheduler.next_deadline()
    return deadline is not None and deadline <= now


def check_nothing_more_to_release(scheduler: Scheduler, now: float) -> None:
    """Assert that no request waits that the scheduler's own rules would let in."""
    left = scheduler._release(now)
    assert not left, f"{left} could have been released before"


def check_work_conserving(scheduler: Scheduler, now: float) -> None:
    """Assert that no engine stands idle while a request that it serves waits."""
    for entry in scheduler._ledger.entries.values():
        request = entry.waiting.request
        if entry.engine is None:
            idle = [e for e in scheduler.engines if is_open(e, now) and not e.outstanding and e.serves(request.model)]
        else:
            idle = (
                [entry.engine] if entry.sliced and is_open(entry.engine, now) and not entry.engine.outstanding else []
            )
        assert not idle, f"{request} waits while {idle} are idle"


def check_records(records: Iterable[RequestRecord]) -> None:
    """Assert that every request of a simulation has ended, and how it says it did."""
    for record in records:
        request = record.request
        assert record.sent_at is not None
        assert record.finished_at is not None, f"{request} never ended"
        assert record.sent_at <= record.finished_at
        assert all(gap > 0 for gap in record.gaps)
        if record.error is None:
            assert record.completed
            assert record.tokens == request.output_tokens == len(record.gaps) + 1
            assert record.first_token_at is not None
            assert record.sent_at < record.first_token_at <= record.finished_at == record.last_token_at
        else:
            assert not record.completed
            assert not record.attained
