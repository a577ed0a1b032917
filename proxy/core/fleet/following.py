"""A replica's own requests while another one decides on them, or nobody.

Those that wait are kept here. Those that an engine has are in the replica's own scheduler, which so knows its engines'
steps as far as they concern it; nothing waits there, so it decides nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from proxy.core.actions import Dispatch, Reject, Slice
from proxy.core.events import (
    Arrived,
    Ended,
    HandedOver,
    InFlight,
    NotStarted,
    Passed,
    SliceEnded,
    Tokenized,
)
from proxy.core.fleet import letters
from proxy.core.fleet.line import Line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from proxy.core.actions import Action
    from proxy.core.claims import Claim
    from proxy.core.events import Event
    from proxy.core.fleet.claiming import Claiming
    from proxy.core.fleet.letters import Letter, Note
    from proxy.core.scheduler import Scheduler

_MOST_ANNOUNCED = 500
"""Requests in one letter: some hundred kilobytes."""


class Following:
    """See the module's docstring."""

    def __init__(self, me: str, scheduler: Scheduler, claims: Claiming) -> None:
        self.waiting: dict[str, Arrived] = {}
        """By request id; each with the time of its arrival."""
        self.line: Line | None = None
        """To the leader, once it has been told what there is."""
        self.unheard_beats = 0
        """Signs of life that the store has answered since the leader was last known to hear us."""
        self.learnt: dict[str, letters.Learnt] = {}
        """What the leader has told of each engine."""
        self.passing: Counter[str] = Counter()
        """Requests that were given past the queue and are not over, by engine."""
        self.has_mail = False
        """Whether ``write`` would give something."""
        self._me = me
        self._scheduler = scheduler
        self._claims = claims
        claims.tell = self._tell
        self._hanging: dict[str, Claim] = {}  # by the id of the request that waits for what becomes of it, too
        self._sessions = 0
        self._announced = 0  # of what is to be told, the first so many announce what there is
        self._chunks: dict[str, int] = {}  # that came since the last letter
        self._told_in = 0  # number of the letter that ends the announcement; 0: not written, or heard
        self._asked_at = 0  # number of the letter that the leader is waited for to acknowledge
        self._slices: dict[int, tuple[int, int]] = {}  # our number of a slice in flight: session, leader's number
        self._slice_number = 0

    # -- the session --

    def announce(self, leader: str, epoch: int, now: float) -> None:
        """Begin a session with the leader: tell all that there is."""
        self._sessions += 1
        self.line = Line(self._me, leader, epoch, leads=False, session=self._sessions)
        self._chunks.clear()
        self._told_in, self._asked_at = 0, 1
        waits = [self._waits(of, now) for of in self.waiting.values()]
        claims = self._claims.announced()
        runs = [
            letters.Runs(
                entry.waiting.request,
                now - entry.waiting.arrived_at,
                entry.engine.id,
                max(0, entry.engine.context_tokens(request_id) - entry.waiting.request.prompt_tokens),
            )
            for request_id, entry in self._scheduler.ledger.entries.items()
            if entry.engine is not None
        ]
        while claims and len(claims) + len(waits) + len(runs) > _MOST_ANNOUNCED:
            told, claims = claims[:_MOST_ANNOUNCED], claims[_MOST_ANNOUNCED:]
            self._tell(letters.Announced((), (), {}, more=True, claims=tuple(told)))
        while len(waits) + len(runs) > _MOST_ANNOUNCED:
            part, waits = waits[:_MOST_ANNOUNCED], waits[_MOST_ANNOUNCED:]
            left = _MOST_ANNOUNCED - len(part)
            self._tell(letters.Announced(tuple(part), tuple(runs[:left]), {}, more=True))
            runs = runs[left:]
        passing, owed, spent = dict(+self.passing), self._claims.owed, self._claims.spent(epoch, now)
        self._tell(letters.Announced(tuple(waits), tuple(runs), passing, claims=tuple(claims), owed=owed, spent=spent))
        self._announced = len(self.line.notes)
        for note in self._claims.ends():
            self._tell(note)

    def hang_up(self) -> None:
        """End the session: the leader is gone, or cannot be heard."""
        self.line, self.has_mail = None, False
        self._chunks.clear()

    def knock(self, leader: str, epoch: int) -> Letter:
        """Return a letter that makes the leader call, if it can hear us."""
        return Line(self._me, leader, epoch, leads=False, session=0).letter(0, 0)

    def on_beat(self) -> None:
        """The store has answered: let the leader have a letter, whose answer tells that it lives."""
        if self.line is not None and self.line.acknowledged >= self._asked_at:
            self.unheard_beats, self._asked_at = 0, self.line.sent + 1
        else:
            self.unheard_beats += 1
        if self.line is not None:
            self.line.due = self.has_mail = True

    def write(self) -> Iterator[Letter]:
        """Give the letters that are to go now."""
        self.has_mail = False
        if self.line is None:
            return
        if self._chunks and (self.line.notes or self.line.due):
            # Before anything else that happened to the same requests, and after what they had before.
            self.line.notes.insert(self._announced, letters.Produced(self._chunks))
            self._chunks = {}
        announced, self._announced = self._announced, 0
        yield from self.line.write()
        self._claims.sent(self.line.sent)
        if announced:
            self._told_in = self.line.sent

    def acknowledged(self, number: int) -> None:
        """The leader has heard our letters up to this one."""
        self._claims.heard(number)
        if self.line is not None and 0 < self._told_in <= number:
            self._told_in = 0
            self._claims.welcome(self.line.epoch)

    # -- what happens here --

    def hang(self, request_id: str, claim: Claim) -> None:
        """Let a request that is about to come go on only if its claim is granted."""
        claim.request_id = request_id
        self._hanging[request_id] = claim

    def set_aside(self, stopped: Iterable[str] = ()) -> dict[str, Arrived]:
        """Return those that wait, but for the ``stopped``, to be decided on here; all claims have been judged."""
        found, self.waiting = self.waiting, {}
        self._hanging.clear()
        for request_id in stopped:
            found.pop(request_id, None)
        return found

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in an event that concerns a request of ours, or what is given past the queue.

        Raises:
            ValueError: an ``Arrived`` whose request id is in use.
        """
        match event:
            case Arrived(request, arrived_at):
                if request.id in self.waiting or request.id in self._scheduler.ledger.entries:
                    raise ValueError(f"request id {request.id!r} is in use")
                if self._scheduler.draining:
                    return self._scheduler.handle(event, now)
                self._wait(Arrived(request, now if arrived_at is None else arrived_at), now)
            case Ended(request_id, tokens, cached_tokens, served):
                self._hanging.pop(request_id, None)
                if self.waiting.pop(request_id, None) is None:
                    if request_id not in self._scheduler.ledger.entries:
                        return []
                    self._scheduler.handle(event, now)
                self._tell(letters.Over(request_id, tokens, cached_tokens, served))
            case NotStarted(request_id, back_off_seconds):
                return self._take_back(request_id, back_off_seconds, now)
            case Tokenized(request_id, prompt_tokens):
                if (known := self.waiting.get(request_id)) is not None:
                    request = replace(known.request, prompt_tokens=prompt_tokens, sliceable=True)
                    self.waiting[request_id] = Arrived(request, known.arrived_at)
                    self._tell(letters.Counted(request_id, prompt_tokens))
            case SliceEnded(piece, cached, found_tokens):
                self._scheduler.handle(event, now)  # how well the engine keeps what slices bring
                session, number = self._slices.pop(piece.number, (0, 0))
                if self.line is not None and session == self.line.session:
                    self._tell(letters.SliceOver(piece.request_id, number, cached, found_tokens))
            case Passed(engine_id, begins):
                self._scheduler.handle(event, now)
                self._tell(letters.Passing(engine_id, begins))
            case _:
                return self._scheduler.handle(event, now)
        return []

    def on_tokens(self, request_id: str, chunks: int, now: float) -> None:
        """Take in tokens of a request of ours.

        The leader needs to hear of the first that come of a step, and of a first token: the rest can go with those of
        the next step.
        """
        entry = self._scheduler.ledger.entries.get(request_id)
        if entry is None or entry.engine is None:
            return
        engine = entry.engine
        step, first = engine.step, not engine.context_tokens(request_id)
        self._scheduler.on_tokens(request_id, chunks, now)
        if self.line is not None:
            self._chunks[request_id] = self._chunks.get(request_id, 0) + chunks
            if first or engine.step != step:
                self.line.due = self.has_mail = True

    def refuse_all(self, now: float) -> list[Action]:
        """Refuse whoever waits: the replica drains, which its scheduler knows."""
        refused: list[Action] = []
        for request_id, of in list(self.waiting.items()):
            del self.waiting[request_id]
            self._tell(letters.Over(request_id))
            refused += self._scheduler.handle(of, now)
        return refused

    def leave(self) -> None:
        """Tell the leader that nothing of ours is left."""
        self._tell(letters.Leaves())

    # -- what the leader decides --

    def obey(self, notes: Iterable[Note], now: float) -> list[Action]:
        """Do what the leader wants done, as far as there is still a request to do it to."""
        actions: list[Action] = []
        for note in notes:
            match note:
                case letters.Send(request_id, engine_id):
                    if self._can_start(request_id, engine_id):
                        starts = self.waiting.pop(request_id)
                        sent = InFlight(starts.request, engine_id, _at(starts, now))
                        self._scheduler.handle(HandedOver(in_flight=(sent,)), now)
                        actions.append(Dispatch(request_id, engine_id))
                case letters.Refuse(request_id, reason, retry_after, estimated_wait):
                    if self.waiting.pop(request_id, None) is not None:
                        actions.append(Reject(request_id, reason, retry_after, estimated_wait))
                case letters.SendSlice(request_id, engine_id, tokens, held_tokens, number):
                    of = self.waiting.get(request_id)
                    if of is not None and of.request.sliceable and self._knows(engine_id) and self.line is not None:
                        # Numbers below zero are of an earlier attempt to whoever decides here one day.
                        self._slice_number -= 1
                        self._slices[self._slice_number] = self.line.session, number
                        actions.append(Slice(request_id, engine_id, tokens, held_tokens, self._slice_number))
                    else:
                        self._tell(letters.SliceOver(request_id, number, cached=False))
                case letters.Judged():
                    if (claim := self._claims.answer(note)) is not None:
                        self._hanging.pop(claim.request_id, None)
                        if claim.refusal is not None:  # whoever waits for the request hears of it by the claim
                            self.waiting.pop(claim.request_id, None)
                case letters.Spent():
                    self._claims.learn(note, now)
                case letters.Learnt(engine_id):
                    self.learnt[engine_id] = note
        return actions

    # -- --

    def _wait(self, of: Arrived, now: float) -> None:
        self.waiting[of.request.id] = of
        self._tell(self._waits(of, now))

    def _waits(self, of: Arrived, now: float) -> letters.Waits:
        claim = self._hanging.get(of.request.id)
        return letters.Waits(of.request, now - _at(of, now), 0 if claim is None else claim.number)

    def _take_back(self, request_id: str, back_off_seconds: float | None, now: float) -> list[Action]:
        entry = self._scheduler.ledger.entries.get(request_id)
        if entry is None:
            return []
        self._scheduler.handle(HandedOver(gone=(request_id,)), now)
        self.waiting[request_id] = Arrived(entry.waiting.request, entry.waiting.arrived_at)
        self._tell(letters.TurnedAway(request_id, back_off_seconds))
        return self.refuse_all(now) if self._scheduler.draining else []

    def _can_start(self, request_id: str, engine_id: str) -> bool:
        if request_id not in self.waiting:
            return False  # it has ended meanwhile, which the leader is about to hear
        if not self._knows(engine_id):
            self._tell(letters.TurnedAway(request_id))
            return False
        return True

    def _knows(self, engine_id: str) -> bool:
        return engine_id in self._scheduler.ledger.engines

    def _tell(self, note: Note) -> None:
        if self.line is not None:
            self.line.notes.append(note)
            self.has_mail = True


def _at(of: Arrived, now: float) -> float:
    return now if of.arrived_at is None else of.arrived_at
