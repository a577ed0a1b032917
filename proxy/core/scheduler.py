"""The scheduler: which prompt enters which engine, and when.

``Scheduler`` owns all mutable state of the core. Its shell tells it what happened (``handle``), does what it answers,
and calls ``tick`` at ``next_deadline``. Nothing here waits, reads a clock or draws a random number, so one sequence of
events at given times leads to one sequence of actions, live or simulated.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, assert_never

from proxy.core.actions import Action, Reject
from proxy.core.config import SchedulerConfig
from proxy.core.engine import EngineBelief, EngineLimits
from proxy.core.events import (
    Arrived,
    DrainStarted,
    Ended,
    EngineDown,
    EngineReported,
    EngineUp,
    Event,
    NotStarted,
    SliceEnded,
    Tokenized,
    TokensProduced,
)
from proxy.core.lane import Waiting
from proxy.core.ledger import Entry, Ledger
from proxy.core.placement import least_busy, soonest, takes_a_piece
from proxy.core.rad import ModeSwitch
from proxy.core.release import next_whole
from proxy.core.request import RejectReason, Request
from proxy.core.slicing import next_tile, on_slice_end, unslice

if TYPE_CHECKING:
    from proxy.core.prefix import Prefixes
    from proxy.core.queue import WaitingQueue


class Scheduler:
    """See the module's docstring. ``now`` never decreases from call to call."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        rad = self.config.rad
        modes = None if rad is None else ModeSwitch(rad)
        self._ledger = Ledger(self.config.max_wait_seconds, modes, self.config.tenant_weights)
        self._arrivals = 0
        self._draining = False

    def __repr__(self) -> str:
        return f"<Scheduler {self.waiting} waiting, {self.dispatched} dispatched, {len(self._ledger.engines)} engines>"

    @property
    def waiting(self) -> int:
        return len(self._ledger.backlog)

    @property
    def waiting_bytes(self) -> int:
        return self._ledger.backlog.size_bytes

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return self._ledger.backlog.prompt_tokens

    @property
    def dispatched(self) -> int:
        return sum(e.outstanding for e in self._ledger.engines.values())

    @property
    def engines(self) -> tuple[EngineBelief, ...]:
        """What is believed of each engine, in the order of joining. To look at, not to change."""
        return tuple(self._ledger.engines.values())

    @property
    def ledger(self) -> Ledger:
        """Who is where. To look at, not to change."""
        return self._ledger

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def prefixes(self) -> Prefixes:
        """What is believed of the engines' prefix caches. To look at."""
        return self._ledger.prefixes

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
            case Ended(request_id, tokens, cached_tokens):
                self._forget(request_id, now, tokens)
                self._ledger.prefixes.end(request_id, cached_tokens)
            case NotStarted(request_id, back_off_seconds):
                refused = self._take_back(request_id, back_off_seconds, now)
            case Tokenized(request_id, prompt_tokens):
                self._on_tokenized(request_id, prompt_tokens)
            case SliceEnded(piece, cached):
                entry = on_slice_end(self._ledger, piece, cached=cached, now=now)
                refused = self._refuse_if_draining(entry) if entry is not None else []
            case EngineUp():
                refused = self._engine_up(event)
            case EngineDown(engine_id):
                refused = self._engine_down(engine_id)
            case EngineReported(engine_id, report):
                if (engine := self._ledger.engines.get(engine_id)) is not None:
                    engine.on_report(report, now)
            case DrainStarted():
                self._draining = True
                for entry in list(self._ledger.sliced.values()):
                    unslice(self._ledger, entry)
                for _, queue in self._ledger.backlog.queues():
                    refused += self._reject_all(queue, RejectReason.DRAINING)
            case _:
                assert_never(event)
        return refused + self._release(now)

    def on_tokens(self, request_id: str, chunks: int, now: float) -> list[Action]:
        """``handle(TokensProduced(request_id, chunks), now)`` without the event: it comes once per token."""
        entry = self._ledger.entries.get(request_id)
        if entry is None or entry.engine is None or entry.sliced or not entry.engine.on_tokens(request_id, chunks, now):
            return []  # no step has ended: nothing can have become releasable
        return self._release(now)

    def tick(self, now: float) -> list[Action]:
        """Do what has become due by ``now``."""
        for engine in self._ledger.engines.values():
            if engine.closed_until is not None and now >= engine.closed_until:
                engine.closed_until = None
            engine.assume_steps(now)
        late: list[Action] = []
        for _, queue in self._ledger.backlog.queues():
            while queue and now >= queue.oldest.arrived_at + self.config.queue_timeout_seconds:
                late.append(self._reject(queue.oldest, RejectReason.QUEUE_TIMEOUT))
        return late + self._release(now)

    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do even if nothing happens before; ``None`` if never.

        Rounded up to a whole microsecond: a clock that ticks in these then never calls too early, again and again.
        """
        if not self._ledger.backlog and not self._ledger.sliced:
            return None
        due = [
            queue.oldest.arrived_at + self.config.queue_timeout_seconds for _, queue in self._ledger.backlog.queues()
        ]
        for engine in self._ledger.engines.values():
            due += (t for t in (engine.closed_until, engine.silent_until()) if t is not None)
        if (modes := self._ledger.modes) is not None:
            held = (modes.due_at(queue.oldest.arrived_at) for _, queue in self._ledger.backlog.queues())
            due += (t for t in held if t is not None)
        if not due:
            return None
        deadline = min(due)
        microseconds = ceil(deadline * 1e6)
        if microseconds / 1e6 < deadline:  # the product was rounded down to a whole number
            microseconds += 1
        return microseconds / 1e6

    # -- what happened --

    def _enqueue(self, request: Request, arrived_at: float, now: float) -> list[Action]:
        if request.id in self._ledger.entries:
            raise ValueError(f"request id {request.id!r} is in use")
        for engine in self._ledger.engines.values():
            engine.assume_steps(now)
        if (reason := self._why_refuse(request, now)) is not None:
            return [Reject(request.id, reason, self._retry_after(reason))]
        self._arrivals += 1
        # By what is cached now. That may change while it waits, but a key that moves would have to be sorted anew.
        key = self.config.ordering(self._ledger.uncached_tokens(request), arrived_at)
        waiting = Waiting(request, arrived_at, key, self._arrivals)
        self._ledger.entries[request.id] = Entry(waiting, sliceable=request.sliceable)
        self._ledger.wait(waiting)
        return []

    def _why_refuse(self, request: Request, now: float) -> RejectReason | None:
        if self._draining:
            return RejectReason.DRAINING
        servers = self._ledger.servers(request.model)
        if not servers:
            return RejectReason.UNKNOWN_MODEL if self._ledger.engines else RejectReason.NO_ENGINE
        if not self._ledger.any_up(servers):
            return RejectReason.NO_ENGINE
        config = self.config
        if (
            self.waiting < config.max_queue_requests
            and self.waiting_bytes + request.size_bytes <= config.max_queue_bytes
        ):
            return None
        # A full queue does not matter to a request that need not wait.
        starts_now = servers not in self._ledger.backlog and self._can_start(request, now)
        return None if starts_now else RejectReason.QUEUE_FULL

    def _take_back(self, request_id: str, back_off_seconds: float, now: float) -> list[Action]:
        entry = self._ledger.entries.get(request_id)
        if entry is None or entry.engine is None or entry.sliced:
            return []
        engine, entry.engine = entry.engine, None
        engine.end(request_id, now)
        self._ledger.prefixes.take_back(request_id)
        engine.closed_until = max(now + back_off_seconds, engine.closed_until or 0.0)
        self._ledger.wait(entry.waiting)
        if self._draining:
            return [self._reject(entry.waiting, RejectReason.DRAINING)]
        if not self._ledger.any_up(self._ledger.backlog.servers_of(entry.waiting)):
            return [self._reject(entry.waiting, RejectReason.NO_ENGINE)]
        return []

    def _engine_up(self, event: EngineUp) -> list[Action]:
        known = self._ledger.engines.get(event.engine_id)
        regroup = known is None or known.models != event.models
        engine = self._engine(event.engine_id)
        if not engine.up:
            engine.closed_until = None  # whatever it turned away, that was before
            self._ledger.prefixes.clear(event.engine_id)
        engine.limits, engine.models, engine.up = event.limits, event.models, True
        if event.learnt is not None:
            engine.model.restore(event.learnt)
        return self._regroup() if regroup else []

    def _engine_down(self, engine_id: str) -> list[Action]:
        new = engine_id not in self._ledger.engines
        engine = self._engine(engine_id)
        engine.up = False
        engine.reports.forget()
        refused = self._regroup() if new else []
        for entry in [e for e in self._ledger.sliced.values() if e.engine is not None and e.engine.id == engine_id]:
            unslice(self._ledger, entry)
            refused += self._refuse_if_draining(entry)
        for servers, queue in self._ledger.backlog.queues():
            if not self._ledger.any_up(servers):
                refused += self._reject_all(queue, RejectReason.NO_ENGINE)
        return refused

    def _regroup(self) -> list[Action]:
        """Sort the waiting requests into queues anew, as other engines serve other models now."""
        waiting = [w for _, queue in self._ledger.backlog.queues() for w in queue]
        for w in waiting:
            self._ledger.backlog.remove(w)
        refused: list[Action] = []
        for w in waiting:
            self._ledger.wait(w)
            if not self._ledger.backlog.servers_of(w):
                refused.append(self._reject(w, RejectReason.UNKNOWN_MODEL))
        return refused

    def _engine(self, engine_id: str) -> EngineBelief:
        engine = self._ledger.engines.get(engine_id)
        if engine is None:
            engine = EngineBelief(
                engine_id,
                EngineLimits(),
                frozenset(),
                len(self._ledger.engines),
                self.config.gate.feedback_seconds,
                outputs=self._ledger.growth.pooled,
            )
            self._ledger.engines[engine_id] = engine
        return engine

    def _on_tokenized(self, request_id: str, prompt_tokens: int) -> None:
        entry = self._ledger.entries.get(request_id)
        if entry is None or entry.engine is not None:
            return
        self._ledger.backlog.remove(entry.waiting)
        request = replace(entry.waiting.request, prompt_tokens=prompt_tokens)
        key = self.config.ordering(self._ledger.uncached_tokens(request), entry.waiting.arrived_at)
        entry.waiting = replace(entry.waiting, request=request, key=key)
        entry.sliceable = True
        self._ledger.wait(entry.waiting)

    # -- what to do --

    def _release(self, now: float) -> list[Action]:
        ledger, config = self._ledger, self.config
        actions: list[Action] = []
        while ledger.backlog or ledger.sliced:
            tiles = config.tiles
            action = next_tile(ledger, config, tiles, now) if tiles else next_whole(ledger, config, now)
            if action is None:
                break
            actions.append(action)
        return actions

    def _refuse_if_draining(self, entry: Entry) -> list[Action]:
        return [self._reject(entry.waiting, RejectReason.DRAINING)] if self._draining else []

    def _can_start(self, request: Request, now: float) -> bool:
        ledger, gate, tiles = self._ledger, self.config.gate, self.config.tiles
        kept = ledger.kept_from(request, ledger.servers(request.model), gate)
        engines = [e for e in ledger.engines_for(now, now) if e.id not in kept]
        if tiles is None:
            return soonest(engines, request, gate, now, self._ledger.prefixes, arrived_at=now) is not None
        return takes_a_piece(engines, request, tiles, gate, now)

    def place_unscheduled(self, model: str) -> str | None:
        """The engine for a request that is not scheduled; ``None`` if none is up that serves ``model``."""
        engine = least_busy(self._ledger.engines.values(), model)
        return None if engine is None else engine.id

    def _reject_all(self, queue: WaitingQueue, reason: RejectReason) -> list[Action]:
        refusals: list[Action] = []
        while queue:
            refusals.append(self._reject(queue.oldest, reason))
        return refusals

    def _reject(self, waiting: Waiting, reason: RejectReason) -> Reject:
        refusal = Reject(waiting.request.id, reason, self._retry_after(reason))
        self._ledger.backlog.remove(waiting)
        del self._ledger.entries[waiting.request.id]
        return refusal

    def _retry_after(self, reason: RejectReason) -> float | None:
        if reason in (RejectReason.NO_ENGINE, RejectReason.DRAINING):
            return self.config.no_engine_retry_seconds
        if reason not in (RejectReason.QUEUE_FULL, RejectReason.QUEUE_TIMEOUT):
            return None
        # The time in which the engines prefill all that waits, if they do nothing else.
        tokens_per_second = sum(e.prefill_budget / e.step_seconds for e in self._ledger.engines.values() if e.up)
        return min(60.0, max(1.0, self.waiting_tokens / max(tokens_per_second, 1.0)))

    def _forget(self, request_id: str, now: float, tokens: int | None) -> None:
        entry = self._ledger.entries.get(request_id)
        if entry is None:
            return
        if entry.engine is None:
            self._ledger.backlog.remove(entry.waiting)
        elif entry.sliced:
            entry.engine.drop_slices(request_id)
            del self._ledger.sliced[request_id]
        else:
            assert entry.bill is not None
            generated = entry.engine.context_tokens(request_id) - entry.waiting.request.prompt_tokens
            entry.bill.settle(max(tokens or 0, generated))
            entry.engine.end(request_id, now, tokens)
        del self._ledger.entries[request_id]
