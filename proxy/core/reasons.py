"""Why a request waits, in words: what is in its way at each engine, and who goes before it.

Forecasts that the scheduler asks for are kept until the next, so asking for one too many would change what it decides:
all that is asked here is asked of copies of the engines. It takes time, and is for people.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from proxy.core.admission import fits_kv
from proxy.core.health import Condition
from proxy.core.lane import Band, urgency
from proxy.core.placement import may_harm
from proxy.core.tbt import harm_seconds
from proxy.core.tiles import next_piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.core.config import SchedulerConfig
    from proxy.core.engine import EngineBelief
    from proxy.core.lane import Waiting
    from proxy.core.ledger import Entry
    from proxy.core.request import Request
    from proxy.core.scheduler import Scheduler


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
        waiting, config, now = entry.waiting, self._config, self._now
        request, tiles = waiting.request, config.tiles
        shut = shut_gates(engine, request, config, now)
        if not engine.is_open(now):
            return shut
        if not entry.sliced:
            shut += self._kept(waiting, engine)
        if not engine.outstanding:
            return shut
        if tiles is None:
            return shut + self._full(waiting, engine) + self._harm(waiting, engine, others)
        if shut:
            return shut
        upto = next_piece(engine, request, now, tiles, config.gate, sliceable=entry.sliceable)
        if not upto:
            return ["tile: the next step has no room left for a piece of it"]
        if entry.sliced and entry.sliced_in == engine.step:
            return ["tile: its last slice is in this step"]
        if upto < request.prompt_tokens and not entry.sliced and engine.sliced >= tiles.max_sliced:
            return [f"tiles: {engine.sliced} prompts are half-way already"]
        return []

    def _copy(self, engine: EngineBelief) -> EngineBelief:
        if engine.id not in self._copies:
            # As deepcopy, in a third of the time: with thousands of requests that is noticed by every stream.
            self._copies[engine.id] = pickle.loads(pickle.dumps(engine, pickle.HIGHEST_PROTOCOL))  # noqa: S301 - ours
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

    def _kept(self, waiting: Waiting, engine: EngineBelief) -> list[str]:
        backlog, request = self._ledger.backlog, waiting.request
        servers = backlog.servers_of(waiting)
        if engine.id not in self._ledger.kept_from(request, servers, self._config.gate, self._now):
            return []
        each, headroom = (
            backlog.kept_from(request, servers, self._now) / len(servers),
            self._config.gate.tenant_headroom,
        )
        room = f"{each:.0f} tokens of the KV cache, and {headroom:.0%} of it and of the slots at least"
        return [f"kept: about {room}, have to stay free for other tenants"]

    def _full(self, waiting: Waiting, engine: EngineBelief) -> list[str]:
        modes = self._ledger.modes
        if modes is None or self._now >= waiting.arrived_at + modes.config.max_hold_seconds:
            return []
        limit = modes.limit(engine)
        if engine.outstanding < limit:
            return []
        return [f"throughput mode: {engine.outstanding} requests, it has room again below {limit}"]

    def _harm(self, waiting: Waiting, engine: EngineBelief, others: list[EngineBelief]) -> list[str]:
        request, waited = waiting.request, self._now - waiting.arrived_at
        prefixes = self._ledger.prefixes
        uncached = {e.id: request.prompt_tokens - prefixes.cached_tokens(request, e) for e in (engine, *others)}
        if not self._config.gate.keep_tbt or may_harm(engine, others, uncached, waited, self._now):
            return []
        harm = harm_seconds(engine, uncached[engine.id], self._now)
        why = (
            f"TBT: it would overrun the deadlines in flight by {harm:.3f} s in all, in a later step by less: "
            f"that it waits for, {harm - waited:.3f} s more at most"
        )
        return [why]


_UNFIT = {
    Condition.EJECTED: "health: the engine failed too often, and gets nothing for a while",
    Condition.PROBATION: "health: the engine failed before, and is tried with one request first",
    Condition.STALLED: "health: the engine does not work on what it has",
}


def shut_gates(engine: EngineBelief, request: Request, config: SchedulerConfig, now: float) -> list[str]:
    """Say why ``engine``, a copy, has no place for a prompt or what is left of it; empty if it has."""
    if not engine.up:
        return ["the engine is down"]
    if engine.closed_until is not None and now < engine.closed_until:
        return [f"the engine turned a request away: nothing more for {engine.closed_until - now:.2f} s"]
    if not engine.health.takes(now):
        return [_UNFIT[engine.health.condition]]
    if not engine.outstanding:
        return []
    gate, limits, shut = config.gate, engine.limits, list[str]()
    if engine.is_full:
        foreign = f" and {engine.reports.foreign} of other clients" if engine.reports.foreign else ""
        shut.append(f"slots: {engine.outstanding} requests{foreign} of at most {limits.max_num_seqs}")
    backlog_limit = gate.backlog_factor * engine.lead_tokens()
    remaining = request.prompt_tokens - engine.held_tokens(request.id)
    gated = config.tiles is None or engine.plugin is not None
    if gated and engine.backlog >= backlog_limit and not engine.would_begin(remaining):
        shut.append(f"backlog: {engine.backlog} prompt tokens before it, the gate opens below {backlog_limit:.0f}")
    if not fits_kv(engine, remaining, gate):
        reserve = "what all are expected to grow to" if engine.outputs.learnt else "the reserves for growth"
        shut.append(
            f"KV cache: it needs {remaining} tokens, {engine.kv_tokens} of {limits.kv_tokens} are in use or promised, "
            f"{engine.reports.kv_error:.0f} more by the engine's own account; beside {reserve} that is too much"
        )
    return shut
