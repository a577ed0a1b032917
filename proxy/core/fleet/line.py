"""The way of letters between two replicas: numbered, so that a lost one is missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.fleet.letters import Announced, Letter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.core.fleet.letters import Note


class Line:
    """One session between this replica (``me``) and another, of whom the one leads in ``epoch``."""

    def __init__(self, me: str, other: str, epoch: int, *, leads: bool, session: int) -> None:
        self.me = me
        self.other = other
        self.epoch = epoch
        self.leads = leads
        """Whether this replica is the leader of the two."""
        self.session = session
        self.sent = 0
        self.heard = 0
        self.acknowledged = 0
        """The last of ours that the other has said to have."""
        self.notes: list[Note] = []
        """What is to be told."""
        self.due = False
        """Whether a letter is to go even if there is nothing to tell."""

    def __repr__(self) -> str:
        return f"<Line to {self.other}, session {self.session}, sent {self.sent}, heard {self.heard}>"

    def takes(self, letter: Letter) -> bool:
        """Whether a letter of this session is the next one; what it acknowledges is noted."""
        if letter.number != self.heard + 1:
            return False
        self.heard += 1
        self.acknowledged = letter.heard
        return True

    def write(self) -> Iterator[Letter]:
        """Give the letters that are to go now: one, unless there is a long announcement."""
        if not self.notes and not self.due:
            return
        told, self.notes, self.due = self.notes, [], False
        start = 0
        for end, note in enumerate(told, 1):
            if end == len(told) or (isinstance(note, Announced) and note.more):
                self.sent += 1
                yield self.letter(self.session, self.sent, tuple(told[start:end]))
                start = end
        if not told:
            self.sent += 1
            yield self.letter(self.session, self.sent)

    def letter(self, session: int, number: int, notes: tuple[Note, ...] = ()) -> Letter:
        """Return a letter beside this session."""
        return Letter(
            self.me,
            self.other,
            self.epoch,
            leads=self.leads,
            session=session,
            number=number,
            heard=self.heard,
            notes=notes,
        )
