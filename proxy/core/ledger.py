"""Who is where: every request from its arrival to its end, and every engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.admission import leaves_free
from proxy.core.growth import GrowthModel
from proxy.core.lane import Pace
from proxy.core.prefix import Prefixes
from proxy.core.queue import Backlog
from proxy.core.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from proxy.core.actions import Reject
    from proxy.core.admission import GateConfig
    from proxy.core.config import SchedulerConfig
    from proxy.core.engine import EngineBelief
    from proxy.core.fairness import Bill
    from proxy.core.lane import Waiting
    from proxy.core.overload import Overload
    from proxy.core.queue import Servers
    from proxy.core.rad import ModeSwitch
    from proxy.core.request import RejectReason, Request


@dataclass(slots=True)
class Entry:
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
    bill: Bill | None = None
    """What it is charged, while an engine has it or slices of it."""
    cut: bool = False
    """Its answer was ended where it was, as the engine's time to leave had come; how it ends is still to be told."""


class Ledger:
    """The state that the scheduler keeps and its rules of release work on."""

    def __init__(
        self,
        max_wait_seconds: float,
        overload: Overload,
        modes: ModeSwitch | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        guaranteed: Mapping[str, int] | None = None,
    ) -> None:
        self.engines: dict[str, EngineBelief] = {}
        self.joined = 0
        """Engines that have ever joined."""
        self.released = 0
        """Requests that were ever released to one."""
        self.entries: dict[str, Entry] = {}
        self.backlog = Backlog(max_wait_seconds, tenant_weights, guaranteed)
        self.overload = overload
        self.sliced: dict[str, Entry] = {}
        """Requests half-way: some of their slices were sent, the rest waits."""
        self.slices = 0
        """All slices ever sent."""
        self.harmful_releases = 0
        """Prompts released although they were to overrun a TBT deadline: no engine could have spared it."""
        self.modes = modes
        """Which engines are full, in throughput mode."""
        self.turns = Turns()
        self.prefixes = Prefixes()
        self.growth = GrowthModel()

    def reconfigure(self, config: SchedulerConfig, now: float) -> None:
        """Work by other limits, weights and guarantees; who waits keeps its place."""
        self.backlog.reconfigure(config.max_wait_seconds, config.tenant_weights, config.tenant_guarantees, now)
        self.overload.reconfigure(config)

    def __repr__(self) -> str:
        return f"<Ledger {len(self.entries)} requests, {len(self.backlog)} waiting, {len(self.engines)} engines>"

    def servers(self, model: str) -> Servers:
        """The engines that serve ``model``, up or not."""
        return frozenset(e.id for e in self.engines.values() if e.serves(model))

    def engines_for(self, arrived_at: float, now: float) -> Collection[EngineBelief]:
        """The engines that a whole prompt may go to, as far as throughput mode has a say."""
        engines = self.engines.values()
        return engines if self.modes is None else self.modes.open(engines, arrived_at, now)

    def any_up(self, servers: Servers) -> bool:
        return any(self.engines[engine_id].up for engine_id in servers)

    def uncached_tokens(self, request: Request) -> int:
        """Prompt tokens that the engine with most of them cached would have to work on; at least 1."""
        return self.prefixes.uncached_tokens(request, self.engines.values())

    def wait(self, waiting: Waiting, now: float) -> None:
        """Put a request into the queue of those engines that serve it; what it was charged is given back."""
        entry = self.entries[waiting.request.id]
        if entry.bill is not None:
            entry.bill.cancel()
            entry.bill = None
        servers = self.servers(waiting.request.model)
        self.backlog.push(waiting, servers)
        self.overload.wait(waiting, servers, now)

    def drop(self, waiting: Waiting) -> None:
        """Take a request out of the queue that no engine has taken."""
        self.overload.leave(waiting, self.backlog.servers_of(waiting))
        self.backlog.remove(waiting)

    def reject(self, waiting: Waiting, reason: RejectReason, now: float) -> Reject:
        """Refuse a request that waits."""
        refusal = self.overload.refuse(waiting.request, reason, waiting.arrived_at, now)
        self.drop(waiting)
        del self.entries[waiting.request.id]
        return refusal

    def pace(self) -> Pace:
        """How long a prompt would take now, at the engine that is fastest; only looked at where a TTFT is promised."""
        if not self.backlog.with_deadline and not self.sliced:
            return Pace()
        up = (e for e in self.engines.values() if e.up)
        fastest = min(up, key=lambda e: e.step_seconds / e.prefill_budget, default=None)
        return Pace() if fastest is None else Pace(fastest.step_seconds, fastest.step_seconds / fastest.prefill_budget)

    def ahead(self, entry: Entry, now: float) -> tuple[float, float]:
        """How far a request's class and tenant are ahead of those who go next; see ``Bill.ahead``."""
        if entry.bill is not None:
            return entry.bill.ahead(now)
        return self.backlog.ahead(entry.waiting.request, self.backlog.servers_of(entry.waiting), now)

    def kept_from(self, request: Request, servers: Servers, gate: GateConfig, now: float) -> set[str]:
        """The engines whose KV cache is too full for a request, as some of it is kept for other tenants."""
        kept = self.backlog.kept_from(request, servers, now)
        if not kept:
            return set()
        each = kept / len(servers)
        return {i for i in servers if not leaves_free(self.engines[i], request.prompt_tokens, each, gate)}

    def charge(self, entry: Entry, upto_tokens: int, now: float) -> None:
        """Charge a request's flow for its prompt up to ``upto_tokens``, and take it out of the queue if it is there."""
        if entry.bill is None:
            self.overload.release(entry.waiting, self.backlog.servers_of(entry.waiting), now)
            queue = self.backlog.queue_of(entry.waiting)
            lane = queue.lane_of(entry.waiting.request)
            urgent = lane.is_urgent(entry.waiting)
            entry.bill = self.backlog.take(entry.waiting, now)
            self.turns.count(entry.waiting, queue, lane, now, urgent=urgent)
        entry.bill.charge(upto_tokens, now, last=upto_tokens >= entry.waiting.request.prompt_tokens)

    def dispatch(self, waiting: Waiting, engine: EngineBelief, now: float) -> None:
        """Note that a request's prompt, or what is left of it, is released to ``engine``."""
        request = waiting.request
        entry = self.entries[request.id]
        self.charge(entry, request.prompt_tokens, now)
        if entry.sliced:
            entry.sliced = False
            del self.sliced[request.id]
        self._give(entry, engine, now)

    def _give(self, entry: Entry, engine: EngineBelief, now: float) -> None:
        request, entry.engine = entry.waiting.request, engine
        self.released += 1
        engine.release(
            request.id,
            request.prompt_tokens,
            now,
            request.request_class.tbt_seconds,
            streamed=request.streamed,
            cached_tokens=self.prefixes.release(request, engine),
            outputs=self.growth.of(request.model, request.request_class.name),
            max_tokens=request.max_tokens,
            sequences=request.sequences,
        )

    def bypass(self, waiting: Waiting, servers: Servers, engine: EngineBelief, now: float) -> None:
        """As ``wait`` and ``dispatch`` at once, for a newcomer that meets nobody who waits."""
        request = waiting.request
        entry = self.entries[request.id] = Entry(waiting, sliceable=request.sliceable)
        self.overload.bypass(waiting, servers, now)
        entry.bill = self.backlog.bypass(request, servers, now)
        self.turns.count_alone()
        entry.bill.charge(request.prompt_tokens, now, last=True)
        self._give(entry, engine, now)

    def adopt(self, waiting: Waiting, engine: EngineBelief, tokens: int, now: float) -> None:
        """Note that ``engine`` has a request already, that another replica has released, and ``tokens`` of its answer.

        It is charged like one of ours; of how fast the queue empties it tells nothing.
        """
        request = waiting.request
        if engine.leaving and engine.leaves_at is None:
            engine.leaves_at = now  # all that it had was cut, and so is this
        entry = self.entries[request.id] = Entry(waiting, engine)
        self.backlog.push(waiting, self.servers(request.model))
        entry.bill = self.backlog.take(waiting, now)
        entry.bill.charge(request.prompt_tokens, now, last=True)
        engine.adopt(
            request.id,
            request.prompt_tokens,
            now,
            request.request_class.tbt_seconds,
            tokens=tokens,
            streamed=request.streamed,
            cached_tokens=self.prefixes.release(request, engine),
            outputs=self.growth.of(request.model, request.request_class.name),
            max_tokens=request.max_tokens,
            sequences=request.sequences,
        )
