"""Why a request waits: what is in its way at each engine, and who goes before it; in words, and as a kind to count.

Forecasts that the scheduler asks for are kept until the next, so asking for one too many would change what it decides:
all that is asked here is asked of copies of the engines. It takes time, and is for people.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from proxy.core.admission import fits_kv
from proxy.core.health import Condition
from proxy.core.lane import Band, urgency
from proxy.core.placement import may_harm
from proxy.core.tbt import harm_seconds
from proxy.core.tiles import next_piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from proxy.core.config import SchedulerConfig
    from proxy.core.engine import EngineBelief
    from proxy.core.lane import Waiting
    from proxy.core.ledger import Entry
    from proxy.core.request import Request
    from proxy.core.scheduler import Scheduler


class Obstacle(StrEnum):
    """What keeps a request from an engine. Metric label."""

    DOWN = "down"
    BACKING_OFF = "backing_off"
    """It turned a request away, and gets nothing more for a while."""
    UNWELL = "unwell"
    """It is ejected, stalled, or tried with one request first."""
    SLOTS = "slots"
    BACKLOG = "backlog"
    """It has as much prompt work as it can do until it hears from us: more would wait in there, out of order."""
    KV_CACHE = "kv_cache"
    TENANTS = "tenants"
    """What room there is stays free for other tenants."""
    THROUGHPUT = "throughput"
    """It has enough sequences to keep it busy (policy rad)."""
    TBT = "tbt"
    """The prompt would overrun the TBT deadlines of streams in flight (policy slai)."""
    TILE = "tile"
    """Its next step has no room left that those deadlines allow (tiles)."""
    ORDER = "order"
    """Nothing but others that go before it."""


Reason = tuple[Obstacle, str]


class Reasons:
    """Looks at a scheduler as it is at one time, without a trace."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._config = scheduler.config
        self._ledger = scheduler.ledger
        self._now = now
        self._pace = scheduler.ledger.pace()
        self._copies: dict[str, EngineBelief] = {}

    def engines_of(self, entry: Entry) -> list[EngineBelief]:
        """Copies of the engines for which a request waits."""
        if entry.engine is not None:
            return [self._copy(entry.engine)]
        servers = self._ledger.backlog.servers_of(entry.waiting)
        return [self._copy(engine) for engine in self._ledger.engines.values() if engine.id in servers]

    def order_in(self, lane: Sequence[Waiting]) -> Callable[[Waiting], tuple[float, float, int]]:
        """Return by what the requests of a lane are ordered: the first of them is what ``Lane.head`` gives."""
        crowded = any(self._urgency(w)[0] is Band.HOPELESS for w in lane)

        def key(waiting: Waiting) -> tuple[float, float, int]:
            band, key = self._urgency(waiting)
            if band is Band.URGENT and crowded:  # then nothing is, see there
                band, key = Band.ORDINARY, waiting.key
            return band, key, waiting.number

        return key

    def rank(self, waiting: Waiting, lane: Sequence[Waiting]) -> tuple[Band, int]:
        """Return a request's band, and how many go before it in its lane."""
        key = self.order_in(lane)
        own = key(waiting)
        return self._urgency(waiting)[0], sum(key(other) < own for other in lane)

    def flows_ahead(self, entry: Entry) -> int:
        """How many other tenants or classes of another weight have their turn before a waiting request's own."""
        if entry.engine is not None:
            return 0
        servers = self._ledger.backlog.servers_of(entry.waiting)
        shares = next(shares for found, shares in self._ledger.backlog.shares() if found == servers)
        request = entry.waiting.request
        turns = [(account.class_weight, account.tenant) for account in shares.accounts(self._now) if account.waits]
        return turns.index((request.request_class.weight, request.tenant))

    def against(self, entry: Entry, engine: EngineBelief, others: list[EngineBelief]) -> list[str]:
        """Say why ``engine``, a copy, does not get a waiting request or a piece of it, whoever's turn it is.

        ``others``: all engines that may get it.
        """
        return [words for _, words in self._against(entry, engine, others)]

    def obstacle(self, engine: EngineBelief) -> Obstacle | None:
        """Return what is first in the way of who is next for an engine; ``None`` if nobody waits for it."""
        entry = self._next_for(engine)
        if entry is None:
            return None
        asked, request = self._copy(engine), entry.waiting.request
        for obstacle, _ in self._against(entry, asked, [asked]):
            return obstacle
        # Whether waiting helps is a question to all engines. As it does wait, it must have been thought to.
        uncached = request.prompt_tokens - self._ledger.prefixes.cached_tokens(request, engine)
        spares = self._config.gate.keep_tbt and harm_seconds(asked, uncached, self._now)
        return Obstacle.TBT if spares else Obstacle.ORDER

    def _next_for(self, engine: EngineBelief) -> Entry | None:
        for servers, queue in self._ledger.backlog.queues():
            if engine.id in servers:
                head = queue.first_lane(self._now).likely_head(self._now)
                return self._ledger.entries[head.request.id]
        return next((entry for entry in self._ledger.sliced.values() if entry.engine is engine), None)

    def _against(self, entry: Entry, engine: EngineBelief, others: list[EngineBelief]) -> Iterator[Reason]:
        waiting, config, now = entry.waiting, self._config, self._now
        request, tiles = waiting.request, config.tiles
        is_shut = False
        for reason in _gates(engine, request, config, now):
            is_shut = True
            yield reason
        if not engine.is_open(now):
            return
        if not entry.sliced:
            for reason in self._kept(waiting, engine):
                is_shut = True
                yield reason
        if not engine.outstanding:
            return
        if tiles is None:
            yield from self._full(waiting, engine)
            yield from self._harm(waiting, engine, others)
            return
        if is_shut:
            return
        upto = next_piece(engine, request, now, tiles, config.gate, sliceable=entry.sliceable)
        if not upto:
            yield Obstacle.TILE, "tile: the next step has no room left for a piece of it"
        elif entry.sliced and entry.sliced_in == engine.step:
            yield Obstacle.TILE, "tile: its last slice is in this step"
        elif upto < request.prompt_tokens and not entry.sliced and engine.sliced >= tiles.max_sliced:
            yield Obstacle.TILE, f"tiles: {engine.sliced} prompts are half-way already"
        elif engine.slice_at is not None and now < engine.slice_at:
            left = engine.slice_at - now
            yield Obstacle.TILE, f"tile: a slice of it is held for {left:.3f} s, as somebody shorter may come"

    def _copy(self, engine: EngineBelief) -> EngineBelief:
        if engine.id not in self._copies:
            self._copies[engine.id] = engine.to_ask()
        return self._copies[engine.id]

    def _urgency(self, waiting: Waiting) -> tuple[Band, float]:
        return urgency(
            waiting,
            waiting.request.prompt_tokens,
            waiting.key,
            self._now,
            pace=self._pace,
            max_wait_seconds=self._config.max_wait_seconds,
        )

    def _kept(self, waiting: Waiting, engine: EngineBelief) -> Iterator[Reason]:
        backlog, request = self._ledger.backlog, waiting.request
        servers = backlog.servers_of(waiting)
        if engine.id not in self._ledger.kept_from(request, servers, self._config.gate, self._now):
            return
        each, headroom = (
            backlog.kept_from(request, servers, self._now) / len(servers),
            self._config.gate.tenant_headroom,
        )
        room = f"{each:.0f} tokens of the KV cache, and {headroom:.0%} of it and of the slots at least"
        yield Obstacle.TENANTS, f"kept: about {room}, have to stay free for other tenants"

    def _full(self, waiting: Waiting, engine: EngineBelief) -> Iterator[Reason]:
        modes = self._ledger.modes
        if modes is None or self._now >= waiting.arrived_at + modes.config.max_hold_seconds:
            return
        limit = modes.limit(engine)
        if engine.outstanding >= limit:
            words = f"throughput mode: {engine.outstanding} requests, it has room again below {limit}"
            yield Obstacle.THROUGHPUT, words

    def _harm(self, waiting: Waiting, engine: EngineBelief, others: list[EngineBelief]) -> Iterator[Reason]:
        request, waited = waiting.request, self._now - waiting.arrived_at
        prefixes = self._ledger.prefixes
        uncached = {e.id: request.prompt_tokens - prefixes.cached_tokens(request, e) for e in (engine, *others)}
        if not self._config.gate.keep_tbt or may_harm(engine, others, uncached, waited, self._now):
            return
        harm = harm_seconds(engine, uncached[engine.id], self._now)
        words = (
            f"TBT: it would overrun the deadlines in flight by {harm:.3f} s in all, in a later step by less: "
            f"that it waits for, {harm - waited:.3f} s more at most"
        )
        yield Obstacle.TBT, words


_UNFIT = {
    Condition.EJECTED: "health: the engine failed too often, and gets nothing for a while",
    Condition.PROBATION: "health: the engine failed before, and is tried with one request first",
    Condition.STALLED: "health: the engine does not work on what it has",
}


def shut_gates(engine: EngineBelief, request: Request, config: SchedulerConfig, now: float) -> list[str]:
    """Say why ``engine``, a copy, has no place for a prompt or what is left of it; empty if it has."""
    return [words for _, words in _gates(engine, request, config, now)]


def _gates(engine: EngineBelief, request: Request, config: SchedulerConfig, now: float) -> Iterator[Reason]:
    if not engine.up:
        yield Obstacle.DOWN, "the engine is down"
    elif engine.closed_until is not None and now < engine.closed_until:
        left = engine.closed_until - now
        yield Obstacle.BACKING_OFF, f"the engine turned a request away: nothing more for {left:.2f} s"
    elif not engine.health.takes(now):
        yield Obstacle.UNWELL, _UNFIT[engine.health.condition]
    elif engine.outstanding:
        yield from _full_gates(engine, request, config)


def _full_gates(engine: EngineBelief, request: Request, config: SchedulerConfig) -> Iterator[Reason]:
    gate, limits = config.gate, engine.limits
    if engine.is_full:
        foreign = f" and {engine.reports.foreign} of other clients" if engine.reports.foreign else ""
        yield Obstacle.SLOTS, f"slots: {engine.outstanding} requests{foreign} of at most {limits.max_num_seqs}"
    backlog_limit = gate.backlog_factor * engine.lead_tokens()
    remaining = request.prompt_tokens - engine.held_tokens(request.id)
    gated = config.tiles is None or engine.plugin is not None
    if gated and engine.backlog >= backlog_limit and not engine.would_begin(remaining):
        words = f"backlog: {engine.backlog} prompt tokens before it, the gate opens below {backlog_limit:.0f}"
        yield Obstacle.BACKLOG, words
    if not fits_kv(engine, remaining, gate):
        reserve = "what all are expected to grow to" if engine.outputs.learnt else "the reserves for growth"
        words = (
            f"KV cache: it needs {remaining} tokens, {engine.kv_tokens} of {limits.kv_tokens} are in use or promised, "
            f"{engine.reports.kv_error:.0f} more by the engine's own account; beside {reserve} that is too much"
        )
        yield Obstacle.KV_CACHE, words
