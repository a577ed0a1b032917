"""A fleet under any interleaving of what can happen to it: what must hold then, and when all is well again."""

from typing import ClassVar

from fleet_net import FleetNet
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.core.config import SchedulerConfig
from proxy.core.fleet import Role, following
from proxy.core.quota import QuotaLimits
from proxy.core.tiles import TileConfig

SLOTS = 3
MOST_ANNOUNCED = following._MOST_ANNOUNCED
picks = st.integers(0, 1 << 16)


class Calm(RuleBasedStateMachine):
    """Letters take their time, some are lost, replicas come, leave in order and are killed; none is cut off or slow."""

    may_exceed: ClassVar[bool] = False
    quotas: ClassVar[dict[str, QuotaLimits]] = {}

    @initialize(
        replicas=st.integers(1, 4),
        delay=st.sampled_from([0.0001, 0.001, 0.02, 0.2]),
        tiles=st.sampled_from([None, TileConfig(smallest_tokens=16)]),
        most_announced=st.sampled_from([1, 3, 500]),
        settled=st.sampled_from([True, True, False]),
    )
    def begin(self, replicas: int, delay: float, tiles: TileConfig | None, most_announced: int, settled: bool) -> None:
        following._MOST_ANNOUNCED = most_announced
        self.net = FleetNet(delay=delay, slots=SLOTS, config=SchedulerConfig(tiles=tiles), quotas=self.quotas)
        self.drained: set[str] = set()
        for _ in range(replicas):
            self.net.start()
        self.net.run(3.0 if settled else 0.0)

    def one_of(self, names: object, pick: int) -> object:
        found = sorted(names)  # type: ignore[call-overload]
        return found[pick % len(found)] if found else None

    def awake(self) -> list[str]:
        return [name for name, r in self.net.replicas.items() if not r.paused]

    # -- clients and engines --

    @rule(
        pick=picks,
        tokens=st.sampled_from([1, 40, 100, 3000]),
        sliceable=st.booleans(),
        count=st.integers(1, 5),
        hops=st.sampled_from([0, 1, 1.5, 3, 3]),
    )
    def arrive(self, pick: int, tokens: int, sliceable: bool, count: int, hops: float) -> None:
        for number in range(count):
            if name := self.one_of(self.awake(), pick + number):
                self.net.arrive(str(name), tokens, sliceable=sliceable)
        self.net.run(hops * self.net.delay)

    def in_flight(self, *, begun: bool = False) -> list[tuple[str, str]]:
        return [k for k, c in self.net.live().items() if c.engine and (c.tokens or not begun) and k[0] in self.awake()]

    @rule(pick=picks, chunks=st.integers(1, 3), seconds=st.sampled_from([0.0, 0.03, 0.03]))
    def tokens(self, pick: int, chunks: int, seconds: float) -> None:
        """Every stream of one engine has ``chunks``."""
        self.net.run(seconds)
        engine = self.net.engines[pick % 2]
        for key in self.in_flight():
            if key in self.net.calls and self.net.calls[key].engine == engine and not self.net.calls[key].outcome:
                self.net.token(key, chunks)

    @rule(pick=picks, served=st.sampled_from([True, True, None, False]))
    def end(self, pick: int, served: bool | None) -> None:
        if key := self.one_of(self.in_flight(), pick):
            self.net.end(key, served=served)  # type: ignore[arg-type]

    @rule(pick=picks)
    def client_leaves(self, pick: int) -> None:
        if key := self.one_of([k for k in self.net.live() if k[0] in self.awake()], pick):
            self.net.end(key, "gone", None)  # type: ignore[arg-type]

    @rule(pick=picks)
    def turn_away(self, pick: int) -> None:
        if key := self.one_of([k for k in self.in_flight() if not self.net.calls[k].tokens], pick):
            self.net.turn_away(key)  # type: ignore[arg-type]

    @rule(pick=picks, cached=st.sampled_from([True, True, True, False]))
    def end_slice(self, pick: int, cached: bool) -> None:
        if key := self.one_of([k for k, c in self.net.live().items() if c.slices and k[0] in self.awake()], pick):
            self.net.end_slice(key, cached=cached)  # type: ignore[arg-type]

    # -- time and the network --

    @rule(seconds=st.sampled_from([0.0, 0.0005, 0.01, 0.3, 1.0, 3.0]))
    def run(self, seconds: float) -> None:
        self.net.run(seconds)

    @rule(count=st.integers(1, 3))
    def lose_letters(self, count: int) -> None:
        self.net.losing += count

    # -- replicas --

    @precondition(lambda self: len(self.net.replicas) < 5)
    @rule()
    def start(self) -> None:
        self.net.start()

    @precondition(lambda self: len(self.net.replicas) > 2)
    @rule(pick=picks)
    def kill(self, pick: int) -> None:
        if name := self.one_of(self.net.replicas, pick):
            self.net.kill(str(name))

    @precondition(lambda self: len(self.awake()) > 2)
    @rule(pick=picks)
    def drain(self, pick: int) -> None:
        if name := self.one_of(self.awake(), pick):
            self.net.drain(str(name))
            assert not [k for k, c in self.net.live(str(name)).items() if not c.engine]

    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        done = [n for n in self.awake() if self.net.member(n).scheduler.draining and not self.net.live(n)]
        if name := self.one_of(done, pick):
            self.net.finish(str(name))

    # -- what must hold --

    @invariant()
    def one_leader_at_most(self) -> None:
        if hasattr(self, "net"):
            assert len(self.net.leaders) <= 1, self.net.leaders

    @invariant()
    def engines_hold_no_more_than_they_may(self) -> None:
        if not hasattr(self, "net"):
            return
        most = SLOTS * (5 if self.may_exceed else 1)
        for engine in self.net.engines:
            assert self.net.running(engine) <= most

    @invariant()
    def own_schedulers_know_what_runs(self) -> None:
        """Each replica's scheduler has its own requests in flight; a follower's has nothing else."""
        if not hasattr(self, "net"):
            return
        for name, replica in self.net.replicas.items():
            entries = replica.member.scheduler.ledger.entries
            running = {k[1]: c.engine for k, c in self.net.live(name).items() if c.engine}
            known = {i: e.engine.id for i, e in entries.items() if "/" not in i and e.engine and not e.sliced}
            assert known == running
            if replica.member.role is Role.FOLLOWER:
                assert len(entries) == len(running)

    def teardown(self) -> None:
        try:
            self.all_is_well()
        finally:
            following._MOST_ANNOUNCED = MOST_ANNOUNCED

    def all_is_well(self) -> None:
        """When nothing bad happens any more, one leads and knows exactly all; and all that waits gets its turn."""
        if not hasattr(self, "net"):
            return
        net = self.net
        self.mend()
        if not any(replica.member.willing for replica in net.replicas.values()):
            net.start()
        net.run(15.0)
        self.settled()
        for _ in range(300):
            if not net.live():
                break
            for key, call in list(net.live().items()):
                while call.slices:
                    net.end_slice(key)
                if call.engine and not call.outcome:
                    net.token(key)
                    net.end(key)
            net.run(0.5)
        assert not net.live()
        net.run(1.0)
        assert not any(replica.member.scheduler.ledger.entries for replica in net.replicas.values())

    def mend(self) -> None:
        self.net.losing = 0

    def settled(self) -> None:
        net = self.net
        (leader,) = net.leaders
        roles = {name: replica.member.role for name, replica in net.replicas.items()}
        assert {n: r for n, r in roles.items() if r is not Role.FOLLOWER} == {leader.id: Role.LEADER}
        assert {replica.member.leader for replica in net.replicas.values()} == {leader.id}
        entries = leader.scheduler.ledger.entries
        told = {
            (k if k[0] == leader.id else (leader.id, f"{k[0]}/{k[1]}"))[1]: (c.engine, c.tokens)
            for k, c in net.live().items()
        }
        believed = {
            i: (e.engine.id, max(0, e.engine.context_tokens(i) - e.waiting.request.prompt_tokens))
            if e.engine and not e.sliced
            else ("", 0)
            for i, e in entries.items()
        }
        assert believed == told
        for engine in leader.scheduler.engines:
            running = net.running(engine.id)
            slices = sum(piece.engine_id == engine.id for c in net.live().values() for piece in c.slices)
            assert running <= engine.outstanding <= running + slices  # some may be of a session that is over


class Rough(Calm):
    """Besides, replicas are paused or cut off, and the store is away or loses its memory."""

    may_exceed = True

    @precondition(lambda self: len(self.awake()) > 1)
    @rule(pick=picks, asking=st.booleans())
    def pause(self, pick: int, asking: bool) -> None:
        if name := self.one_of(self.awake(), pick):
            self.net.pause(str(name), asking=asking)

    @rule(pick=picks)
    def resume(self, pick: int) -> None:
        if name := self.one_of([n for n, r in self.net.replicas.items() if r.paused], pick):
            self.net.resume(str(name))

    @rule(pick=picks, seconds=st.sampled_from([0.3, 2.0, 5.0]))
    def cut_off(self, pick: int, seconds: float) -> None:
        """What happens next happens while a replica is cut off, or it is reached again before."""
        if name := self.one_of(self.net.replicas, pick):
            self.net.cut_off = set() if self.net.cut_off else {str(name)}
            self.net.run(seconds)

    @rule(seconds=st.sampled_from([0.3, 1.2, 5.0]), returns=st.booleans())
    def store_is_away(self, seconds: float, returns: bool) -> None:
        self.net.store_up = False
        self.net.run(seconds)
        self.net.store_up = returns

    @rule()
    def store_returns(self) -> None:
        self.net.store_up = True

    @rule()
    def store_forgets(self) -> None:
        self.net.flush_store()

    def mend(self) -> None:
        super().mend()
        self.net.store_up = True
        self.net.cut_off.clear()
        for name, replica in self.net.replicas.items():
            if replica.paused:
                self.net.resume(name)


TestCalm = Calm.TestCase
TestCalm.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestRough = Rough.TestCase
TestRough.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
