"""The way of letters between two replicas: numbered, so that a lost one is missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.fleet.letters import Letter

if TYPE_CHECKING:
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

    def write(self) -> Letter | None:
        """Return the letter that is to go now, if any."""
        if not self.notes and not self.due:
            return None
        notes, self.notes, self.due = tuple(self.notes), [], False
        self.sent += 1
        return self.letter(self.session, self.sent, notes)

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
