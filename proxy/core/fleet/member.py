"""One replica of a fleet."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from proxy.core.events import (
    Arrived,
    DrainStarted,
    EngineRemoved,
    EngineReported,
    EngineUp,
    HandedOver,
    Passed,
    TokensProduced,
)
from proxy.core.fleet.claiming import Claiming
from proxy.core.fleet.config import FleetConfig, Role
from proxy.core.fleet.following import Following
from proxy.core.fleet.leading import Leading
from proxy.core.fleet.letters import Call, Leaves

if TYPE_CHECKING:
    from proxy.core.actions import Action
    from proxy.core.claims import Claim
    from proxy.core.events import Event
    from proxy.core.fleet.letters import Letter
    from proxy.core.fleet.register import Standing
    from proxy.core.scheduler import Scheduler

_LEADER = Role.LEADER  # looked up for every token
_SOMEBODY = "somebody"
"""At a roll call: one whom we do not know, and who therefore cannot tell us anything."""


class Member:
    """A scheduler to its shell (``handle``, ``on_tokens``, ``tick``, ``next_deadline``), whoever decides.

    Beside that, the shell gives the store a sign of life every ``beat_seconds`` and says what it answered
    (``on_standing``), hands over letters (``receive``), and sends those that are to go (``take_outbox``), once after
    whatever it has told. ``now`` never decreases from call to call, over all of them.

    ::

        FOLLOWER ──the store gives it the lease──> ROLL_CALL ──all have told, or time is up──> LEADER
         ^ │ ^                                      ^  │                                          │
         │ │ └────────another has the lease, or its own is over, by its own clock────────────────┘
         │ └─the store does not answer, or the leader──> LOCAL <──the store does not answer── (ROLL_CALL, LEADER)
         └───────────the leader calls─────────────────────┘└──the store gives it the lease──> ROLL_CALL
    """

    def __init__(self, replica_id: str, scheduler: Scheduler, config: FleetConfig | None = None) -> None:
        """``replica_id`` must never have been used before: a process that starts anew is another replica.

        ``scheduler`` must be fresh. It is nobody else's to call; to look at, it has this replica's running requests,
        and those of all replicas while this one leads.
        """
        self.id = replica_id
        self.scheduler = scheduler
        self.config = config or FleetConfig()
        self.role = Role.FOLLOWER
        self.leader = ""
        """Id of the replica that leads, as far as is known; empty: nobody."""
        self.epoch = 0
        self.lost_letters = 0
        """How often a letter to this replica was missed."""
        self.resigns = False
        """Whether it leads no more although it has the lease, as it drains: the shell is to give that back now."""
        self.claims = Claiming(self._decides)
        """Those of this replica's requests on the quotas of API keys."""
        self._following = Following(replica_id, scheduler, self.claims)
        self._leading = Leading(replica_id, 0, scheduler, self.claims.quotas)
        self._engines: dict[str, EngineUp] = {}  # what the shell told last of each
        self._seen: dict[str, float] = {}  # when each replica was last known to live
        self._answered_at = -inf  # when the store answered last
        self._unknown_until = -inf  # until then somebody may lead of whom neither we nor the store have heard
        self._leads_until = 0.0
        self._others_lead_until = 0.0  # at the earliest
        self._failing_since: float | None = None  # the store does not answer
        self._parting = ""  # who has given up the lead, and has requests in flight
        self._expected: set[str] = set()  # at a roll call: who has not told yet
        self._roll_call_ends_at = 0.0
        self._own_letters: list[Letter] = []  # of no session
        self._epoch_at = -inf  # when we learnt of the epoch

    def __repr__(self) -> str:
        return f"<Member {self.id}, {self.role} in epoch {self.epoch} of {self.leader or 'nobody'}>"

    @property
    def willing(self) -> bool:
        """Whether it would lead: to be told to the store with each sign of life. Not so while it drains."""
        return not self.scheduler.draining

    @property
    def replicas(self) -> int:
        """How many replicas there are, as far as is known, with this one."""
        return max(1, len(self._seen.keys() | {self.id}))

    def decides(self, now: float) -> bool:
        """Whether what it is told now is decided on at once, and not by another one later."""
        return self._decides(now)

    def hang(self, request_id: str, claim: Claim) -> None:
        """Let a request that is about to come go on only if its claim is granted, of which it is not known yet."""
        self._following.hang(request_id, claim)

    # -- a scheduler --

    def handle(self, event: Event, now: float) -> list[Action]:
        """As ``Scheduler.handle``; what is done about it may also come later, from other calls."""
        match event:
            case TokensProduced(request_id, chunks):
                return self.on_tokens(request_id, chunks, now) or []
            case Passed(engine_id, begins):
                self._following.passing[engine_id] += 1 if begins else -1
            case EngineUp():
                return self._engine_up(event, now)
            case EngineReported() if self.role is Role.LOCAL:
                return []  # what the others have there is no part of our share
            case EngineRemoved(engine_id):
                self._engines.pop(engine_id, None)
            case DrainStarted():
                return self._drain(event, now)
        if self._decides(now):
            return self._leading.route(self.scheduler.handle(event, now))
        return self._following.handle(event, now)

    def on_tokens(self, request_id: str, chunks: int, now: float) -> list[Action] | None:
        """As ``Scheduler.on_tokens``."""
        if self._decides(now):
            actions = self.scheduler.on_tokens(request_id, chunks, now)
            return self._leading.route(actions) if actions else actions
        self._following.on_tokens(request_id, chunks, now)
        return None

    def tick(self, now: float) -> list[Action]:
        """As ``Scheduler.tick``."""
        self._decides(now)
        if self.role is Role.ROLL_CALL and now >= self._roll_call_ends_at:
            return self._begin(now)
        return self._leading.route(self.scheduler.tick(now))

    def next_deadline(self) -> float | None:
        """As ``Scheduler.next_deadline``."""
        due = self.scheduler.next_deadline()
        if self.role is not Role.ROLL_CALL:
            return due
        return self._roll_call_ends_at if due is None else min(due, self._roll_call_ends_at)

    # -- a replica --

    def on_standing(self, standing: Standing | None, sent_at: float, now: float) -> list[Action]:
        """Take in what the store answered to the sign of life sent at ``sent_at``; ``None``: nothing, or an error."""
        self._decides(now)
        if standing is None:
            if self._failing_since is None:
                self._failing_since = now
            patient = now < self._failing_since + self.config.patience_seconds
            return [] if patient or self.role is Role.LOCAL else self._go_local(now)
        self._failing_since = None
        if standing.epoch < self.epoch and sent_at <= self._epoch_at:
            return []  # late; but a store may have lost its memory, and its clock be behind that of the one before
        known = set(self._seen)
        if now >= self._answered_at + self.config.life_seconds:  # somebody may have come since
            self._unknown_until = sent_at + self.config.life_seconds - standing.memory_seconds
        if now < self._unknown_until:
            known.add(_SOMEBODY)
        self._seen |= dict.fromkeys(standing.members, now)
        long_ago = now - 2 * self.config.life_seconds
        self._seen = {replica: at for replica, at in self._seen.items() if at > long_ago}
        self._answered_at = now
        self.resigns = standing.leader == self.id and not self.willing
        if standing.leader == self.id and self.willing:
            return self._on_lease(standing, sent_at, now, known)
        if self.role in {Role.LEADER, Role.ROLL_CALL}:
            self._step_down(now)
        if standing.leader and standing.leader != self.id:
            self._others_lead_until = now + standing.valid_seconds
        return self._on_leader("" if standing.leader == self.id else standing.leader, standing.epoch, now)

    def receive(self, letter: Letter, now: float) -> list[Action]:
        """Take in a letter to this replica; of one sender they must come in the order in which they were sent."""
        self._decides(now)
        if letter.to != self.id or letter.epoch < self.epoch:
            return []
        if letter.leads:
            return self._on_order(letter, now)
        if letter.epoch != self.epoch or self.role not in {Role.LEADER, Role.ROLL_CALL}:
            return []
        self._seen[letter.sender] = now
        lost = self._leading.lost_letters
        actions = self._leading.take(letter, now)
        self.lost_letters += self._leading.lost_letters - lost
        if self.role is Role.ROLL_CALL:
            self._expected -= {letter.sender} & self._leading.told
            if not self._expected:
                actions += self._begin(now)
        return actions

    @property
    def has_mail(self) -> bool:
        """Whether ``take_outbox`` would give something."""
        return self._following.has_mail or self._leading.has_mail or bool(self._own_letters)

    def take_outbox(self, now: float) -> list[Letter]:
        """Return the letters that are to be sent now, in this order."""
        self._decides(now)
        found, self._own_letters = [*self._own_letters, *self._leading.write(), *self._following.write()], []
        return found

    def leave(self) -> None:
        """Tell the leader, by a last letter, that this replica ends and has nothing any more."""
        self._following.leave()

    # -- who decides --

    def _decides(self, now: float) -> bool:
        """Whether this replica decides now; asked before every decision, as its lease may be over at any time."""
        role = self.role
        if role is _LEADER and now < self._leads_until:
            return True
        if role is Role.FOLLOWER or role is Role.LOCAL:
            return role is Role.LOCAL
        if now >= self._leads_until:
            self._step_down(now)
        return False

    def _on_lease(self, standing: Standing, sent_at: float, now: float, known: set[str]) -> list[Action]:
        """The store lets us lead, until a time that we count from when we asked.

        ``known``: the replicas of which we knew before.
        """
        leads_until = sent_at + standing.valid_seconds
        if now >= leads_until:
            return []  # it took so long to tell that it is over
        if self.epoch == standing.epoch and self.role in {Role.LEADER, Role.ROLL_CALL}:
            self._leads_until = max(self._leads_until, leads_until)
            self._leading.on_beat(now)
            if self.role is Role.ROLL_CALL:
                return []
            actions: list[Action] = []
            for follower in list(self._leading.followers.values()):
                long_ago = now - follower.heard_at > self.config.life_seconds
                if long_ago and follower.id not in standing.members:
                    actions += self._leading.drop(follower.id, now)
            return actions
        unknown_until = sent_at + self.config.life_seconds - standing.memory_seconds
        if self.role is Role.LOCAL and now < unknown_until:
            self._learn("", standing.epoch, now)
            return []  # whoever still leads, as far as the store has forgotten, may do so: we go on as we are
        return self._take_lead(standing, leads_until, unknown_until, now, known)

    def _take_lead(
        self, standing: Standing, leads_until: float, unknown_until: float, now: float, known: set[str]
    ) -> list[Action]:
        """Begin a roll call.

        Usually the lease was free because its holder is gone. But if the store has lost its memory, somebody may lead
        of whom it does not know, until ``unknown_until``: one of the ``known`` who has not told us anything, if we have
        been told lately who there is.
        """
        before, was_local = self.leader, self.role is Role.LOCAL
        ends_at = now + self.config.roll_call_seconds
        expected = {*standing.members, self._parting}
        if self.role is Role.ROLL_CALL:  # it has lost its memory again: who was waited for then may lead as well
            expected |= self._expected
            ends_at = max(ends_at, self._roll_call_ends_at)
        self._stop(now)
        if now < unknown_until:
            expected |= known
            ends_at = max(ends_at, unknown_until)
        elif was_local:
            expected |= known - {_SOMEBODY}  # they decide on their own
        if before not in {"", self.id} and now < self._others_lead_until:
            expected |= known - {_SOMEBODY}  # a store that has failed over: it may have lost the last that it was told
            ends_at = max(ends_at, now + self.config.life_seconds)
        self._parting = ""
        self.role = Role.ROLL_CALL
        self._learn(self.id, standing.epoch, now)
        self._leads_until, self._roll_call_ends_at = leads_until, ends_at
        self._leading = Leading(self.id, standing.epoch, self.scheduler, self.claims.quotas)
        self._expected = expected - {self.id, ""}
        for replica in sorted(self._expected - {_SOMEBODY}):
            self._leading.call(replica, now)
        return [] if self._expected else self._begin(now)

    def _begin(self, now: float) -> list[Action]:
        """End the roll call, and decide from now on."""
        self.role = Role.LEADER
        self._expected.clear()
        self._believe(1, now)
        self._leading.hold(now)
        own = self._following.set_aside(self.claims.decide(1, now))
        return self._leading.begin(own.values(), now)

    def _on_leader(self, leader: str, epoch: int, now: float) -> list[Action]:
        """The store says who leads, another or nobody."""
        following = self._following
        if self.role is Role.LOCAL:
            self._learn(leader, epoch, now)
            if leader:
                self._own_letters = [self._following.knock(leader, epoch)]
            return []
        if (leader, epoch) != (self.leader, self.epoch):
            self._follow(leader, epoch, now)
        else:
            following.on_beat()
        if following.unheard_beats >= self.config.silent_beats:
            return self._go_local(now)
        return []

    def _on_order(self, letter: Letter, now: float) -> list[Action]:
        """A letter of a leader, whose epoch is no older than what we know."""
        following = self._following
        called = any(isinstance(note, Call) for note in letter.notes)
        if letter.epoch > self.epoch or letter.sender != self.leader or self.role is Role.LOCAL:
            if called:
                self._stop(now)
                self.role = Role.FOLLOWER
                self._follow(letter.sender, letter.epoch, now)
            return []
        line = following.line
        if line is None or letter.session != line.session:
            return []
        if called:
            following.announce(self.leader, self.epoch, now)
            return []
        if letter.number > line.heard:
            following.acknowledged(letter.heard)  # that is so whatever was lost before
        if not line.takes(letter):
            if letter.number > line.heard:
                self.lost_letters += 1
                following.announce(self.leader, self.epoch, now)
            return []
        actions = following.obey(letter.notes, now)
        if (parting := next((note for note in letter.notes if isinstance(note, Leaves)), None)) is not None:
            self._follow("", self.epoch, now)
            self._others_lead_until = now
            self._parting = letter.sender if parting.remains else ""
        return actions

    def _follow(self, leader: str, epoch: int, now: float) -> None:
        self._learn(leader, epoch, now)
        if leader:
            self._following.unheard_beats = 0
            self._following.announce(leader, epoch, now)
        else:
            self._following.hang_up()

    def _learn(self, leader: str, epoch: int, now: float) -> None:
        if epoch != self.epoch:
            self._epoch_at = now
        self.leader, self.epoch = leader, epoch

    def _go_local(self, now: float) -> list[Action]:
        """Decide on our own requests alone, with our part of each engine."""
        self._stop(now)
        self.role = Role.LOCAL
        self._believe(self.replicas, now)
        own = self._following.set_aside(self.claims.decide(self.replicas, now))
        self._following.unheard_beats = 0
        return self.scheduler.handle(HandedOver(waiting=tuple(own.values())), now)

    def _step_down(self, now: float) -> None:
        """Lead no more, and follow nobody until somebody leads."""
        self._stop(now)
        self.role, self.leader = Role.FOLLOWER, ""

    def _stop(self, now: float) -> None:
        """Decide no more: what is not our own is given up, and our own waiting requests are set aside."""
        if self.role in {Role.LEADER, Role.LOCAL}:
            own = {
                request_id: Arrived(replace(entry.waiting.request, sliceable=entry.sliceable), entry.waiting.arrived_at)
                for request_id, entry in self.scheduler.ledger.entries.items()
                if self._leading.owns(request_id) and (entry.engine is None or entry.sliced)
            }
            self._leading.end(own, now)
            self.claims.stop(now, alone=self.role is Role.LOCAL)
            self._following.waiting |= own
            if self.role is Role.LOCAL:
                self._believe(1, now)
        self._leading = Leading(self.id, 0, self.scheduler, self.claims.quotas)
        self._following.hang_up()

    # -- engines --

    def _engine_up(self, event: EngineUp, now: float) -> list[Action]:
        is_new = event.engine_id not in self.scheduler.ledger.engines
        self._engines[event.engine_id] = replace(event, learnt=None, delay=None)
        parts = self.replicas if self.role is Role.LOCAL else 1
        decides = self._decides(now)
        actions = self.scheduler.handle(replace(event, limits=event.limits.part(parts)), now)
        if not decides:
            return actions
        if is_new:
            self._leading.call_all(now)
        return self._leading.route(actions)

    def _believe(self, parts: int, now: float) -> None:
        """Have a part of each engine, one of ``parts``, and the leader's knowledge of it; while nothing waits.

        What the engines report of requests that are not ours is forgotten: they are another's no more, or never ours.
        """
        for engine in self.scheduler.engines:
            if not engine.up or engine.leaving:
                continue
            learnt = self._following.learnt.pop(engine.id, None)
            told = self._engines[engine.id]
            event = replace(told, limits=told.limits.part(parts))
            if learnt is not None:
                event = replace(event, learnt=learnt.steps, delay=learnt.delay)
            self.scheduler.handle(event, now)
            self.scheduler.handle(EngineReported(engine.id, None), now)

    def _drain(self, event: DrainStarted, now: float) -> list[Action]:
        if self.role is Role.LOCAL:
            return self.scheduler.handle(event, now)
        if self.role in {Role.LEADER, Role.ROLL_CALL}:
            self._own_letters = self._leading.part(now, holds_claims=self.claims.holds)
            self._step_down(now)
            self.resigns = True
        self.scheduler.handle(event, now)
        return self._following.refuse_all(now)
