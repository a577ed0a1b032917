"""A fleet in virtual time, for tests: members, the store's register, a network between them, and what clients see."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from builders import make_limits, make_request

from proxy.core.actions import Action, Cut, Dispatch, Reject, Slice
from proxy.core.claims import Claim
from proxy.core.config import SchedulerConfig
from proxy.core.events import Arrived, DrainStarted, Ended, EngineUp, NotStarted, SliceEnded
from proxy.core.fleet import FleetConfig, Letter, Member, Register, Role, Standing
from proxy.core.quota import QuotaLimits
from proxy.core.scheduler import Scheduler
from proxy.wire.letters import decode_letter, encode_letter

CONFIG = FleetConfig()


@dataclass
class Call:
    """A client's request."""

    member: str
    engine: str = ""
    tokens: int = 0
    outcome: str = ""
    slices: list[Slice] = field(default_factory=list)
    dispatches: int = 0


@dataclass
class Replica:
    member: Member
    beats_at: float
    paused: bool = False
    inbox: list[bytes] = field(default_factory=list)
    """Letters that wait in its socket while it is paused."""
    answer: tuple[Standing | None, float] | None = None
    """What the store answered when it was paused, and when it had asked."""


class FleetNet:
    """Letters take ``delay`` seconds, all in order; the next ``losing`` of them are lost."""

    def __init__(
        self,
        *,
        delay: float = 0.001,
        slots: int = 4,
        engines: tuple[str, ...] = ("x", "y"),
        config: SchedulerConfig | None = None,
        fleet: FleetConfig = CONFIG,
        quotas: Mapping[str, QuotaLimits] | None = None,
    ) -> None:
        self.now = 0.0
        self.register = Register()
        self.store_up = True
        self.cut_off: set[str] = set()
        self.deaf: set[str] = set()
        """Who gets no letters, though the store answers."""
        self.losing = 0
        self.delay = delay
        self.slots = slots
        self.engines = engines
        self.config = config or SchedulerConfig()
        self.fleet = fleet
        self.quotas = quotas or {}
        self.claims: list[tuple[str, Claim]] = []
        """All that are not over, with the replica of each."""
        self.let_in: dict[Claim, float] = {}
        """When each request heard that it was."""
        self.replicas: dict[str, Replica] = {}
        self.calls: dict[tuple[str, str], Call] = {}
        self.letters = 0
        self.sent_letters: list[Letter] = []
        self._mail: deque[tuple[float, bytes]] = deque()
        self._numbers = Counter[str]()
        self.started = 0
        self._to_write: set[str] = set()

    # -- replicas --

    def start(self, name: str = "") -> str:
        self.started += 1
        name = name or f"r{self.started}"
        member = Member(name, Scheduler(self.config), self.fleet)
        member.claims.quotas.change(self.quotas, self.now)
        self.replicas[name] = Replica(member, self.now)
        for engine in self.engines:
            self.feed(name, EngineUp(engine, make_limits(512, self.slots, caches_prefixes=True)))
        return name

    def kill(self, name: str) -> None:
        """The process ends, and with it its connections to clients and engines."""
        del self.replicas[name]
        self.cut_off.discard(name)
        self.claims = [(of, claim) for of, claim in self.claims if of != name]
        for call in self.calls.values():
            if call.member == name and not call.outcome:
                call.outcome = "killed"

    def pause(self, name: str, *, asking: bool = False) -> None:
        """``asking``: it has just given a sign of life, and reads the answer when it goes on."""
        replica = self.replicas[name]
        replica.paused = True
        if asking:
            replica.answer = self._ask(name), self.now

    def resume(self, name: str) -> None:
        replica = self.replicas[name]
        replica.paused = False
        letters, replica.inbox = replica.inbox, []
        for data in letters:
            self._receive(replica, data)
        if replica.answer is not None:
            (standing, asked_at), replica.answer = replica.answer, None
            self._perform(name, replica.member.on_standing(standing, asked_at, self.now))

    def drain(self, name: str) -> None:
        self.feed(name, DrainStarted())

    def finish(self, name: str) -> None:
        """A drained replica ends, and with it what it has not scheduled."""
        for claim in [claim for of, claim in self.claims if of == name]:
            self.settle(claim)
        self._flush(name)
        assert not any(call.member == name and not call.outcome for call in self.calls.values())
        self.replicas[name].member.leave()
        self._flush(name)
        if self._reaches(name):
            self.register.resign(name)
        del self.replicas[name]
        self.cut_off.discard(name)

    def member(self, name: str) -> Member:
        return self.replicas[name].member

    @property
    def leaders(self) -> list[Member]:
        """Those that would decide now if they were asked."""
        return [
            r.member
            for r in self.replicas.values()
            if r.member.role is Role.LEADER and self.now < r.member._leads_until
        ]

    def running(self, engine: str) -> int:
        return sum(call.engine == engine and not call.outcome for call in self.calls.values())

    def live(self, name: str | None = None) -> dict[tuple[str, str], Call]:
        return {k: c for k, c in self.calls.items() if not c.outcome and name in {None, c.member}}

    # -- clients and engines --

    def claim(self, name: str, prompt_tokens: int | None = None, most: int | None = None, key: str = "k") -> Claim:
        """Claim that a request be let in, and tokens if it asks for some."""
        claims = self.member(name).claims
        claim = claims.begin(key, self.quotas[key], self.now)
        self.claims.append((name, claim))
        if prompt_tokens is not None and claim.refusal is None:
            claims.reserve(claim, prompt_tokens, most, self.now)
        if claim.begun:
            self.let_in.setdefault(claim, self.now)
        self._perform(name, [])
        return claim

    def settle(self, claim: Claim, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """The request of a claim is over."""
        ((name, _),) = [of for of in self.claims if of[1] is claim]
        self.claims.remove((name, claim))
        self.member(name).claims.end(claim, self.now, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        self._perform(name, [])

    def arrive(
        self,
        name: str,
        prompt_tokens: int = 100,
        *,
        may_wait: bool = True,
        sliceable: bool = False,
        claim: Claim | None = None,
    ) -> str:
        self._numbers[name] += 1
        request_id = str(self._numbers[name])
        self.calls[name, request_id] = Call(name)
        request = make_request(request_id, prompt_tokens, may_wait=may_wait, sliceable=sliceable)
        if claim is not None and claim.pending:
            self.member(name).hang(request_id, claim)
        self.feed(name, Arrived(request, self.now))
        return request_id

    def token(self, key: tuple[str, str], chunks: int = 1) -> None:
        self.calls[key].tokens += chunks
        self._perform(key[0], self.member(key[0]).on_tokens(key[1], chunks, self.now) or [])

    def end(self, key: tuple[str, str], outcome: str = "done", served: bool | None = True) -> None:
        """The answer is complete, or the client has left."""
        call = self.calls[key]
        while call.slices:
            self.feed(key[0], SliceEnded(call.slices.pop(), cached=False))
        if call.outcome:
            return  # its refusal came first
        call.outcome = outcome
        self.feed(key[0], Ended(key[1], served=served if call.engine else None))

    def turn_away(self, key: tuple[str, str]) -> None:
        self.calls[key].engine = ""
        self.feed(key[0], NotStarted(key[1], 0.1))

    def end_slice(self, key: tuple[str, str], *, cached: bool = True) -> None:
        self.feed(key[0], SliceEnded(self.calls[key].slices.pop(0), cached))

    def feed(self, name: str, event: object) -> None:
        self._perform(name, self.member(name).handle(event, self.now))  # type: ignore[arg-type]

    def _perform(self, name: str, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Cut):
                continue
            call = self.calls[name, action.request_id]
            assert not call.outcome, f"{action} of a request that is over"
            assert not call.engine, f"{action} of a request that an engine has"
            match action:
                case Dispatch(_, engine):
                    call.engine = engine
                    call.dispatches += 1
                case Slice():
                    call.slices.append(action)
                case Reject(request_id, reason):
                    call.outcome = str(reason)
                    for piece in call.slices:
                        self.feed(name, SliceEnded(piece, cached=False))
                    call.slices.clear()
                    self.feed(name, Ended(request_id))
        answered, self.member(name).claims.answered = self.member(name).claims.answered, []
        for claim in answered:
            if claim.begun:
                self.let_in.setdefault(claim, self.now)
            if claim.refusal is not None and claim.request_id:
                self.end((name, claim.request_id), str(claim.refusal.reason), None)
        self._to_write.add(name)

    # -- the store and the network --

    def flush_store(self) -> None:
        self.register = Register()

    def _reaches(self, name: str) -> bool:
        return self.store_up and name not in self.cut_off

    def _flush(self, name: str) -> None:
        if name not in self.replicas:
            return
        if self.replicas[name].paused:
            self._to_write.add(name)  # when it goes on
            return
        for letter in self.member(name).take_outbox(self.now):
            self.letters += 1
            self.sent_letters.append(letter)
            if not self._reaches(name) or self.losing:
                self.losing = max(0, self.losing - 1)
                continue
            if letter.leads and not self.register.leads(name, letter.epoch, self.now):
                continue
            self._mail.append((self.now + self.delay, encode_letter(letter)))

    def _write(self) -> None:
        """Let all write their letters, once for whatever has happened since the last time."""
        writing, self._to_write = sorted(self._to_write), set()
        for name in writing:
            self._flush(name)

    def beat(self, name: str) -> None:
        replica = self.replicas[name]
        replica.beats_at = self.now + self.fleet.beat_seconds
        member = replica.member
        self._perform(name, member.on_standing(self._ask(name), self.now, self.now))
        if member.resigns and self._reaches(name):
            self._flush(name)
            self.register.resign(name)

    def _ask(self, name: str) -> Standing | None:
        if not self._reaches(name):
            return None
        willing = self.member(name).willing
        return self.register.beat(name, self.fleet.life_seconds, self.now, willing=willing)

    def run(self, seconds: float) -> None:
        """Let time pass with punctual timers, beats and letters."""
        until = self.now + seconds
        while True:
            self._write()
            due = [(r.beats_at, 1, name) for name, r in self.replicas.items() if not r.paused]
            for name, r in self.replicas.items():
                if not r.paused and (at := r.member.next_deadline()) is not None:
                    due.append((max(at, self.now), 2, name))
            if self._mail:
                due.append((self._mail[0][0], 0, ""))
            at, kind, name = min(due, default=(until, 3, ""))
            if at > until:
                break
            self.now = max(self.now, at)
            if kind == 0:
                self._deliver()
            elif kind == 1:
                self.beat(name)
            elif kind == 2:
                self._perform(name, self.member(name).tick(self.now))
            else:
                break
        self.now = until

    def _deliver(self) -> None:
        _, data = self._mail.popleft()
        letter = decode_letter(data)
        replica = self.replicas.get(letter.to)
        if replica is None or letter.to in self.deaf or not self._reaches(letter.to):
            return
        if replica.paused:
            replica.inbox.append(data)
        else:
            self._receive(replica, data)

    def _receive(self, replica: Replica, data: bytes) -> None:
        member = replica.member
        self._perform(member.id, member.receive(decode_letter(data), self.now))
