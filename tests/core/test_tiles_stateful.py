"""The scheduler with tiles, under any sequence of events: slices that end late, in any order, cached or not.

A slice may outlive what it was for: its request, its request's stay at that engine, and its engine's being up.
"""

from dataclasses import dataclass, field, replace

from builders import make_blocks, make_limits, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from invariants import check_after_tick, check_scheduler, is_open

from proxy.core.actions import Action, Dispatch, Reject, Slice
from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
from proxy.core.engine import EngineBelief
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
from proxy.core.limits import EngineLimits
from proxy.core.request import RELAXED, STRICT, RejectReason, Request, RequestClass
from proxy.core.scheduler import Scheduler
from proxy.core.selfreport import EngineReport
from proxy.core.tiles import TileConfig

configs = st.builds(
    SchedulerConfig,
    gate=st.just(GateConfig(kv_watermark=0.05, kv_growth_tokens=16)),
    tiles=st.builds(
        TileConfig,
        smallest_tokens=st.sampled_from([64, 128]),
        margin=st.sampled_from([0.03, 0.999]),
        max_sliced=st.sampled_from([1, 4]),
    ),
    max_wait_seconds=st.sampled_from([0.5, 60.0]),
    queue_timeout_seconds=st.sampled_from([0.1, 2.0, 300.0]),
)
limits = st.builds(
    make_limits,
    token_budget=st.sampled_from([512, 8192]),
    max_num_seqs=st.sampled_from([2, 8, 8]),
    kv_tokens=st.sampled_from([None, None, None, 20_000]),
    block_tokens=st.sampled_from([16, 48, 64, 528]),
    caches_prefixes=st.sampled_from([True, True, False]),
)
intervals = st.one_of(st.integers(0, 100_000), st.integers(0, 3_000_000)).map(lambda us: us / 1e6)
picks = st.integers(0, 1 << 16)
classes = st.sampled_from([STRICT, STRICT, RELAXED, RequestClass("any"), RequestClass("soon", 1.0, weight=3.0)])
newcomers = st.tuples(
    st.sampled_from([1, 30, 130, 700, 3000, 3000, 15_000]), classes, st.sampled_from([True, True, True, False])
)


@dataclass
class Live:
    """A request that is not over, as the shell knows it."""

    request: Request
    since: float
    """When it came."""
    engine: str | None = None
    """Where it was dispatched to."""
    sliceable: bool = False
    tokens: int = 0
    held: int = 0
    """End of its last slice, where that was sent, and in which step of that engine."""
    at: str | None = None
    step: int = -1
    numbers: set[int] = field(default_factory=set)
    """Of the slices that count: those of earlier attempts may still be on their way."""

    def begin_anew(self) -> None:
        self.held, self.at, self.step = 0, None, -1
        self.numbers.clear()


@dataclass
class Shell:
    """What the live proxy would know."""

    up: dict[str, bool] = field(default_factory=dict)
    limits: dict[str, EngineLimits] = field(default_factory=dict)
    live: dict[str, Live] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    slices: list[Slice] = field(default_factory=list)
    """On their way."""
    sent: set[str] = field(default_factory=set)
    """Ids of all slices ever."""
    draining: bool = False


class Tiles(RuleBasedStateMachine):
    """Two engines."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.shell = Shell()
        self.scheduler = Scheduler()

    @initialize(config=configs, x=limits, y=limits)
    def start(self, config: SchedulerConfig, x: EngineLimits, y: EngineLimits) -> None:
        self.scheduler = Scheduler(config)
        self.engine_up("x", x)
        self.engine_up("y", y)
        # A stream with a deadline on each, so that long prompts are sliced from the start.
        for _ in "xy":
            self.arrive([(30, STRICT, False)])
        for live in list(self.shell.live.values()):
            self.produce_tokens(live, 1)

    @rule(seconds=intervals)
    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        for _ in range(10_000):
            deadline = self.scheduler.next_deadline()
            if deadline is None or deadline > until:
                break
            self.now = max(self.now, deadline)
            self.perform(self.scheduler.tick(self.now))
            check_after_tick(self.scheduler, self.now)
            limit = self.scheduler.config.queue_timeout_seconds
            waiting = [live for live in self.shell.live.values() if live.engine is None]
            assert all(self.now < live.since + limit for live in waiting), "half-way or not, none waits for longer"
        else:
            raise AssertionError("the timer never comes to rest")
        self.now = until

    @rule(burst=st.lists(newcomers, min_size=1, max_size=4), seconds=intervals)
    def arrive_later(self, burst: list[tuple[int, RequestClass, bool]], seconds: float) -> None:
        self.pass_time(seconds)
        self.arrive(burst)

    def arrive(self, burst: list[tuple[int, RequestClass, bool]]) -> None:
        for prompt, request_class, sliceable in burst:
            number = len(self.shell.live) + len(self.shell.over)
            blocks = make_blocks(("aab", "abb")[number % 2] * (prompt // 300))
            tenant = "ab"[number // 3 % 2]
            request = make_request(
                f"r{number}",
                prompt,
                request_class=request_class,
                sliceable=sliceable,
                blocks=blocks,
                tenant=tenant,
            )
            self.shell.live[request.id] = Live(request, self.now, sliceable=sliceable)
            self.feed(Arrived(request))

    @precondition(lambda self: self.shell.live)
    @rule(pick=picks, factor=st.sampled_from([0.5, 1.0, 2.0]))
    def tokenized(self, pick: int, factor: float) -> None:
        live = self.pick_live(pick)
        tokens = max(1, int(live.request.prompt_tokens * factor))
        if live.engine is None and live.at is None:
            live.request = replace(live.request, prompt_tokens=tokens)
            live.sliceable = True
        self.feed(Tokenized(live.request.id, tokens))

    @rule(burst=st.lists(newcomers, min_size=1, max_size=3), steps=st.integers(1, 6), late=st.booleans())
    def arrive_and_go_on(self, burst: list[tuple[int, RequestClass, bool]], steps: int, late: bool) -> None:
        """Some steps of usual length; slices end with theirs, or only when another rule says so."""
        self.arrive(burst)
        for _ in range(steps):
            sent = list(self.shell.slices)
            for engine in "xy":
                self.step(engine, 0.03, 1)
            for piece in sent if not late else ():
                if piece in self.shell.slices:
                    self.end_slice(piece, cached=True)

    @rule(engine=st.sampled_from("xy"), seconds=intervals, chunks=st.sampled_from([1, 1, 1, 2]))
    def step(self, engine: str, seconds: float, chunks: int) -> None:
        """Time passes and all streams of an engine get their tokens."""
        self.pass_time(seconds)
        for live in [v for v in self.shell.live.values() if v.engine == engine and v.tokens]:
            self.produce_tokens(live, chunks)

    @precondition(lambda self: any(live.engine for live in self.shell.live.values()))
    @rule(pick=picks)
    def produce(self, pick: int) -> None:
        dispatched = [live for live in self.shell.live.values() if live.engine]
        self.produce_tokens(dispatched[pick % len(dispatched)], 1)

    @precondition(lambda self: self.shell.slices)
    @rule(pick=picks, cached=st.sampled_from([True, True, True, False]))
    def slice_ended(self, pick: int, cached: bool) -> None:
        """Any slice ends, whatever has become of its request meanwhile."""
        self.end_slice(self.shell.slices[pick % len(self.shell.slices)], cached=cached)

    @precondition(lambda self: self.shell.live)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        """A request ends at whatever stage it is; slices of it may still be on their way."""
        self.end_request(self.pick_live(pick).request.id)

    @precondition(lambda self: any(live.engine and not live.tokens for live in self.shell.live.values()))
    @rule(pick=picks, back_off=st.sampled_from([0.1, 1.0]))
    def not_started(self, pick: int, back_off: float) -> None:
        released = [live for live in self.shell.live.values() if live.engine and not live.tokens]
        live = released[pick % len(released)]
        engine, live.engine = live.engine, None
        live.begin_anew()
        for other in self.shell.live.values():
            if other.at == engine and other.engine is None:
                other.begin_anew()
        self.feed(NotStarted(live.request.id, back_off))

    @precondition(lambda self: sum(self.shell.up.values()) > 1)
    @rule(engine=st.sampled_from("xy"))
    def engine_down(self, engine: str) -> None:
        self.shell.up[engine] = False
        for live in self.shell.live.values():
            if live.at == engine and live.engine is None:
                live.begin_anew()
        self.feed(EngineDown(engine))

    @precondition(lambda self: self.shell.slices)
    @rule(pick=picks, steps=st.integers(0, 3))
    def engine_flaps(self, pick: int, steps: int) -> None:
        """A probe fails and the next does not; the engine has gone on with its slices."""
        engine = self.shell.slices[pick % len(self.shell.slices)].engine_id
        self.engine_down(engine)
        self.engine_up(engine, self.shell.limits[engine])
        for _ in range(steps):
            self.step(engine, 0.03, 1)

    @rule(engine=st.sampled_from("xy"), of=limits)
    def engine_up(self, engine: str, of: EngineLimits) -> None:
        self.shell.up[engine] = True
        self.shell.limits[engine] = of
        self.feed(EngineUp(engine, of))

    @rule(engine=st.sampled_from("xy"), running=st.sampled_from([0, 3, 9]), usage=st.sampled_from([0.0, 0.5, 1.0]))
    def report(self, engine: str, running: int, usage: float) -> None:
        self.feed(EngineReported(engine, EngineReport(running, 0, usage, 0)))

    @precondition(lambda self: len(self.shell.live) > 4 and not self.shell.draining)
    @rule()
    def drain(self) -> None:
        """What waits is refused, half-way or not; what was sent whole ends as ever."""
        self.shell.draining = True
        for live in self.shell.live.values():
            if live.engine is None:
                live.begin_anew()
        self.feed(DrainStarted())
        assert all(live.engine for live in self.shell.live.values())

    def teardown(self) -> None:
        for request_id in list(self.shell.live):
            self.end_request(request_id)
        for piece in list(self.shell.slices):
            self.end_slice(piece, cached=False)
        assert (self.scheduler.waiting, self.scheduler.dispatched, self.scheduler.next_deadline()) == (0, 0, None)
        assert not self.scheduler._ledger.entries
        assert not self.scheduler._ledger.sliced
        assert all((e.backlog, e.kv_tokens, e.sliced) == (0, 0, 0) for e in self.scheduler.engines)

    # -- the shell --

    def pick_live(self, pick: int) -> Live:
        """Any request but the two streams that keep the clocks, unless there is no other."""
        live = list(self.shell.live.values())
        return (live[2:] or live)[pick % len(live[2:] or live)]

    def produce_tokens(self, live: Live, chunks: int) -> None:
        assert live.engine is not None
        live.tokens += chunks
        self.feed(TokensProduced(live.request.id, chunks))

    def end_slice(self, piece: Slice, *, cached: bool) -> None:
        self.shell.slices.remove(piece)
        live = self.shell.live.get(piece.request_id)
        if live is not None and not cached and live.engine is None and piece.number in live.numbers:
            live.sliceable = False
            live.begin_anew()
        self.feed(SliceEnded(piece, cached))

    def end_request(self, request_id: str) -> None:
        del self.shell.live[request_id]
        self.shell.over.add(request_id)
        self.feed(Ended(request_id))

    def feed(self, event: Event) -> None:
        self.perform(self.scheduler.handle(event, self.now))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            live = self.shell.live[action.request_id]
            overdue = self.now >= live.since + self.scheduler.config.queue_timeout_seconds
            assert live.engine is None, "it was dispatched already"
            assert isinstance(action, Reject) or not self.shell.draining
            match action:
                case Slice(request_id, engine_id, tokens):
                    self.check_slice(live, action)
                    live.held, live.at, live.step = tokens, engine_id, self.engine(engine_id).step
                    live.numbers.add(action.number)
                    assert action.slice_id not in self.shell.sent
                    self.shell.sent.add(action.slice_id)
                    self.shell.slices.append(action)
                case Dispatch(request_id, engine_id):
                    assert live.at in (None, engine_id), "the rest goes where its slices are"
                    if not overdue:
                        self.check_one_piece_per_step(live, engine_id)
                    live.engine = engine_id
                case Reject(request_id, reason):
                    assert live.at is None or overdue, "what has begun is not refused before it has waited too long"
                    assert not self.shell.draining or reason is RejectReason.DRAINING
                    del self.shell.live[request_id]
                    self.shell.over.add(request_id)
            if not isinstance(action, Reject):
                engine = self.engine(action.engine_id)
                assert is_open(engine, self.now) or engine.health.probe == action.request_id
        check_scheduler(self.scheduler, self.now)
        for engine in self.scheduler.engines:
            dispatched = [live for live in self.shell.live.values() if live.engine == engine.id]
            flying = [s for s in self.shell.slices if s.engine_id == engine.id]
            assert engine.outstanding == len(dispatched) + len(flying)
            halves = [v for v in self.shell.live.values() if v.at == engine.id and v.engine is None]
            assert engine.sliced == len(halves)
            assert self.scheduler.config.tiles is not None
            assert engine.sliced <= self.scheduler.config.tiles.max_sliced

    def engine(self, engine_id: str) -> EngineBelief:
        return next(e for e in self.scheduler.engines if e.id == engine_id)

    def check_one_piece_per_step(self, live: Live, engine_id: str) -> None:
        """A piece finds the one before in the engine's cache: its step is over, or so is that piece itself.

        A shorter piece may still be on its way then: its tokens are those that the longer one begins with.
        """
        flying = {piece.number for piece in self.shell.slices}
        assert live.at is None or self.engine(engine_id).step > live.step or max(live.numbers) not in flying

    def check_slice(self, live: Live, piece: Slice) -> None:
        of, tiles = self.shell.limits[piece.engine_id], self.scheduler.config.tiles
        assert tiles is not None
        assert live.sliceable
        assert of.caches_prefixes
        assert live.at in (None, piece.engine_id)
        assert live.held == piece.held_tokens
        assert live.held + tiles.smallest_tokens <= piece.tokens < live.request.prompt_tokens
        self.check_one_piece_per_step(live, piece.engine_id)
        assert piece.tokens % of.block_tokens == 0
        assert self.engine(piece.engine_id).strictest_tbt_seconds is not None


TestTiles = Tiles.TestCase
TestTiles.settings = settings(
    max_examples=150, stateful_step_count=40, derandomize=True, database=None, deadline=None, report_multiple_bugs=False
)
