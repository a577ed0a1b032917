"""Discrete-event simulation: simulated engines in virtual time, with the proxy's own scheduler in front or without it.

The scheduler that runs here is the one that runs in the live proxy, and it sees what the live proxy sees: tokens one
network delay after the step that made them. Times are whole microseconds, so that the live shell on a virtual clock
takes the very same decisions.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import sha256
from math import inf
from typing import TYPE_CHECKING

from proxy.core.actions import Action, Cut, Dispatch, Reject, Slice
from proxy.core.admission import admits
from proxy.core.events import Arrived, Ended, EngineReported, EngineUp, Event, SliceEnded
from proxy.core.limits import EngineLimits
from proxy.core.prefix import NO_BLOCKS, PromptBlocks
from proxy.core.request import Request
from proxy.core.scheduler import Scheduler
from proxy.core.selfreport import EngineReport
from proxy.sim.engine import EngineConfig, Produced, SimulatedEngine
from proxy.sim.fleet import Clock, Prompt, TimedEngine, direct, microseconds
from proxy.sim.quotas import Quotas
from proxy.sim.records import RequestRecord, note_tokens
from proxy.sim.replicas import Decider, Replicas
from proxy.sim.schedulers import plugin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.core.config import SchedulerConfig
    from proxy.core.engine import EngineBelief
    from proxy.sim.workload import ScheduledRequest

    OnStepEnd = Callable[[SimulatedEngine, EngineBelief], None]


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """What stands behind the proxy, and how far away."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    engines: int = 1
    network_seconds: float = 0.001
    """One-way delay between an engine and whoever talks to it: the proxy, or the clients where there is none."""
    seed: int = 0
    """Of the engines' jitter, if they have any."""
    hold_above: int | None = None
    """Where no scheduler decides: hold requests, first come first served, while every engine queues more than this."""
    prefill_engines: int = 0
    """Where no scheduler decides: so many engines only prefill, and the rest go on from there (disaggregation)."""
    kv_transfer_seconds_per_token: float = 5.2e-6
    """What it takes to move a token's keys and values to another engine: Mistral-7B's 131 kB at 25 GB/s."""
    retries: int = 0
    """How often a client that is refused comes back, each time when the refusal told it to."""
    quotas: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Tokens a minute, prompt and output, by tenant: what is beyond is refused before a scheduler hears of it."""
    report_seconds: float = 2.0
    """How often the proxy asks the engines for their own figures."""
    replicas: int = 1
    """Proxies in front of the same engines, to which requests come in turn."""
    apart: bool = False
    """Whether they know nothing of each other; else they are a fleet."""
    message_seconds: float = 0.001
    """From one replica to another."""


@dataclass(slots=True)
class SimulationResult:
    """What came of a run."""

    records: list[RequestRecord]
    preemptions: int
    steps: int
    starved_steps: int
    """Steps that the gate left without prompt tokens although nothing but its backlog rule kept a prompt away.

    Counted when a step begins: it has no prompt token, and the request that the proxy would release next waits there
    although its rules on the engine's sequence slots and KV cache would let it in. Zero without a proxy.
    """
    step_seconds: float
    """Mean duration of an engine step."""
    letters: int = 0
    """That the proxy's replicas have sent each other."""
    engine_queue_seconds: list[float] = field(default_factory=list)
    """For each prompt, the time from its receipt by an engine to the start of the first step that worked on it."""


def limits_of(config: EngineConfig) -> EngineLimits:
    """The limits that a proxy would be configured with for such an engine."""
    return EngineLimits(
        config.token_budget,
        config.max_num_seqs,
        config.blocks * config.block_size,
        block_tokens=config.block_size,
        caches_prefixes=True,
    )


def report_of(engine: SimulatedEngine) -> EngineReport:
    """What such an engine says of itself."""
    usage = engine.kv_tokens_used / (engine.config.blocks * engine.config.block_size)
    return EngineReport(engine.running, engine.waiting, usage, engine.preemptions)


class _Run:
    """One simulation; with a scheduler the requests go through it, without one straight to the engines in turn."""

    def __init__(
        self,
        workload: Sequence[ScheduledRequest],
        config: SimulationConfig,
        scheduler: Decider | None,
        on_action: Callable[[Action, float], None] | None,
        on_step_end: OnStepEnd | None = None,
    ) -> None:
        self.clock = Clock()
        self.records = {str(r.index): RequestRecord(r) for r in workload}
        self.engines = {
            f"engine-{i}": TimedEngine(
                self.clock,
                SimulatedEngine(config.engine, f"{config.seed}:{i}"),
                config.network_seconds,
                self._deliver,
                self._refuse,
                on_step=partial(self._note_step, i),
                on_step_end=None if on_step_end is None else partial(self._note_step_end, i, on_step_end),
            )
            for i in range(config.engines)
        }
        self.starved_steps = 0
        self._unfinished = len(workload)
        self._scheduler = scheduler
        plugin = plugin_of(config.engine.scheduler)
        self._tells_deadlines = plugin is not None and plugin.takes_deadlines  # as the proxy does, to those alone
        self._on_action = on_action
        self._retries = config.retries
        self._quotas = Quotas(config.quotas)
        self._hold_above = config.hold_above if scheduler is None else None
        self._held: deque[ScheduledRequest] = deque()
        self._prefill_engines = config.prefill_engines if scheduler is None else 0
        self._transfer_seconds = config.kv_transfer_seconds_per_token
        self._prefilling: dict[str, ScheduledRequest] = {}  # on engines that only prefill, and longer than a token
        self._deadline_us: int | None = None
        self._slices: dict[str, Slice] = {}
        self._waiting: dict[str, RequestRecord] = {}  # in the proxy, in order of arrival
        for request in workload:
            self.clock.at(microseconds(request.at_seconds), self._arrive, request)
        if scheduler is not None:
            limits = limits_of(config.engine)
            for engine_id in self.engines:
                self._perform(scheduler.handle(EngineUp(engine_id, limits, plugin=plugin), 0.0))
            if isinstance(scheduler, Replicas):
                scheduler.start(self.clock, self._perform, lambda: not self._unfinished)
            self._report_us = microseconds(config.report_seconds)
            self.clock.at(self._report_us, self._report)

    def _report(self) -> None:
        """Let all engines tell their figures, for as long as anything else is to happen."""
        for engine_id, engine in self.engines.items():
            self.clock.at(
                self.clock.now_us + engine.network_us, self._feed, EngineReported(engine_id, report_of(engine.model))
            )
        if self._unfinished:
            self.clock.at(self.clock.now_us + self._report_us, self._report)

    def _arrive(self, request: ScheduledRequest) -> None:
        request_id = str(request.index)
        self.records[request_id].sent_at = self.clock.now
        if self._hold_above is not None:
            self._held.append(request)
            self._let_go()
        elif self._prefill_engines:
            if request.output_tokens > 1:
                self._prefilling[request_id] = request
            engines = list(self.engines.values())[: self._prefill_engines]
            min(engines, key=lambda e: e.queued).send(direct(request)._replace(output_tokens=1))
        elif self._scheduler is None:
            list(self.engines.values())[request.index % len(self.engines)].send(direct(request))
        elif (refusal := self._quotas.begin(request, self.clock.now)) is not None:
            self._turn_away(self.records[request_id], refusal.reason, refusal.retry_after_seconds)
        else:
            self._waiting[request_id] = self.records[request_id]
            self._feed(Arrived(as_core_request(request)))

    def _let_go(self) -> None:
        """Send held requests on; see ``SimulationConfig.hold_above``."""
        while self._held:
            engine = min(self.engines.values(), key=lambda e: e.queued)
            if engine.queued > (self._hold_above or 0):
                return
            request = self._held.popleft()
            engine.send(direct(request))

    def _hand_over(self, request: ScheduledRequest) -> None:
        """Move a request whose prompt is done to an engine that decodes: there, its first token ends its prompt."""
        engine = min(list(self.engines.values())[self._prefill_engines :], key=lambda e: e.queued + e.model.running)
        done, left = request.prompt_tokens, request.output_tokens - 1
        prompt = direct(request)._replace(prompt_tokens=done + 1, output_tokens=left, ready=done)
        delay = microseconds(done * self._transfer_seconds)
        self.clock.at(self.clock.now_us + delay, engine.send, prompt)

    def _deliver(self, produced: list[Produced]) -> None:
        if self._scheduler is None and not self._prefilling:
            self._unfinished -= note_tokens(self.records, produced, self.clock.now)
            return
        now, records = self.clock.now, self.records
        scheduler = self._scheduler
        for request_id, finished in produced:
            if (piece := self._slices.pop(request_id, None)) is not None:
                self._feed(SliceEnded(piece))
                continue
            records[request_id].on_tokens(now)
            if scheduler is not None and (actions := scheduler.on_tokens(request_id, 1, now)) is not None:
                self._perform(actions)
            if finished and (handed_over := self._prefilling.pop(request_id, None)) is not None:
                self._hand_over(handed_over)
            elif finished:
                records[request_id].finished_at = now
                self._unfinished -= 1
                self._quotas.end(records[request_id].request, records[request_id].tokens, now)
                if scheduler is not None:
                    self._feed(Ended(request_id))

    def _refuse(self, sequence_id: str) -> None:
        if (piece := self._slices.pop(sequence_id, None)) is not None:
            self._feed(SliceEnded(piece, cached=False))
            return
        record = self.records[sequence_id]
        record.error, record.finished_at = "too long", self.clock.now
        self._unfinished -= 1
        self._quotas.end(record.request, 0, self.clock.now)
        if self._scheduler is not None:
            self._feed(Ended(sequence_id))

    def _note_step(self, engine: int) -> None:
        """An engine has begun a step: let more go to it, or judge the step; see ``starved_steps``."""
        if self._scheduler is None:
            self._let_go()
            return
        if self.engines[f"engine-{engine}"].model.step_load.prefill_tokens or not self._waiting:
            return
        if not (beliefs := self._scheduler.engines):
            return  # nobody knows
        without_backlog_rule = replace(self._scheduler.config.gate, backlog_factor=inf)
        belief, now = beliefs[engine], self.clock.now
        self.starved_steps += admits(belief, self._next_waiting(now).prompt_tokens, without_backlog_rule, now)

    def _note_step_end(self, engine: int, tell: OnStepEnd) -> None:
        assert self._scheduler is not None
        tell(self.engines[f"engine-{engine}"].model, self._scheduler.engines[engine])

    def _next_waiting(self, now: float) -> ScheduledRequest:
        """The request that the scheduler would release next."""
        assert self._scheduler is not None
        config, waiting = self._scheduler.config, self._waiting.values()
        oldest = next(iter(waiting))
        if now - (oldest.sent_at or 0.0) >= config.max_wait_seconds:
            return oldest.request
        return min(waiting, key=lambda r: config.ordering(r.request.prompt_tokens, r.sent_at or 0.0)).request

    def _feed(self, event: Event) -> None:
        assert self._scheduler is not None
        self._perform(self._scheduler.handle(event, self.clock.now))

    def _perform(self, actions: list[Action]) -> None:
        assert self._scheduler is not None
        for action in actions:
            if self._on_action is not None:
                self._on_action(action, self.clock.now)
            match action:
                case Dispatch(request_id, engine_id):
                    record = self._waiting.pop(request_id)
                    request = record.request
                    record.on_queued(self.clock.now - (record.sent_at or 0.0))
                    content = request.prefix or request_id
                    sizes = request.prompt_tokens, request.output_tokens
                    tbt_seconds = request.request_class.tbt_seconds if self._tells_deadlines else None
                    self.engines[engine_id].send(
                        Prompt(request_id, *sizes, content, tbt_seconds, common=request.prefix_tokens)
                    )
                case Slice(request_id, engine_id, tokens, _, _):
                    self._slices[action.slice_id] = action
                    self.engines[engine_id].send(Prompt(action.slice_id, tokens, 1, request_id))
                case Cut():
                    raise AssertionError("no simulated engine is ever removed")
                case Reject(request_id, reason, retry_after_seconds):
                    del self._waiting[request_id]
                    self._quotas.end(self.records[request_id].request, 0, self.clock.now)
                    self._turn_away(self.records[request_id], reason, retry_after_seconds)
        self._arm()

    def _turn_away(self, record: RequestRecord, reason: str, retry_after_seconds: float | None) -> None:
        record.refusals += 1
        if retry_after_seconds is None or record.retries == self._retries:
            record.error, record.finished_at = str(reason), self.clock.now
            self._unfinished -= 1
            return
        record.retries += 1
        self.clock.at(self.clock.now_us + microseconds(retry_after_seconds), self._arrive, record.request)

    def _arm(self) -> None:
        assert self._scheduler is not None
        deadline = self._scheduler.next_deadline()
        if deadline is None:
            self._deadline_us = None
            return
        when_us = max(self.clock.now_us, microseconds(deadline))
        if self._deadline_us is None or when_us < self._deadline_us:
            self._deadline_us = when_us
            self.clock.at(when_us, self._tick, when_us)

    def _tick(self, when_us: int) -> None:
        assert self._scheduler is not None
        if when_us != self._deadline_us:
            return  # called off, as the driver cancels its timer
        self._deadline_us = None
        self._perform(self._scheduler.tick(self.clock.now))


def as_core_request(request: ScheduledRequest) -> Request:
    """The request as the scheduler is told of it: how long its answer gets, nobody knows beforehand."""
    return Request(
        str(request.index),
        request.prompt_tokens,
        request_class=request.request_class,
        sliceable=not request.prefix,  # the simulated cache knows one content of a prompt: its own or its prefix
        blocks=blocks_of(request),
        tenant=request.tenant,
        fingerprint=request.index.to_bytes(8),
    )


_BLOCK_TOKENS = 128


@lru_cache(maxsize=4096)
def _prefix_blocks(prefix: str, tokens: int) -> PromptBlocks:
    count = tokens // _BLOCK_TOKENS
    hashes = (int.from_bytes(sha256(f"{prefix} {i}".encode()).digest()[:8]) for i in range(count))
    return PromptBlocks(tuple(hashes), tuple(_BLOCK_TOKENS * (i + 1) for i in range(count)))


def blocks_of(request: ScheduledRequest) -> PromptBlocks:
    """The hashes of what a prompt has in common with others, as the proxy would have them from its bytes."""
    return _prefix_blocks(request.prefix, request.prefix_tokens) if request.prefix else NO_BLOCKS


def simulate(
    workload: Sequence[ScheduledRequest],
    config: SimulationConfig,
    scheduler_config: SchedulerConfig | None,
    on_action: Callable[[Action, float], None] | None = None,
    on_step_end: OnStepEnd | None = None,
    *,
    make_scheduler: Callable[[SchedulerConfig], Decider] | None = None,
) -> SimulationResult:
    """Run ``workload`` to its end in virtual time and return what happened.

    ``scheduler_config`` is the proxy's; with ``None`` there is no proxy and requests go to the engines round robin.
    ``on_step_end`` (with a proxy only) is called when an engine's step ends, before anybody hears of its tokens.
    ``make_scheduler`` makes another kind of scheduler, as one that is recorded; not where there are several.
    """
    scheduler: Decider | None = None
    if scheduler_config is not None and (config.replicas > 1 or config.apart):
        scheduler = Replicas(config.replicas, scheduler_config, config.message_seconds, apart=config.apart)
    elif scheduler_config is not None:
        scheduler = (make_scheduler or Scheduler)(scheduler_config)
    run = _Run(workload, config, scheduler, on_action, on_step_end)
    run.clock.run()
    engines = run.engines.values()
    for request_id, seconds in (item for e in engines for item in e.queue_seconds.items()):
        if (record := run.records.get(request_id)) is not None:  # slices go by while their prompt waits
            record.on_queued(seconds)
    steps = sum(e.model.steps for e in engines)
    return SimulationResult(
        list(run.records.values()),
        sum(e.model.preemptions for e in engines),
        steps,
        run.starved_steps,
        sum(e.busy_seconds for e in engines) / max(1, steps),
        scheduler.letters if isinstance(scheduler, Replicas) else 0,
        [seconds for e in engines for seconds in e.queue_seconds.values()],
    )
