"""The scheduler: which prompt enters which engine, and when.

``Scheduler`` owns all mutable state of the core. Its shell tells it what happened (``handle``), does what it answers,
and calls ``tick`` at ``next_deadline``. Nothing here waits, reads a clock or draws a random number, so one sequence of
events at given times leads to one sequence of actions, live or simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import assert_never

from proxy.core.actions import Action, Dispatch, Reject, Slice
from proxy.core.admission import GateConfig
from proxy.core.engine import EngineBelief, EngineLimits
from proxy.core.events import (
    Arrived,
    DrainStarted,
    Ended,
    EngineDown,
    EngineUp,
    Event,
    NotStarted,
    SliceEnded,
    Tokenized,
    TokensProduced,
)
from proxy.core.ordering import Ordering, shortest_prompt_first
from proxy.core.placement import least_busy, soonest, takes_a_piece
from proxy.core.queue import Backlog, Servers, Waiting, WaitingQueue
from proxy.core.request import RejectReason, Request
from proxy.core.tiles import TileConfig, next_piece


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Rules of the queue. All durations are seconds."""

    ordering: Ordering = field(default_factory=lambda: shortest_prompt_first(10.0))
    gate: GateConfig = field(default_factory=GateConfig)
    tiles: TileConfig | None = None
    """How to cut prompts into tiles; ``None``: they are released whole, by the gate."""
    max_wait_seconds: float = 60.0
    """A request that has waited this long goes before all others."""
    queue_timeout_seconds: float = 300.0
    """A request that has waited this long is refused."""
    max_queue_requests: int = 10_000
    max_queue_bytes: int = 512 << 20
    """Bodies of waiting requests held in memory."""
    no_engine_retry_seconds: float = 5.0
    """What a client is told to wait when no engine is up."""

    def __post_init__(self) -> None:
        durations = self.max_wait_seconds, self.queue_timeout_seconds, self.no_engine_retry_seconds
        if not all(0 < seconds < inf for seconds in durations):
            raise ValueError("durations must be positive and finite")
        if self.max_queue_requests < 0 or self.max_queue_bytes < 0:
            raise ValueError("queue limits must not be negative")


@dataclass(slots=True)
class _Entry:
    """A request from its arrival to its end.

    Waiting while ``engine`` is ``None``; with an engine it is dispatched, or some slices of its prompt are there
    (``sliced``) and the rest waits for that engine alone.
    """

    waiting: Waiting
    engine: EngineBelief | None = None
    sliced: bool = False
    sliceable: bool = False
    first_slice: int = 0
    """Number of the first slice that counts: those of an earlier attempt may still end."""
    sliced_in: int = -1
    """The engine's step in which the last slice was sent."""


class Scheduler:
    """See the module's docstring. ``now`` never decreases from call to call."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        self._engines: dict[str, EngineBelief] = {}
        self._entries: dict[str, _Entry] = {}
        self._backlog = Backlog(self.config.max_wait_seconds)
        self._sliced: dict[str, _Entry] = {}
        self._arrivals = 0
        self._slices = 0
        self._draining = False

    def __repr__(self) -> str:
        return f"<Scheduler {self.waiting} waiting, {self.dispatched} dispatched, {len(self._engines)} engines>"

    @property
    def waiting(self) -> int:
        return len(self._backlog)

    @property
    def waiting_bytes(self) -> int:
        return self._backlog.size_bytes

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return self._backlog.prompt_tokens

    @property
    def dispatched(self) -> int:
        return sum(e.outstanding for e in self._engines.values())

    @property
    def engines(self) -> tuple[EngineBelief, ...]:
        """What is believed of each engine, in the order of joining. To look at, not to change."""
        return tuple(self._engines.values())

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in what happened at ``now`` and return what to do about it, in this order.

        Raises:
            ValueError: an ``Arrived`` whose request id is in use.
        """
        refused: list[Action] = []
        match event:
            case TokensProduced(request_id, chunks):
                return self.on_tokens(request_id, chunks, now)
            case Arrived(request, arrived_at):
                refused = self._enqueue(request, now if arrived_at is None else arrived_at, now)
            case Ended(request_id, tokens):
                self._forget(request_id, now, tokens)
            case NotStarted(request_id, back_off_seconds):
                refused = self._take_back(request_id, back_off_seconds, now)
            case Tokenized(request_id, prompt_tokens):
                self._on_tokenized(request_id, prompt_tokens)
            case SliceEnded(piece, cached):
                refused = self._on_slice_end(piece, cached=cached, now=now)
            case EngineUp():
                refused = self._engine_up(event)
            case EngineDown(engine_id):
                refused = self._engine_down(engine_id)
            case DrainStarted():
                self._draining = True
                refused = [r for entry in list(self._sliced.values()) for r in self._unslice(entry)]
                for _, queue in self._backlog.queues():
                    refused += self._reject_all(queue, RejectReason.DRAINING)
            case _:
                assert_never(event)
        return refused + self._release(now)

    def on_tokens(self, request_id: str, chunks: int, now: float) -> list[Action]:
        """``handle(TokensProduced(request_id, chunks), now)`` without the event: it comes once per token."""
        entry = self._entries.get(request_id)
        if entry is None or entry.engine is None or entry.sliced or not entry.engine.on_tokens(request_id, chunks, now):
            return []  # no step has ended: nothing can have become releasable
        return self._release(now)

    def tick(self, now: float) -> list[Action]:
        """Do what has become due by ``now``."""
        for engine in self._engines.values():
            if engine.closed_until is not None and now >= engine.closed_until:
                engine.closed_until = None
            engine.assume_steps(now)
        late: list[Action] = []
        for _, queue in self._backlog.queues():
            while queue and now >= queue.oldest.arrived_at + self.config.queue_timeout_seconds:
                late.append(self._reject(queue.oldest, RejectReason.QUEUE_TIMEOUT))
        return late + self._release(now)

    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do even if nothing happens before; ``None`` if never.

        Rounded up to a whole microsecond: a clock that ticks in these then never calls too early, again and again.
        """
        if not self._backlog and not self._sliced:
            return None
        due = [queue.oldest.arrived_at + self.config.queue_timeout_seconds for _, queue in self._backlog.queues()]
        for engine in self._engines.values():
            due += (t for t in (engine.closed_until, engine.silent_until()) if t is not None)
        if not due:
            return None
        deadline = min(due)
        microseconds = ceil(deadline * 1e6)
        if microseconds / 1e6 < deadline:  # the product was rounded down to a whole number
            microseconds += 1
        return microseconds / 1e6

    # -- what happened --

    def _enqueue(self, request: Request, arrived_at: float, now: float) -> list[Action]:
        if request.id in self._entries:
            raise ValueError(f"request id {request.id!r} is in use")
        for engine in self._engines.values():
            engine.assume_steps(now)
        if (reason := self._why_refuse(request, now)) is not None:
            return [Reject(request.id, reason, self._retry_after(reason))]
        self._arrivals += 1
        key = self.config.ordering(max(1, request.prompt_tokens), arrived_at)
        waiting = Waiting(request, arrived_at, key, self._arrivals)
        self._entries[request.id] = _Entry(waiting, sliceable=request.sliceable)
        self._push(waiting)
        return []

    def _why_refuse(self, request: Request, now: float) -> RejectReason | None:
        if self._draining:
            return RejectReason.DRAINING
        servers = self._servers(request.model)
        if not servers:
            return RejectReason.UNKNOWN_MODEL if self._engines else RejectReason.NO_ENGINE
        if not self._any_up(servers):
            return RejectReason.NO_ENGINE
        config = self.config
        if (
            self.waiting < config.max_queue_requests
            and self.waiting_bytes + request.size_bytes <= config.max_queue_bytes
        ):
            return None
        # A full queue does not matter to a request that need not wait.
        starts_now = servers not in self._backlog and self._can_start(request, now)
        return None if starts_now else RejectReason.QUEUE_FULL

    def _take_back(self, request_id: str, back_off_seconds: float, now: float) -> list[Action]:
        entry = self._entries.get(request_id)
        if entry is None or entry.engine is None or entry.sliced:
            return []
        engine, entry.engine = entry.engine, None
        engine.end(request_id, now)
        engine.closed_until = max(now + back_off_seconds, engine.closed_until or 0.0)
        self._push(entry.waiting)
        if self._draining:
            return [self._reject(entry.waiting, RejectReason.DRAINING)]
        if not self._any_up(self._backlog.servers_of(entry.waiting)):
            return [self._reject(entry.waiting, RejectReason.NO_ENGINE)]
        return []

    def _engine_up(self, event: EngineUp) -> list[Action]:
        known = self._engines.get(event.engine_id)
        regroup = known is None or known.models != event.models
        engine = self._engine(event.engine_id)
        if not engine.up:
            engine.closed_until = None  # whatever it turned away, that was before
        engine.limits, engine.models, engine.up = event.limits, event.models, True
        return self._regroup() if regroup else []

    def _engine_down(self, engine_id: str) -> list[Action]:
        new = engine_id not in self._engines
        self._engine(engine_id).up = False
        refused = self._regroup() if new else []
        for entry in [e for e in self._sliced.values() if e.engine is not None and e.engine.id == engine_id]:
            refused += self._unslice(entry)
        for servers, queue in self._backlog.queues():
            if not self._any_up(servers):
                refused += self._reject_all(queue, RejectReason.NO_ENGINE)
        return refused

    def _regroup(self) -> list[Action]:
        """Sort the waiting requests into queues anew, as other engines serve other models now."""
        waiting = [w for _, queue in self._backlog.queues() for w in queue]
        for w in waiting:
            self._backlog.remove(w)
        refused: list[Action] = []
        for w in waiting:
            self._push(w)
            if not self._backlog.servers_of(w):
                refused.append(self._reject(w, RejectReason.UNKNOWN_MODEL))
        return refused

    def _servers(self, model: str) -> Servers:
        return frozenset(e.id for e in self._engines.values() if e.serves(model))

    def _any_up(self, servers: Servers) -> bool:
        return any(self._engines[engine_id].up for engine_id in servers)

    def _engine(self, engine_id: str) -> EngineBelief:
        engine = self._engines.get(engine_id)
        if engine is None:
            engine = EngineBelief(
                engine_id, EngineLimits(), frozenset(), len(self._engines), self.config.gate.feedback_seconds
            )
            self._engines[engine_id] = engine
        return engine

    def _on_tokenized(self, request_id: str, prompt_tokens: int) -> None:
        entry = self._entries.get(request_id)
        if entry is None or entry.engine is not None:
            return
        self._backlog.remove(entry.waiting)
        request = replace(entry.waiting.request, prompt_tokens=prompt_tokens)
        key = self.config.ordering(max(1, prompt_tokens), entry.waiting.arrived_at)
        entry.waiting = replace(entry.waiting, request=request, key=key)
        entry.sliceable = True
        self._push(entry.waiting)

    def _on_slice_end(self, piece: Slice, *, cached: bool, now: float) -> list[Action]:
        engine = self._engines.get(piece.engine_id)
        if engine is not None:
            engine.on_slice_end(piece.slice_id, now)
        entry = self._sliced.get(piece.request_id)
        if entry is None or piece.number < entry.first_slice:
            return []
        if cached:
            if engine is not None and piece.tokens == engine.held_tokens(piece.request_id):
                entry.sliced_in = -1  # all that was sent is cached: the next piece can follow at any time
            return []
        entry.sliceable = False
        return self._unslice(entry)

    def _unslice(self, entry: _Entry) -> list[Action]:
        """Put a half-sliced request back into the queue: its engine is gone, or does not cache its slices."""
        request_id = entry.waiting.request.id
        assert entry.engine is not None
        entry.engine.drop_slices(request_id)
        del self._sliced[request_id]
        entry.engine, entry.sliced = None, False
        self._push(entry.waiting)
        return [self._reject(entry.waiting, RejectReason.DRAINING)] if self._draining else []

    # -- what to do --

    def _release(self, now: float) -> list[Action]:
        if not self._backlog and not self._sliced:
            return []
        return self._release_whole(now) if self.config.tiles is None else self._release_tiles(self.config.tiles, now)

    def _release_tiles(self, tiles: TileConfig, now: float) -> list[Action]:
        actions: list[Action] = []
        released = True
        while released:
            released = False
            for engine in sorted(self._engines.values(), key=lambda e: (e.estimated_wait_seconds(0), e.number)):
                action = self._next_piece(engine, tiles, now) if engine.is_open(now) else None
                if action is not None:
                    actions.append(action)
                    released = True
                    break
        return actions

    def _next_piece(self, engine: EngineBelief, tiles: TileConfig, now: float) -> Action | None:
        """Take the next whole prompt, rest of a prompt or slice for ``engine``; shortest remaining prompt first."""
        found: list[tuple[tuple[bool, float], int, _Entry]] = [
            (self._remaining_urgency(e, engine, now), e.waiting.number, e)
            for e in self._sliced.values()
            if e.engine is engine
        ]
        for _, queue in self._backlog.queues():
            head = queue.head(now)
            if engine.serves(head.request.model):
                entry = self._entries[head.request.id]
                found.append((self._remaining_urgency(entry, engine, now), head.number, entry))
        for _, _, entry in sorted(found, key=lambda f: f[:2]):
            request = entry.waiting.request
            held = engine.held_tokens(request.id)
            upto = next_piece(engine, request.prompt_tokens, held, tiles, self.config.gate, sliceable=entry.sliceable)
            if not upto:
                return None  # whoever is next has to wait for it: else nobody long would ever find room
            if upto < request.prompt_tokens and not entry.sliced and engine.sliced >= tiles.max_sliced:
                continue  # enough prompts are half-way: finish one of those
            if entry.sliced and entry.sliced_in == engine.step:
                return None  # one piece of a prompt per step: the next finds this one cached
            if not entry.sliced:
                self._backlog.remove(entry.waiting)
                entry.engine = engine
                entry.first_slice = self._slices
            if upto >= request.prompt_tokens:
                entry.sliced = False
                self._sliced.pop(request.id, None)
                engine.release(request.id, request.prompt_tokens, now, request.request_class.tbt_seconds)
                return Dispatch(request.id, engine.id)
            entry.sliced, entry.sliced_in = True, engine.step
            self._sliced[request.id] = entry
            piece = Slice(request.id, engine.id, upto, held, self._slices)
            self._slices += 1
            engine.release_slice(request.id, piece.slice_id, upto, now)
            return piece
        return None

    def _remaining_urgency(self, entry: _Entry, engine: EngineBelief, now: float) -> tuple[bool, float]:
        """As ``_urgency``, but by what is left of the prompt."""
        waiting = entry.waiting
        remaining = waiting.request.prompt_tokens - engine.held_tokens(waiting.request.id)
        key = self.config.ordering(max(1, remaining), waiting.arrived_at)
        return self._urgency(replace(waiting, key=key), now)

    def _release_whole(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while (action := self._next_whole(now)) is not None:
            actions.append(action)
        return actions

    def _next_whole(self, now: float) -> Action | None:
        """Release the first prompt that finds a place; ``None`` when none does."""
        # One queue is the usual case; with several, a head that finds no place must not block another's. But one that
        # has waited for too long keeps its engines from the others until it fits.
        reserved: set[str] = set()
        heads = [queue.head(now) for _, queue in self._backlog.queues()]
        for waiting in sorted(heads, key=lambda w: (self._urgency(w, now), w.number)):
            request = waiting.request
            engine = soonest(self._engines.values(), request, self.config.gate, now, reserved)
            if engine is not None:
                self._backlog.remove(waiting)
                self._entries[request.id].engine = engine
                engine.release(request.id, request.prompt_tokens, now, request.request_class.tbt_seconds)
                return Dispatch(request.id, engine.id)
            if now - waiting.arrived_at >= self.config.max_wait_seconds:
                reserved |= self._backlog.servers_of(waiting)
        return None

    def _urgency(self, waiting: Waiting, now: float) -> tuple[bool, float]:
        """What to order heads of several queues by: those that waited too long first, oldest first, then by key."""
        overdue = now - waiting.arrived_at >= self.config.max_wait_seconds
        return not overdue, waiting.arrived_at if overdue else waiting.key

    def _can_start(self, request: Request, now: float) -> bool:
        engines, gate, tiles = self._engines.values(), self.config.gate, self.config.tiles
        if tiles is None:
            return soonest(engines, request, gate, now) is not None
        return takes_a_piece(engines, request, tiles, gate, now)

    def place_unscheduled(self, model: str) -> str | None:
        """The engine for a request that is not scheduled; ``None`` if none is up that serves ``model``."""
        engine = least_busy(self._engines.values(), model)
        return None if engine is None else engine.id

    def _reject_all(self, queue: WaitingQueue, reason: RejectReason) -> list[Action]:
        refusals: list[Action] = []
        while queue:
            refusals.append(self._reject(queue.oldest, reason))
        return refusals

    def _reject(self, waiting: Waiting, reason: RejectReason) -> Reject:
        refusal = Reject(waiting.request.id, reason, self._retry_after(reason))
        self._backlog.remove(waiting)
        del self._entries[waiting.request.id]
        return refusal

    def _retry_after(self, reason: RejectReason) -> float | None:
        if reason in (RejectReason.NO_ENGINE, RejectReason.DRAINING):
            return self.config.no_engine_retry_seconds
        if reason not in (RejectReason.QUEUE_FULL, RejectReason.QUEUE_TIMEOUT):
            return None
        # The time in which the engines prefill all that waits, if they do nothing else.
        tokens_per_second = sum(e.prefill_budget / e.step_seconds for e in self._engines.values() if e.up)
        return min(60.0, max(1.0, self.waiting_tokens / max(tokens_per_second, 1.0)))

    def _push(self, waiting: Waiting) -> None:
        self._backlog.push(waiting, self._servers(waiting.request.model))

    def _forget(self, request_id: str, now: float, tokens: int | None) -> None:
        entry = self._entries.get(request_id)
        if entry is None:
            return
        if entry.engine is None:
            self._backlog.remove(entry.waiting)
        elif entry.sliced:
            entry.engine.drop_slices(request_id)
            del self._sliced[request_id]
        else:
            entry.engine.end(request_id, now, tokens)
        del self._entries[request_id]
