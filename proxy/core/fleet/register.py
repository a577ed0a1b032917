"""Who lives and who leads: the part of a store that the fleet's rules rest on, with time as an argument.

Every store does the same (``proxy.store``), on a clock of its own. A lease ends at its holder before it ends here, as
the holder counts from when it sent its beat; so two never lead at a time, whatever their clocks show, as long as they
run equally fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Standing:
    """What a replica is told when it gives a sign of life."""

    leader: str
    """Id of the replica that leads; empty: none does."""
    epoch: int
    """Of its leadership: grows with every change, for ever."""
    valid_seconds: float
    """For which it leads, if it is not heard of again; counted from when the beat was sent that this answers."""
    members: frozenset[str]
    """Ids of all replicas that live."""
    memory_seconds: float = inf
    """For how long the store remembers: who has led before that, it does not know."""


class Register:
    """Which replicas live, and the lease of the one that leads. ``now`` never decreases from call to call."""

    def __init__(self, born: float | None = None) -> None:
        """``born``: since when it remembers; ``None``: from the first call on."""
        self._born = born
        self._lives: dict[str, float] = {}  # until when
        self._leader = ""
        self._leads_until = 0.0
        self._epoch = 0

    def __repr__(self) -> str:
        return f"<Register of {len(self._lives)} replicas, {self._leader or 'nobody'} leads in epoch {self._epoch}>"

    def beat(self, replica: str, life_seconds: float, now: float, *, willing: bool = True) -> Standing:
        """Take in a sign of life that holds for ``life_seconds``; the lease is the replica's if it is free or its own.

        ``willing``: whether the replica would lead.
        """
        if self._born is None:
            self._born = now
        self._lives[replica] = now + life_seconds
        self._lives = {name: until for name, until in self._lives.items() if until > now}
        if self._leads_until <= now:
            self._leader = ""
        if not self._leader and willing:
            self._leader, self._epoch = replica, max(round(now * 1e6), self._epoch + 1)
        if self._leader == replica:
            self._leads_until = now + life_seconds
        left = max(0.0, self._leads_until - now)
        return Standing(self._leader, self._epoch, left, frozenset(self._lives), now - self._born)

    def resign(self, replica: str) -> bool:
        """Let a replica go, with its lease if it leads; whether it does."""
        self._lives.pop(replica, None)
        if led := self._leader == replica:
            self._leader, self._leads_until = "", 0.0
        return led

    def leads(self, replica: str, epoch: int, now: float) -> bool:
        """Whether letters that a replica writes as the leader of ``epoch`` may be sent: the fence."""
        return (self._leader, self._epoch) == (replica, epoch) and self._leads_until > now
