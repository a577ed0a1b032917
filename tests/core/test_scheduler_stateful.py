"""The scheduler under any sequence of events at any times: what must hold after each of them."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from builders import make_blocks, make_limits, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from invariants import check_after_tick, check_scheduler, is_open

from proxy.core.actions import Action, Cut, Dispatch, Reject
from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
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
    InFlight,
    NotStarted,
    Passed,
    TokensProduced,
)
from proxy.core.health import Condition
from proxy.core.limits import EngineLimits
from proxy.core.ordering import first_come_first_served, shortest_prompt_first
from proxy.core.queue import flow_of
from proxy.core.rad import RadConfig
from proxy.core.request import RELAXED, RejectReason, Request, RequestClass
from proxy.core.scheduler import Scheduler
from proxy.core.selfreport import EngineReport

GATE = GateConfig(kv_watermark=0.05, kv_growth_tokens=16)

FCFS = first_come_first_served()

configs = st.builds(
    SchedulerConfig,
    ordering=st.sampled_from([shortest_prompt_first(10.0), shortest_prompt_first(0.5), FCFS]),
    gate=st.just(GATE),
    rad=st.sampled_from([None, None, RadConfig(max_hold_seconds=0.5)]),
    max_wait_seconds=st.sampled_from([0.5, 60.0]),
    queue_timeout_seconds=st.sampled_from([1.0, 300.0]),
    max_queue_requests=st.sampled_from([0, 3, 1000, 1000]),
    max_queue_tokens=st.sampled_from([None, None, 1000]),
    max_queue_bytes=st.sampled_from([100, 1 << 20, 1 << 20]),
    no_engine_retry_seconds=st.just(5.0),
    tenant_guarantees=st.sampled_from([{}, {"a": 60_000}, {"a": 100, "b": 1_000_000}]),
)
limits = st.builds(
    make_limits,
    token_budget=st.sampled_from([1, 64, 512]),
    max_num_seqs=st.sampled_from([1, 2, 8]),
    kv_tokens=st.sampled_from([None, 100, 4000]),
    caches_prefixes=st.booleans(),
)
CLASSES = (RELAXED, RELAXED, RequestClass("soon", ttft_seconds=0.5), RequestClass("heavy", weight=4.0))
intervals = st.one_of(st.integers(0, 100_000), st.integers(0, 10_000_000)).map(lambda us: us / 1e6)
picks = st.integers(0, 1 << 16)
Newcomer = tuple[int, int, int, float | None, float | None, bool]
newcomers = st.tuples(
    st.sampled_from([0, 1, 30, 100, 500, 600, 3000, 50_000]),  # prompt tokens
    st.sampled_from([0, 10, 60, 200]),  # bytes
    picks,  # for the model
    st.sampled_from([None, None, 0.0, 0.2, 2.0]),  # seconds of upload
    st.sampled_from([None, None, 0.3, 5.0]),  # limit of the TTFT
    st.sampled_from([True, True, True, False]),  # whether it may wait
)
reports = st.none() | st.builds(
    EngineReport,
    running=st.sampled_from([0, 1, 3, 500]),
    waiting=st.sampled_from([0, 0, 2]),
    kv_usage=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
    preemptions=st.integers(0, 5),
    tokens=st.sampled_from([None, 0, 10, 20]),
    started_at=st.sampled_from([None, 1.0, 1.0, 2.0]),
)
bursts: st.SearchStrategy[list[Newcomer]] = st.lists(newcomers, min_size=1, max_size=6)


@dataclass
class Live:
    """A request that is not over, as the shell knows it."""

    request: Request
    came_at: float
    engine: str | None = None
    tokens: int = 0
    cut: bool = False


@dataclass
class Shell:
    """What a shell would know: which engines there are and what was told about each request."""

    up: dict[str, bool] = field(default_factory=dict)
    leaving: dict[str, float] = field(default_factory=dict)
    """Engines that have been removed and still have requests, and until when those may go on."""
    models: dict[str, frozenset[str]] = field(default_factory=dict)
    """Empty: any, and so for an engine that was never up."""
    limits: dict[str, EngineLimits] = field(default_factory=dict)
    live: dict[str, Live] = field(default_factory=dict)
    over: dict[str, str] = field(default_factory=dict)
    draining: bool = False


class AnyEvents(RuleBasedStateMachine):
    """All engines serve any model, hence one queue."""

    served: ClassVar[dict[str, frozenset[str]]] = {"x": frozenset(), "y": frozenset(), "z": frozenset()}
    models: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.shell = Shell()
        self.scheduler = Scheduler()

    @initialize(
        config=configs,
        engines=st.dictionaries(st.sampled_from("xyz"), limits, min_size=1),
        first=bursts,
        lengths=st.sampled_from([None, 3, 1000]),
    )
    def start(
        self, config: SchedulerConfig, engines: dict[str, EngineLimits], first: list[Newcomer], lengths: int | None
    ) -> None:
        """``lengths``: of the outputs that were seen before; ``None``: there were none."""
        self.scheduler = self.make_scheduler(config, [lengths] * 200 if lengths else [])
        for engine, of in engines.items():
            self.engine_up(engine, of)
        self.arrive(first)

    def make_scheduler(self, config: SchedulerConfig, lengths: list[int]) -> Scheduler:
        scheduler = Scheduler(config)
        for length in lengths:
            scheduler._ledger.growth.pooled.learn(length)
        return scheduler

    # -- time --

    @rule(seconds=intervals)
    def pass_time(self, seconds: float) -> None:
        """Let time pass with a punctual timer."""
        until = self.now + seconds
        for _ in range(10_000):
            deadline = self.scheduler.next_deadline()
            if deadline is None or deadline > until:
                break
            self.now = max(self.now, deadline)
            self.tick()
        else:
            raise AssertionError("the timer never comes to rest")
        self.now = until

    @rule(seconds=intervals)
    def pass_time_with_a_late_timer(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        self.perform(self.scheduler.tick(self.now), None)
        check_after_tick(self.scheduler, self.now)
        overdue = {engine for engine, until in self.shell.leaving.items() if until <= self.now}
        assert all(live.cut for live in self.shell.live.values() if live.engine in overdue)

    # -- requests --

    @rule(burst=bursts)
    def arrive(self, burst: list[Newcomer]) -> None:
        for prompt, size, pick, upload, limit, may_wait in burst:
            number = len(self.shell.live) + len(self.shell.over)
            model = self.models[pick % len(self.models)]
            # Long ones begin alike, which is nothing to engines that cache no prefixes.
            blocks = make_blocks(("aab", "abb")[pick % 2] * min(50, prompt // 300))
            kind = replace(CLASSES[pick // 5 % len(CLASSES)], ttft_limit_seconds=limit)
            tenant = ("", "", "a", "b")[pick // 17 % 4]
            request = make_request(
                f"r{number}",
                prompt,
                model=model,
                size_bytes=size,
                request_class=kind,
                may_wait=may_wait,
                fingerprint=b"%d" % (pick % 50),
                blocks=blocks,
                tenant=tenant,
                sequences=(1, 1, 1, 3)[pick // 29 % 4],
            )
            came_at = self.now if upload is None else self.now - upload
            self.shell.live[request.id] = Live(request, came_at)
            self.feed(Arrived(request, None if upload is None else came_at))

    @rule(burst=bursts, seconds=intervals)
    def arrive_later(self, burst: list[Newcomer], seconds: float) -> None:
        self.pass_time(seconds)
        self.arrive(burst)

    @precondition(lambda self: self.shell.live)
    @rule(pick=picks)
    def arrive_under_an_id_in_use(self, pick: int) -> None:
        request_id = self.pick_live(pick).request.id
        try:
            self.scheduler.handle(Arrived(make_request(request_id)), self.now)
        except ValueError:
            check_scheduler(self.scheduler, self.now)
        else:
            raise AssertionError("accepted twice")

    @precondition(lambda self: self.shell.live)
    @rule(pick=picks, chunks=st.sampled_from([1, 1, 2, 5]))
    def produce(self, pick: int, chunks: int) -> None:
        """One stream of any engine is read; of a waiting request this is a stray event and must be ignored."""
        self.produce_tokens(self.pick_live(pick), chunks)

    @precondition(lambda self: any(live.tokens for live in self.shell.live.values()))
    @rule(engine=st.sampled_from("xyz"), chunks=st.sampled_from([1, 1, 2]), seconds=intervals, ends=st.booleans())
    def step(self, engine: str, chunks: int, seconds: float, ends: bool) -> None:
        """All streams of an engine get their tokens of a step, and the eldest may end with it."""
        self.pass_time(seconds)
        streams = [live for live in self.shell.live.values() if live.engine == engine and live.tokens]
        for live in streams:
            self.produce_tokens(live, chunks)
        if streams and ends:
            self.end_request(streams[0].request.id)

    @precondition(lambda self: self.shell.live)
    @rule(pick=picks, tokens=st.sampled_from([None, None, 0, 1, 50]), served=st.sampled_from([None, True, False]))
    def end(self, pick: int, tokens: int | None, served: bool | None) -> None:
        """A request ends at whatever stage it is: waiting, in its prefill, within its stream."""
        self.end_request(self.pick_live(pick).request.id, tokens, served)

    @precondition(lambda self: any(live.engine for live in self.shell.live.values()))
    @rule(engine=st.sampled_from("xyz"))
    def fail_all(self, engine: str) -> None:
        """All that an engine has fails at once, as when its process dies."""
        for live in [live for live in self.shell.live.values() if live.engine == engine]:
            self.end_request(live.request.id, served=False)

    @precondition(lambda self: any(live.engine and not live.tokens for live in self.shell.live.values()))
    @rule(pick=picks, back_off=st.sampled_from([None, 0.0, 0.001, 0.3, 5.0]))
    def not_started(self, pick: int, back_off: float | None) -> None:
        released = [live for live in self.shell.live.values() if live.engine and not live.tokens]
        live = released[pick % len(released)]
        live.engine = None
        self.feed(NotStarted(live.request.id, back_off))

    @rule(pick=picks, gone=st.integers(0, 4), running=st.lists(picks, max_size=4), newcomer=st.none() | newcomers)
    def hand_over(self, pick: int, gone: int, running: list[int], newcomer: Newcomer | None) -> None:
        """Some requests are somebody else's from now on, and some of somebody else's are ours: all at once."""
        leave = [self.pick_live(pick + number).request.id for number in range(gone) if self.shell.live]
        for request_id in dict.fromkeys(leave):
            del self.shell.live[request_id]
            self.shell.over[request_id] = "handed over"
        in_flight: list[InFlight] = []
        known = {engine.id for engine in self.scheduler.engines}
        for of in running:
            engine = "xyz"[of % 3]
            request = make_request(f"r{len(self.shell.live) + len(self.shell.over)}", of % 700, sequences=1 + of % 2)
            in_flight.append(InFlight(request, engine, self.now - 1.0, tokens := of // 3 % 2))
            if engine in known:
                self.shell.live[request.id] = Live(request, self.now - 1.0, engine, tokens)
            else:
                self.shell.over[request.id] = "of an engine that is not known"
        waiting: tuple[Arrived, ...] = ()
        if newcomer is not None:
            number, (prompt, size, *_, limit, may_wait) = len(self.shell.live) + len(self.shell.over), newcomer
            kind = replace(RELAXED, ttft_limit_seconds=limit)
            request = make_request(f"r{number}", prompt, size_bytes=size, request_class=kind, may_wait=may_wait)
            self.shell.live[request.id] = Live(request, self.now)
            waiting = (Arrived(request, self.now),)
        event = HandedOver((*leave, "nobody"), tuple(in_flight), waiting)
        self.perform(self.scheduler.handle(event, self.now), waiting[0] if waiting else event)

    @rule(pick=picks)
    def stray_events(self, pick: int) -> None:
        """What is told of requests that are over, unknown or still waiting changes nothing."""
        waiting = [live.request.id for live in self.shell.live.values() if live.engine is None]
        for request_id in ("nobody", *list(self.shell.over)[-2:]):
            self.feed(Ended(request_id))
        for request_id in ("nobody", *list(self.shell.over)[-2:], *waiting[pick % 3 :][:1]):
            if request_id not in self.shell.live or self.shell.live[request_id].engine is None:
                self.feed(TokensProduced(request_id))
                self.feed(NotStarted(request_id, 1.0))

    # -- engines --

    @rule(engine=st.sampled_from("xyz"), of=limits)
    def engine_up(self, engine: str, of: EngineLimits) -> None:
        self.shell.up[engine] = True
        self.shell.leaving.pop(engine, None)
        self.shell.limits[engine] = of
        self.shell.models[engine] = self.served[engine]
        self.feed(EngineUp(engine, of, self.served[engine]))

    @precondition(lambda self: sum(self.shell.up.values()) > 1 or len(self.shell.over) % 3 == 0)
    @rule(engine=st.sampled_from("xyz"))
    def engine_down(self, engine: str) -> None:
        self.shell.up[engine] = False
        self.shell.leaving.pop(engine, None)
        self.shell.models.setdefault(engine, frozenset())
        self.feed(EngineDown(engine))

    @precondition(lambda self: sum(self.shell.up.values()) > 1 or len(self.shell.over) % 3 == 0)
    @rule(engine=st.sampled_from("xyz"), drain_seconds=st.sampled_from([0.0, 0.4, 30.0]))
    def engine_removed(self, engine: str, drain_seconds: float) -> None:
        if engine in self.shell.up:
            del self.shell.up[engine], self.shell.models[engine]
            self.shell.leaving[engine] = self.now + drain_seconds
        self.feed(EngineRemoved(engine, drain_seconds))

    @rule(engine=st.sampled_from("xyz"), report=reports, times=st.sampled_from([1, 3]))
    def report(self, engine: str, report: EngineReport | None, times: int) -> None:
        """An engine tells its own figures, those of an engine that nobody knows included."""
        for _ in range(times):
            self.feed(EngineReported(engine, report))

    @rule(engine=st.sampled_from("xyz"), begins=st.booleans())
    def pass_by(self, engine: str, begins: bool) -> None:
        """An engine gets a request past the queue, or is done with one, in whatever order that is heard of."""
        self.feed(Passed(engine, begins))

    @precondition(lambda self: not self.shell.draining and len(self.shell.over) > 20)
    @rule()
    def drain(self) -> None:
        self.shell.draining = True
        self.feed(DrainStarted())

    # -- the shell --

    def teardown(self) -> None:
        self.shell.draining = True
        self.feed(DrainStarted())
        assert all(live.engine for live in self.shell.live.values()), "what waited was refused"
        for request_id in list(self.shell.live):
            self.end_request(request_id)
        assert (self.scheduler.waiting, self.scheduler.waiting_bytes, self.scheduler.waiting_tokens) == (0, 0, 0)
        assert not self.scheduler._ledger.entries
        assert not self.scheduler.prefixes._uses
        assert not self.scheduler._ledger.backlog._queues
        assert all((e.outstanding, e.backlog, e.kv_tokens) == (0, 0, 0) for e in self.scheduler.engines)
        assert {e.id for e in self.scheduler.engines} == set(self.shell.up), "who was removed is gone"

    def pick_live(self, pick: int) -> Live:
        return list(self.shell.live.values())[pick % len(self.shell.live)]

    def serving(self, model: str) -> list[str]:
        return [e for e, served in self.shell.models.items() if not model or not served or model in served]

    def produce_tokens(self, live: Live, chunks: int) -> None:
        if live.engine is not None:
            live.tokens += chunks
        self.feed(TokensProduced(live.request.id, chunks))

    def end_request(self, request_id: str, tokens: int | None = None, served: bool | None = None) -> None:
        del self.shell.live[request_id]
        self.shell.over[request_id] = "ended"
        self.feed(Ended(request_id, tokens, served=served))

    def feed(self, event: Event) -> None:
        self.perform(self.scheduler.handle(event, self.now), event)

    def perform(self, actions: list[Action], cause: Event | None) -> None:
        last: dict[str, Request] = {}
        for action in actions:
            assert action.request_id not in self.shell.over, "an outcome is final"
            live = self.shell.live[action.request_id]
            if isinstance(action, Cut):
                assert live.engine == action.engine_id
                assert self.shell.leaving[action.engine_id] <= self.now, "nobody is cut before the time"
                assert not live.cut, "it was cut already"
                live.cut = True
                continue
            assert live.engine is None, "it was dispatched already"
            match action:
                case Dispatch(request_id, engine):
                    assert self.shell.up[engine]
                    assert engine in self.serving(live.request.model)
                    live.engine = engine
                    last[engine] = live.request
                    self.check_order(live)
                case Reject(request_id, reason, retry_after):
                    self.check_refusal(live, reason, retry_after, cause)
                    del self.shell.live[request_id]
                    self.shell.over[request_id] = reason
        check_scheduler(self.scheduler, self.now)
        self.check_counts()
        if isinstance(cause, Arrived):
            self.check_queue(cause.request.id)
        for engine, request in last.items():
            self.check_gate(engine, request)

    def check_order(self, released: Live) -> None:
        """Check that of one flow who came first goes first, where that is the order and there is one queue."""
        if self.scheduler.config.ordering is FCFS and len(self.models) == 1 and self.is_plain(released):
            waiting = [live for live in self.shell.live.values() if live.engine is None and self.is_plain(live)]
            alike = [w.came_at for w in waiting if flow_of(w.request) == flow_of(released.request)]
            assert released.came_at <= min(alike, default=self.now)

    def is_plain(self, live: Live) -> bool:
        """Whether its place is that of its arrival: a deadline may move it, or that it was refused before."""
        entry = self.scheduler._ledger.entries.get(live.request.id)
        came_back = entry is not None and entry.waiting.request.waited_before_seconds > 0
        return live.request.request_class.ttft_seconds is None and not came_back

    def check_counts(self) -> None:
        live = self.shell.live.values()
        assert not (self.shell.draining and self.scheduler.waiting), "a drain leaves nothing waiting"
        assert self.scheduler.waiting == sum(one.engine is None for one in live)
        for engine in self.scheduler.engines:
            assert engine.outstanding == sum(one.engine == engine.id for one in live)
            assert engine.siblings == sum(one.request.sequences - 1 for one in live if one.engine == engine.id)
            assert engine.passing >= 0
            assert engine.decodes == sum(one.engine == engine.id and one.tokens > 0 for one in live)
            assert engine.up == self.shell.up.get(engine.id, False)
            assert engine.leaving == (engine.id in self.shell.leaving)
            health = engine.health
            assert health.probe is None or self.shell.live[health.probe].engine == engine.id
            assert (health.until is not None) == (health.condition is Condition.EJECTED)
            assert health.condition is not Condition.STALLED or engine.outstanding, "what is stalled has work"
        at_work = {one.engine for one in live if one.engine is not None}
        assert {e.id for e in self.scheduler.engines} == self.shell.up.keys() | (self.shell.leaving.keys() & at_work)

    def check_queue(self, newcomer: str) -> None:
        """Check the bounds of the queue; only what an engine did not start may come back over them."""
        if newcomer in self.shell.live and self.shell.live[newcomer].engine is None:
            assert not self.shell.draining
            assert self.scheduler.waiting <= self.scheduler.config.max_queue_requests
            assert self.scheduler.waiting_bytes <= self.scheduler.config.max_queue_bytes
            most_tokens = self.scheduler.config.max_queue_tokens
            assert most_tokens is None or self.scheduler.waiting_tokens <= most_tokens

    def check_gate(self, engine_id: str, released_last: Request) -> None:
        """Check the engine's limits after a release to it, however much they shrank before."""
        engine = next(e for e in self.scheduler.engines if e.id == engine_id)
        of = self.shell.limits[engine_id]
        assert is_open(engine, self.now) or engine.health.probe == released_last.id, "one on probation takes one"
        assert engine.outstanding <= of.max_num_seqs
        if of.kv_tokens is None or engine.outstanding == 1:
            return
        kv_tokens, free = engine.kv_tokens + engine.reports.kv_error, 1 - engine.reports.caution
        if engine.outputs.learnt:
            growth, room = 0, free * of.kv_tokens
        else:
            growth = GATE.kv_growth_tokens
            room = (free - GATE.kv_watermark) * of.kv_tokens - growth
        if released_last.prompt_tokens <= room:
            assert kv_tokens + growth * (engine.outstanding - 1) <= room + 1e-6

    def check_refusal(self, live: Live, reason: RejectReason, retry_after: float | None, cause: Event | None) -> None:
        serving = self.serving(live.request.model)
        config = self.scheduler.config
        match reason:
            case RejectReason.QUEUE_FULL:
                assert isinstance(cause, Arrived)
                newcomer = cause.request
                if newcomer is live.request:
                    self.check_could_not_start()
                else:
                    assert live.request.tenant != newcomer.tenant, "only others make room"
                    assert newcomer.id in self.scheduler._ledger.entries, "nobody makes room for nobody"
            case RejectReason.NO_QUEUE:
                assert isinstance(cause, Arrived | NotStarted)
                assert not live.request.may_wait
                self.check_could_not_start()
            case RejectReason.TOO_LATE:
                limit = live.request.request_class.ttft_limit_seconds
                if isinstance(cause, Arrived) and cause.request is live.request:
                    self.check_could_not_start()  # it would have been late
                else:
                    assert limit is not None
                    assert self.now - live.came_at >= limit - 1e-6
            case RejectReason.QUEUE_TIMEOUT:
                assert cause is None
                assert self.now - live.came_at >= config.queue_timeout_seconds - 1e-6
            case RejectReason.NO_ENGINE:
                assert not any(self.shell.up[e] for e in serving)
            case RejectReason.UNKNOWN_MODEL:
                assert self.shell.up
                assert not serving
            case RejectReason.DRAINING:
                assert self.shell.draining
            case _:
                raise AssertionError(reason)
        if reason in (
            RejectReason.QUEUE_FULL,
            RejectReason.QUEUE_TIMEOUT,
            RejectReason.TOO_LATE,
            RejectReason.NO_QUEUE,
        ):
            assert retry_after is not None
            assert 1 <= retry_after <= 120
        else:
            assert retry_after == (None if reason is RejectReason.UNKNOWN_MODEL else config.no_engine_retry_seconds)

    def check_could_not_start(self) -> None:
        """Check that a request which was refused had to wait: others do, or no engine stands idle."""
        if len(self.models) == 1:
            open_engines = [e for e in self.scheduler.engines if is_open(e, self.now)]
            assert self.scheduler.waiting or all(e.outstanding for e in open_engines)


class SeveralModels(AnyEvents):
    """Engines that share some of their models, and one that has not told its own: hence several queues, by servers."""

    served: ClassVar[dict[str, frozenset[str]]] = {
        "x": frozenset({"a"}),
        "y": frozenset(),
        "z": frozenset({"a", "b", "c"}),
    }
    models: ClassVar[tuple[str, ...]] = ("a", "b", "c", "", "unknown")


bounded = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, database=None, deadline=None, report_multiple_bugs=False
)
TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = bounded
TestSeveralModels = SeveralModels.TestCase
TestSeveralModels.settings = bounded
