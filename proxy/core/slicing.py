"""Release of prompts in tiles: the shortest remaining prompt first, whole, or a slice of it (see ``tiles``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.actions import Dispatch, Slice
from proxy.core.admission import fits_kv
from proxy.core.lane import urgency
from proxy.core.request import RejectReason
from proxy.core.tiles import next_piece

if TYPE_CHECKING:
    from proxy.core.actions import Reject
    from proxy.core.config import SchedulerConfig
    from proxy.core.engine import EngineBelief
    from proxy.core.lane import Band
    from proxy.core.ledger import Entry, Ledger
    from proxy.core.request import Request
    from proxy.core.tiles import TileConfig


def next_tile(ledger: Ledger, config: SchedulerConfig, tiles: TileConfig, now: float) -> Dispatch | Slice | None:
    """Release one more piece of a prompt to the engine that has the least to do; ``None`` when none takes any."""
    for engine in sorted(ledger.engines.values(), key=lambda e: (e.estimated_wait_seconds(0), e.number)):
        if engine.is_open(now) and (action := _next_of(engine, ledger, config, tiles, now)) is not None:
            return action
    return None


def _next_of(
    engine: EngineBelief, ledger: Ledger, config: SchedulerConfig, tiles: TileConfig, now: float
) -> Dispatch | Slice | None:
    """Take the next whole prompt, rest of a prompt or slice for ``engine``."""
    held_in = engine.slice_held_in  # a slice was held in that step
    engine.slice_at = engine.slice_held_in = None
    candidates = [e for e in ledger.sliced.values() if e.engine is engine]
    in_line = float(len(candidates))
    sent = any(entry.sliced_in == engine.step for entry in candidates)  # a slice, in this step
    pace = ledger.pace()
    for servers, queue in ledger.backlog.queues():
        head = queue.head(now, pace)
        if engine.serves(head.request.model):
            candidates.append(ledger.entries[head.request.id])
            in_line += len(queue) / len(servers)
    line_seconds = in_line / engine.prompts_per_second(now)
    candidates.sort(key=lambda e: (_rank(e, engine, ledger, config, now), e.waiting.number))
    for entry in candidates:
        request = entry.waiting.request
        if not entry.sliced:
            servers = ledger.backlog.servers_of(entry.waiting)
            if engine.id in ledger.kept_from(request, servers, config.gate, now):
                continue  # what room there is, is for other tenants
        if entry.sliced and entry.sliced_in == engine.step:
            continue  # one piece of a prompt per step: the next finds this one cached
        upto = next_piece(
            engine, request, now, tiles, config.gate, sliceable=entry.sliceable, line_seconds=line_seconds
        )
        if not upto:
            return None  # whoever is next has to wait for it: else nobody long would ever find room
        if upto < request.prompt_tokens and not entry.sliced and engine.sliced >= tiles.max_sliced:
            continue  # enough prompts are half-way: finish one of those
        if upto >= request.prompt_tokens:
            ledger.dispatch(entry.waiting, engine, now)
            return Dispatch(request.id, engine.id)
        if sent:
            return None  # what room is left is for whole prompts
        # One that has missed a step, as that ended sooner than it should have, would else miss the next as well.
        missed = held_in is not None and held_in < engine.step
        if not missed and _can_wait(request, ledger) and now < (last_call := engine.last_call()):
            engine.slice_at, engine.slice_held_in = last_call, engine.step
            return None
        return _slice(ledger, entry, engine, upto, now)
    return None


def _can_wait(request: Request, ledger: Ledger) -> bool:
    """Whether a slice that could go now may be held for a moment: not where the request must not be in the queue."""
    return request.may_wait and not ledger.overload.overflows(ledger.backlog)


def _slice(ledger: Ledger, entry: Entry, engine: EngineBelief, upto_tokens: int, now: float) -> Slice:
    request_id = entry.waiting.request.id
    ledger.charge(entry, upto_tokens, now)
    if not entry.sliced:
        ledger.sliced[request_id] = entry
        entry.engine, entry.sliced, entry.first_slice = engine, True, ledger.slices
    entry.sliced_in = engine.step
    piece = Slice(request_id, engine.id, upto_tokens, engine.held_tokens(request_id), ledger.slices)
    ledger.slices += 1
    engine.release_slice(request_id, piece.slice_id, upto_tokens, now)
    return piece


def _rank(
    entry: Entry, engine: EngineBelief, ledger: Ledger, config: SchedulerConfig, now: float
) -> tuple[tuple[float, float], tuple[Band, float]]:
    """Whose turn it is, then the order in that flow, by what is left of the prompt.

    A head of a queue is of the flow that goes next there; one half-way may have had more than its share since. Only
    the order believes in cached prefixes: a tile is sized without them, as a wrong belief would break a deadline.
    """
    waiting = entry.waiting
    request = waiting.request
    cached = max(engine.held_tokens(request.id), ledger.prefixes.cached_tokens(request, engine))
    remaining = max(1, request.prompt_tokens - cached)
    key = config.ordering(remaining, waiting.aged_from)
    pace = ledger.pace()
    return ledger.ahead(entry, now), urgency(
        waiting, remaining, key, now, pace=pace, max_wait_seconds=config.max_wait_seconds
    )


def on_slice_end(ledger: Ledger, piece: Slice, *, cached: bool, now: float) -> Entry | None:
    """Note the end of a slice; return the request if it cannot be sliced any more and waits in the queue again."""
    engine = ledger.engines.get(piece.engine_id)
    if engine is not None:
        engine.on_slice_end(piece.slice_id, now)
    entry = ledger.sliced.get(piece.request_id)
    if entry is None or piece.number < entry.first_slice:
        return None
    if cached:
        if engine is not None and piece.tokens == engine.held_tokens(piece.request_id):
            entry.sliced_in = -1  # all that was sent is cached: the next piece can follow at any time
        return None
    entry.sliceable = False
    unslice(ledger, entry, now)
    return entry


def unslice(ledger: Ledger, entry: Entry, now: float) -> None:
    """Put a half-sliced request back into the queue: its engine is gone, or does not cache its slices."""
    request_id = entry.waiting.request.id
    assert entry.engine is not None
    entry.engine.drop_slices(request_id)
    del ledger.sliced[request_id]
    entry.engine, entry.sliced = None, False
    ledger.wait(entry.waiting, now)


def waits_until(entry: Entry, ledger: Ledger, config: SchedulerConfig) -> float:
    """When the wait of a request half-way ends: by its own limit on TTFT, or with everybody's time in the queue."""
    waiting = entry.waiting
    return waiting.arrived_at + min(ledger.overload.limit_seconds(waiting.request), config.queue_timeout_seconds)


def end_waits(ledger: Ledger, config: SchedulerConfig, now: float) -> list[Dispatch | Reject]:
    """End the waits of requests half-way that have lasted as long as any may.

    What is left of the prompt goes whole and at once, although that may overrun a TBT deadline: its beginning is
    computed, and its client was told how long it might wait. Where the engine has no place for it, the wait would go on
    in there, so it is refused as it would be in the queue.
    """
    ended: list[Dispatch | Reject] = []
    for entry in [e for e in ledger.sliced.values() if now >= waits_until(e, ledger, config)]:
        engine, waiting = entry.engine, entry.waiting
        assert engine is not None
        left = waiting.request.prompt_tokens - engine.held_tokens(waiting.request.id)
        if engine.is_open(now) and not engine.is_full and fits_kv(engine, left, config.gate):
            ledger.dispatch(waiting, engine, now)
            ended.append(Dispatch(waiting.request.id, engine.id))
            continue
        unslice(ledger, entry, now)
        late = now >= waiting.arrived_at + config.queue_timeout_seconds
        reason = RejectReason.QUEUE_TIMEOUT if late else RejectReason.TOO_LATE
        ended.append(ledger.reject(waiting, reason, now))
    return ended
