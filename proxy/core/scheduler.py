"""The scheduler: which prompt enters which engine, and when.

``Scheduler`` owns all mutable state of the core. Its shell tells it what happened (``handle``), does what it answers,
and calls ``tick`` at ``next_deadline``. Nothing here waits, reads a clock or draws a random number, so one sequence of
events at given times leads to one sequence of actions, live or simulated.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING, assert_never

from proxy.core.bypass import bypass
from proxy.core.config import SchedulerConfig
from proxy.core.entrance import hold_bounds, make_room, why_refuse
from proxy.core.events import (
    Arrived,
    DrainStarted,
    Ended,
    EngineDown,
    EngineRemoved,
    EngineReported,
    EngineUp,
    Event,
    HandedOver,
    NotStarted,
    Passed,
    Reconfigured,
    SliceEnded,
    Tokenized,
    TokensProduced,
)
from proxy.core.lane import Waiting
from proxy.core.leaving import forget, give_up, take_back
from proxy.core.ledger import Entry, Ledger
from proxy.core.membership import (
    cut_late,
    cuts_due,
    join,
    let_go,
    mark_down,
    reject_all,
    remove,
    report,
    watch,
)
from proxy.core.overload import Overload
from proxy.core.placement import least_busy
from proxy.core.rad import ModeSwitch
from proxy.core.release import next_whole
from proxy.core.request import RejectReason, Request
from proxy.core.slicing import end_waits, next_tile, on_slice_end, unslice, waits_until

if TYPE_CHECKING:
    from proxy.core.actions import Action
    from proxy.core.blame import Blame
    from proxy.core.engine import EngineBelief
    from proxy.core.prefix import Prefixes


class Scheduler:
    """See the module's docstring. ``now`` never decreases from call to call."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        rad = self.config.rad
        modes = None if rad is None else ModeSwitch(rad)
        self._ledger = Ledger(
            self.config.max_wait_seconds,
            Overload(self.config),
            modes,
            self.config.tenant_weights,
            self.config.tenant_guarantees,
        )
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
    def outflow_tokens_per_second(self) -> float:
        """Prompt tokens released per second while somebody waited."""
        return self._ledger.overload.tokens_per_second

    def slices_pay(self, engine_id: str, now: float) -> bool:
        """Whether an engine keeps what slices bring in its cache, as far as it has told."""
        engine = self._ledger.engines.get(engine_id)
        return engine is None or engine.hit_rate.pays(now)

    def blame(self, request_id: str, gap_seconds: float, chunks: int, now: float) -> Blame | None:
        """Say why a stream's ``chunks`` chunks came late now; ``None`` if it is not known here or has no deadline."""
        entry = self._ledger.entries.get(request_id)
        if entry is None or entry.engine is None:
            return None
        tbt_seconds = entry.waiting.request.request_class.tbt_seconds
        return None if tbt_seconds is None else entry.engine.blame(gap_seconds, tbt_seconds, chunks, now)

    @property
    def harmful_releases(self) -> int:
        """Prompts released although they were to overrun a TBT deadline; counted where the rules spare those."""
        return self._ledger.harmful_releases

    @property
    def prefixes(self) -> Prefixes:
        """What is believed of the engines' prefix caches. To look at."""
        return self._ledger.prefixes

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in what happened at ``now`` and return what to do about it, in this order.

        Raises:
            ValueError: an ``Arrived`` whose request id is in use.
        """
        if isinstance(event, TokensProduced):
            return self.on_tokens(event.request_id, event.chunks, now) or []
        refused: list[Action] = []
        watch(self._ledger, now)
        match event:
            case Arrived(request, arrived_at):
                refused = self._enqueue(request, now if arrived_at is None else arrived_at, now)
            case Ended(request_id, tokens, cached_tokens, served):
                forget(self._ledger, request_id, now, tokens, served=served)
                self._ledger.prefixes.end(request_id, cached_tokens)
            case NotStarted(request_id, asked_seconds):
                refused = take_back(self._ledger, request_id, asked_seconds, now, draining=self._draining)
            case Tokenized(request_id, prompt_tokens):
                self._on_tokenized(request_id, prompt_tokens, now)
            case SliceEnded(piece, cached, found_tokens):
                if found_tokens is not None and (engine := self._ledger.engines.get(piece.engine_id)) is not None:
                    engine.hit_rate.note(piece.held_tokens, found_tokens, now)
                entry = on_slice_end(self._ledger, piece, cached=cached, now=now)
                refused = self._refuse_if_draining(entry, now) if entry is not None else []
            case EngineUp():
                refused = join(self._ledger, event, self.config, now)
            case EngineDown(engine_id):
                refused = mark_down(self._ledger, engine_id, self.config, now)
            case EngineRemoved(engine_id, drain_seconds):
                refused = remove(self._ledger, engine_id, drain_seconds, now)
            case EngineReported(engine_id, figures):
                report(self._ledger, engine_id, figures, now)
            case Passed(engine_id, begins):
                if (passer := self._ledger.engines.get(engine_id)) is not None:
                    passer.passing = max(0, passer.passing + (1 if begins else -1))
            case HandedOver():
                refused = self._hand_over(event, now)
            case DrainStarted():
                self._draining = True
                for entry in list(self._ledger.sliced.values()):
                    unslice(self._ledger, entry, now)
                for _, queue in self._ledger.backlog.queues():
                    refused += reject_all(self._ledger, queue, RejectReason.DRAINING, now)
            case Reconfigured(config):
                before = self.config
                self.config = replace(config, ordering=before.ordering, tiles=before.tiles, rad=before.rad)
                self._ledger.reconfigure(self.config, now)
            case _:
                assert_never(event)
        let_go(self._ledger)
        actions = refused + self._release(now)
        if expired := self._expire(now):
            actions += expired + self._release(now)  # others may fit where these did not
        newcomers = (event,) if isinstance(event, Arrived) else event.waiting if isinstance(event, HandedOver) else ()
        for newcomer in newcomers:
            if too_many := hold_bounds(self._ledger, newcomer.request.id, now):
                actions += too_many + self._release(now)
        return actions

    def on_tokens(self, request_id: str, chunks: int, now: float) -> list[Action] | None:
        """``handle(TokensProduced(request_id, chunks), now)`` without the event: it comes once per token.

        ``None``: nothing has changed, ``next_deadline`` neither.
        """
        entry = self._ledger.entries.get(request_id)
        if entry is None or entry.engine is None or entry.sliced or not entry.engine.on_tokens(request_id, chunks, now):
            return None  # no step has ended: nothing can have become releasable
        return self._release(now)

    def tick(self, now: float) -> list[Action]:
        """Do what has become due by ``now``."""
        for engine in self._ledger.engines.values():
            if engine.closed_until is not None and now >= engine.closed_until:
                engine.closed_until = None
                self._ledger.overload.resume(now)
            if engine.slice_at is not None and now >= engine.slice_at:
                engine.slice_at = None
            engine.assume_steps(now)
        watch(self._ledger, now)
        late = self._expire(now)
        for _, queue in self._ledger.backlog.queues():
            while queue and now >= queue.oldest.arrived_at + self.config.queue_timeout_seconds:
                late.append(self._ledger.reject(queue.oldest, RejectReason.QUEUE_TIMEOUT, now))
        late += end_waits(self._ledger, self.config, now)
        return late + cut_late(self._ledger, now) + self._release(now)

    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do even if nothing happens before; ``None`` if never.

        Rounded up to a whole microsecond: a clock that ticks in these then never calls too early, again and again.
        """
        deadline = min(cuts_due(self._ledger), default=inf)
        if self._ledger.backlog or self._ledger.sliced:
            deadline = min(deadline, self._due_to_waiting())
        if deadline == inf:
            return None
        microseconds = ceil(deadline * 1e6)
        if microseconds / 1e6 < deadline:  # the product was rounded down to a whole number
            microseconds += 1
        return microseconds / 1e6

    def _due_to_waiting(self) -> float:
        """When something becomes due to those who wait."""
        ledger, due = self._ledger, inf
        for _, queue in ledger.backlog.queues():
            arrived_at = queue.oldest.arrived_at
            due = min(due, arrived_at + self.config.queue_timeout_seconds)
            if ledger.modes is not None and (held_until := ledger.modes.due_at(arrived_at)) is not None:
                due = min(due, held_until)
        for entry in ledger.sliced.values():
            due = min(due, waits_until(entry, ledger, self.config))
        for engine in ledger.engines.values():
            for at in (engine.closed_until, engine.silent_until(), engine.health.until, engine.slice_at):
                if at is not None and at < due:
                    due = at
        limit_ends_at = ledger.overload.next_due()
        return due if limit_ends_at is None else min(due, limit_ends_at)

    # -- what happened --

    def _enqueue(self, request: Request, arrived_at: float, now: float, *, alone: bool = True) -> list[Action]:
        """Let a request come in.

        ``alone``: as clients send it; others may come with one that changes hands, with which it has to be compared,
        and that says nothing of how many will come next.
        """
        if request.id in self._ledger.entries:
            raise ValueError(f"request id {request.id!r} is in use")
        for engine in self._ledger.engines.values():
            engine.assume_steps(now)
        ledger, config = self._ledger, self.config
        waited_before = ledger.overload.waited_before_seconds(request, arrived_at)
        if waited_before:
            request = replace(request, waited_before_seconds=waited_before)
        key = self._key(request, arrived_at)
        if self._draining:
            return [ledger.overload.refuse(request, RejectReason.DRAINING, arrived_at, now)]
        if alone:
            number = self._arrivals + 1
            released = bypass(ledger, config, request, key=key, arrived_at=arrived_at, number=number, now=now)
            if released is not None:
                self._arrivals = number
                return [released]
        refusal = why_refuse(ledger, config, request, key=key, arrived_at=arrived_at, now=now)
        if refusal is not None:
            return [refusal]
        refused = make_room(ledger, config, request, now)
        self._arrivals += 1
        waiting = Waiting(request, arrived_at, key, self._arrivals)
        ledger.entries[request.id] = Entry(waiting, sliceable=request.sliceable)
        ledger.wait(waiting, now)
        if alone:
            ledger.overload.arrive(waiting, ledger.backlog.servers_of(waiting), now)
        return refused

    def _key(self, request: Request, arrived_at: float) -> float:
        # By what is cached now. That may change while it waits, but a key that moves would have to be sorted anew.
        aged_from = arrived_at - request.waited_before_seconds
        return self.config.ordering(self._ledger.uncached_tokens(request), aged_from)

    def _on_tokenized(self, request_id: str, prompt_tokens: int, now: float) -> None:
        entry = self._ledger.entries.get(request_id)
        if entry is None or entry.engine is not None:
            return
        self._ledger.drop(entry.waiting)
        request = replace(entry.waiting.request, prompt_tokens=prompt_tokens)
        key = self._key(request, entry.waiting.arrived_at)
        entry.waiting = replace(entry.waiting, request=request, key=key)
        entry.sliceable = True
        self._ledger.wait(entry.waiting, now)

    def _hand_over(self, event: HandedOver, now: float) -> list[Action]:
        ledger = self._ledger
        refused: list[Action] = []
        for request_id in event.gone:
            give_up(ledger, request_id, now)
        for of in event.in_flight:
            if of.engine_id in ledger.engines and of.request.id not in ledger.entries:
                self._arrivals += 1
                waiting = Waiting(of.request, of.arrived_at, self._key(of.request, of.arrived_at), self._arrivals)
                ledger.adopt(waiting, ledger.engines[of.engine_id], of.tokens, now)
        newcomers = [(new.request, now if new.arrived_at is None else new.arrived_at) for new in event.waiting]
        # In their order, as the first may be let in although the queue is full, or may not be waited in.
        for request, arrived_at in sorted(newcomers, key=lambda of: self._key(*of)):
            if request.id not in ledger.entries:
                refused += self._enqueue(request, arrived_at, now, alone=False)
        return refused

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

    def _refuse_if_draining(self, entry: Entry, now: float) -> list[Action]:
        return [self._ledger.reject(entry.waiting, RejectReason.DRAINING, now)] if self._draining else []

    def place_unscheduled(self, model: str) -> str | None:
        """The engine for a request that is not scheduled; ``None`` if none is up that serves ``model``."""
        engine = least_busy(self._ledger.engines.values(), model)
        return None if engine is None else engine.id

    def _expire(self, now: float) -> list[Action]:
        """Refuse those who wait although their limit has ended, or who may not wait at all."""
        refused: list[Action] = []
        while (waiting := self._ledger.overload.overdue(now)) is not None:
            reason = RejectReason.TOO_LATE if waiting.request.may_wait else RejectReason.NO_QUEUE
            refused.append(self._ledger.reject(waiting, reason, now))
        return refused
