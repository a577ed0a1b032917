"""What the leader does about the requests of the other replicas: they are in its own scheduler, beside its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from proxy.core.actions import Cut, Dispatch, Reject, Slice
from proxy.core.events import Arrived, Ended, HandedOver, InFlight, NotStarted, Passed, SliceEnded, Tokenized
from proxy.core.fleet import letters
from proxy.core.fleet.claiming import spent_of
from proxy.core.fleet.judging import Judging
from proxy.core.fleet.line import Line
from proxy.core.fleet.roll import Roll
from proxy.core.quota import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from proxy.core.actions import Action
    from proxy.core.claims import Quotas
    from proxy.core.events import Event
    from proxy.core.fleet.letters import Letter, Note
    from proxy.core.fleet.roll import Held
    from proxy.core.scheduler import Scheduler

_LEARNT_BEATS = 20
"""Between two accounts of what was learnt of the engines."""


class Follower:
    """Another replica, as the leader knows it."""

    def __init__(self, replica: str, line: Line, claims: Judging, now: float) -> None:
        self.id = replica
        self.line = line
        self.claims = claims
        self.heard_at = now
        self.calls: int | None = None
        """The session that it is to be called out of, if it is to announce itself anew."""
        self.roll: Roll | None = None
        """What it has, until that is taken over."""
        self.names: dict[str, str] = {}
        """Of its requests, in our scheduler; by its own id."""
        self.pieces: dict[int, Slice] = {}
        """Its slices in flight, by their number."""
        self.passing: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Follower {self.id} with {len(self.names)} requests>"


class Leading:
    """The lead of one epoch; nothing is decided before ``begin``."""

    def __init__(self, me: str, epoch: int, scheduler: Scheduler, quotas: Quotas) -> None:
        self.epoch = epoch
        self.followers: dict[str, Follower] = {}
        self.begun = False
        self.lost_letters = 0
        self.has_mail = False
        """Whether ``write`` would give something."""
        self._me = me
        self._scheduler = scheduler
        self._quotas = quotas
        self._whose: dict[str, tuple[Follower, str]] = {}  # by the name in our scheduler: replica, its own id
        self._beats = 0

    @property
    def told(self) -> set[str]:
        """The replicas that have told all that they have, before ``begin``."""
        return {follower.id for follower, _ in self._rolls()}

    def owns(self, request_id: str) -> bool:
        """Whether a request in our scheduler is this replica's own."""
        return request_id not in self._whose

    # -- letters --

    def call(self, replica: str, now: float, session: int = 0) -> None:
        """Have a replica announce itself."""
        self._follower(replica, now).calls = session
        self.has_mail = True

    def call_all(self, now: float) -> None:
        """Have all announce themselves anew, as there is an engine that was not known before."""
        for follower in self.followers.values():
            self.call(follower.id, now, follower.line.session)

    def on_beat(self, now: float) -> None:
        """Let every replica have a letter, with what it would have to know: from time to time all that was learnt."""
        self._beats += 1
        self._tell_spent(now)
        for follower in self.followers.values():
            follower.line.due = follower.line.session > 0
            self.has_mail |= follower.line.due
        if self._beats % _LEARNT_BEATS == 1:
            for engine in self._scheduler.engines:
                learnt = letters.Learnt(engine.id, engine.model.snapshot(), engine.delay.snapshot())
                for follower in self.followers.values():
                    if follower.line.session:
                        self._tell(follower, learnt)

    def write(self) -> Iterator[Letter]:
        """Give the letters that are to go now."""
        self.has_mail = False
        for follower in self.followers.values():
            if follower.calls is not None:
                yield follower.line.letter(follower.calls, 0, (letters.Call(),))
                follower.calls = None
            yield from follower.line.write()

    def part(self, now: float, *, holds_claims: bool) -> list[Letter]:
        """Return the last letters of this lead: it is given up."""
        self._tell_spent(now)
        remains = holds_claims or any(
            self.owns(i) and of.engine is not None for i, of in self._scheduler.ledger.entries.items()
        )
        for follower in self.followers.values():
            if follower.line.session:
                self._tell(follower, letters.Leaves(remains))
        return list(self.write())

    def take(self, letter: Letter, now: float) -> list[Action]:
        """Take in a follower's letter."""
        follower = self._follower(letter.sender, now)
        follower.heard_at = now
        line = follower.line
        if letter.session < line.session and letter.number:
            return []  # it has begun another since
        first = letter.notes[0] if letter.notes else None
        if letter.session > line.session and letter.number == 1 and isinstance(first, letters.Announced):
            line = follower.line = self._line(letter.sender, letter.session)
            follower.calls = None
        elif letter.session != line.session or line.heard == 0:
            self.call(letter.sender, now, letter.session)  # it thinks that we know it
            return []
        if not line.takes(letter):
            if letter.number > line.heard:
                self.lost_letters += 1
                self.call(letter.sender, now, letter.session)
            return []
        actions: list[Action] = []
        for note in letter.notes:
            actions += self._take(follower, note, now)
        return actions

    def route(self, actions: list[Action]) -> list[Action]:
        """Tell the others what is theirs of ``actions``, and return what is our own."""
        if not self._whose or not actions:
            return actions
        own: list[Action] = []
        for action in actions:
            if (whose := self._whose.get(action.request_id)) is None:
                own.append(action)
                continue
            follower, request_id = whose
            match action:
                case Dispatch(_, engine_id):
                    note: Note = letters.Send(request_id, engine_id)
                case Slice(_, engine_id, tokens, held_tokens, number):
                    follower.pieces[number] = action
                    note = letters.SendSlice(request_id, engine_id, tokens, held_tokens, number)
                case Reject(name, reason, retry_after, estimated_wait):
                    del self._whose[name], follower.names[request_id]
                    note = letters.Refuse(request_id, reason, retry_after, estimated_wait)
                case Cut():
                    continue  # every replica cuts its own: it knows of its engines as we do
            self._tell(follower, note)
        return own

    # -- begin and end --

    def hold(self, now: float) -> None:
        """Count what was granted to the requests of all: before anything else is, to anybody."""
        rolls = list(self._rolls())
        for _, roll in rolls:
            self._learn(roll, now)
        for follower, roll in rolls:
            self._hold(follower, roll, now)

    def begin(self, own: Iterable[Arrived], now: float) -> list[Action]:
        """Take over what all have told and ``own`` waiting requests, and decide from now on."""
        self.begun = True
        in_flight: list[InFlight] = []
        waiting = list(own)
        for follower, roll in self._rolls():
            self._settle({}, roll.passing, {}, now)
            follower.passing = roll.passing
            _, of_engines, of_queue = self._enter(follower, roll, now)
            in_flight += of_engines
            waiting += of_queue
        return self._hand_over((), in_flight, waiting, now)

    def end(self, own: Iterable[str], now: float) -> None:
        """Decide no more: give up the requests of all others, and our ``own`` waiting ones."""
        gone = *self._whose, *own
        self._whose.clear()
        self._scheduler.handle(HandedOver(gone=gone), now)
        for follower in self.followers.values():
            if self.begun:
                self._settle(follower.pieces, {}, follower.passing, now)
        self.followers.clear()

    def drop(self, replica: str, now: float) -> list[Action]:
        """Forget a replica that is gone, with all that it had."""
        follower = self.followers.pop(replica)
        gone = tuple(follower.names.values())
        for name in gone:
            del self._whose[name]
        if not self.begun:
            return []
        follower.claims.drop(now)
        actions = self._feed(HandedOver(gone=gone), now)
        return actions + self._settle(follower.pieces, {}, follower.passing, now)

    # -- --

    def _rolls(self) -> Iterator[tuple[Follower, Roll]]:
        """Those who have told all that they have. Who is in the midst of it is taken over when that is done."""
        for follower in self.followers.values():
            if follower.roll is not None and follower.roll.complete:
                yield follower, follower.roll

    def _tell(self, follower: Follower, note: Note) -> None:
        follower.line.notes.append(note)
        self.has_mail = True

    def _tell_spent(self, now: float) -> None:
        if spent := self._quotas.known(now):
            for follower in self.followers.values():
                if follower.line.session:
                    self._tell(follower, spent_of(spent))

    def _learn(self, roll: Roll, now: float) -> None:
        for key, (requests, tokens, usual_output) in roll.spent.items():
            self._quotas.learn(key, Usage(requests, tokens), usual_output, now, at_least=True)

    def _hold(self, follower: Follower, roll: Roll, now: float) -> None:
        for key, (requests, tokens) in roll.owed.items():
            self._quotas.add(key, Usage(requests, tokens), now)
        follower.claims.replace(roll.claims, now)

    def _follower(self, replica: str, now: float) -> Follower:
        follower = self.followers.get(replica)
        if follower is None:
            follower = Follower(replica, self._line(replica, 0), Judging(self._quotas), now)
            self.followers[replica] = follower
        return follower

    def _line(self, replica: str, session: int) -> Line:
        return Line(self._me, replica, self.epoch, leads=True, session=session)

    def _take(self, follower: Follower, note: Note, now: float) -> list[Action]:
        if isinstance(note, letters.Leaves):
            return self.drop(follower.id, now) if follower.id in self.followers else []
        if isinstance(note, letters.Announced):
            if follower.line.heard == 1:
                follower.roll = Roll()
            if follower.roll is None:
                return []
            follower.roll.announce(note, now)
            if note.more:
                return []
            self._tell(follower, letters.Welcome())
            if spent := self._quotas.known(now, all_keys=True):
                self._tell(follower, spent_of(spent))
            return self._replace(follower, follower.roll, now) if self.begun else []
        if follower.roll is not None:
            follower.roll.take(note, now)
            return []
        return self._follow(follower, note, now)

    def _follow(self, follower: Follower, note: Note, now: float) -> list[Action]:
        names = follower.names
        match note:
            case letters.Produced(chunks):
                actions: list[Action] = []
                for request_id, count in chunks.items():
                    if known := names.get(request_id, ""):
                        actions += self._scheduler.on_tokens(known, count, now) or []
                return self.route(actions)
            case letters.Waits(request, age_seconds, claim):
                if request.id in names or not follower.claims.lets(claim):
                    return []
                name = self._name(follower, request.id)
                return self._feed(Arrived(replace(request, id=name), now - age_seconds), now)
            case letters.Over(request_id, tokens, cached_tokens, served):
                if request_id in names:
                    name = names.pop(request_id)
                    del self._whose[name]
                    return self._feed(Ended(name, tokens, cached_tokens, served), now)
            case letters.TurnedAway(request_id, back_off_seconds):
                if name := names.get(request_id, ""):
                    return self._feed(NotStarted(name, back_off_seconds), now)
            case letters.Counted(request_id, prompt_tokens):
                if name := names.get(request_id, ""):
                    return self._feed(Tokenized(name, prompt_tokens), now)
            case letters.SliceOver(_, number, cached, found_tokens):
                if (piece := follower.pieces.pop(number, None)) is not None:
                    return self._feed(SliceEnded(piece, cached, found_tokens), now)
            case letters.Claims() | letters.Reserves() | letters.Settles():
                if (answer := follower.claims.take(note, now)) is not None:
                    self._tell(follower, answer)
            case letters.Passing(engine_id, begins):
                follower.passing[engine_id] += 1 if begins else -1
                return self._feed(Passed(engine_id, begins), now)
        return []

    def _feed(self, event: Event, now: float) -> list[Action]:
        return self.route(self._scheduler.handle(event, now))

    def _name(self, follower: Follower, request_id: str) -> str:
        name = follower.names[request_id] = f"{follower.id}/{request_id}"
        self._whose[name] = follower, request_id
        return name

    def _replace(self, follower: Follower, roll: Roll, now: float) -> list[Action]:
        """Put what a follower has told in the place of what was known; what has not changed keeps its place."""
        self._learn(roll, now)
        self._hold(follower, roll, now)
        pieces, passing = follower.pieces, follower.passing
        follower.pieces, follower.passing = {}, roll.passing
        actions = self._hand_over(*self._enter(follower, roll, now), now)
        return actions + self._settle(pieces, roll.passing, passing, now)

    def _enter(self, follower: Follower, roll: Roll, now: float) -> tuple[list[str], list[InFlight], list[Arrived]]:
        """Name what a follower has, and tell what of that is gone, or new, since it was last known."""
        answers = follower.claims.judge(now)
        answers += filter(None, [follower.claims.take(note, now) for note in roll.claim_notes])
        for answer in answers:
            self._tell(follower, answer)
        gone: list[str] = []
        in_flight: list[InFlight] = []
        waiting: list[Arrived] = []
        for request_id, name in list(follower.names.items()):
            if request_id not in roll.held:
                del follower.names[request_id], self._whose[name]
                gone.append(name)
        for request_id, of in roll.held.items():
            known = request_id in follower.names
            if not follower.claims.lets(of.claim):
                continue
            name = self._name(follower, request_id)
            if known and self._is_as_known(name, of):
                continue
            if known:
                gone.append(name)
            request = replace(of.request, id=name)
            if of.engine_id:
                in_flight.append(InFlight(request, of.engine_id, of.arrived_at, of.tokens))
            else:
                waiting.append(Arrived(request, of.arrived_at))
        follower.roll = None
        return gone, in_flight, waiting

    def _is_as_known(self, name: str, of: Held) -> bool:
        entry = self._scheduler.ledger.entries.get(name)
        if entry is None or entry.waiting.request.prompt_tokens != of.request.prompt_tokens:
            return False
        if entry.engine is None:
            return not of.engine_id
        tokens = max(0, entry.engine.context_tokens(name) - of.request.prompt_tokens)
        return not entry.sliced and (entry.engine.id, tokens) == (of.engine_id, of.tokens)

    def _hand_over(
        self, gone: Iterable[str], in_flight: Iterable[InFlight], waiting: Iterable[Arrived], now: float
    ) -> list[Action]:
        event = HandedOver(tuple(gone), tuple(in_flight), tuple(waiting))
        actions = self.route(self._scheduler.handle(event, now))
        for of in event.in_flight:  # those at engines that are not known here
            if of.request.id not in self._scheduler.ledger.entries and of.request.id in self._whose:
                follower, request_id = self._whose.pop(of.request.id)
                del follower.names[request_id]
        return actions

    def _settle(
        self, pieces: Mapping[int, Slice], passing: Mapping[str, int], passed: Mapping[str, int], now: float
    ) -> list[Action]:
        """Let slices end here, whatever becomes of them there, and count what is now given past the queue, not before.

        After hands have changed: what this sets free is for whoever is next then.
        """
        actions: list[Action] = []
        for piece in pieces.values():
            actions += self._feed(SliceEnded(piece, cached=False), now)
        for engine_id in {**passing, **passed}:
            more = passing.get(engine_id, 0) - passed.get(engine_id, 0)
            for _ in range(abs(more)):
                actions += self._feed(Passed(engine_id, begins=more > 0), now)
        return actions
