"""One replica of a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.actions import Action
    from proxy.core.events import Event
    from proxy.core.fleet.letters import Letter
    from proxy.core.fleet.register import Standing
    from proxy.core.scheduler import Scheduler


class Role(StrEnum):
    """Who decides on a replica's requests. Metric label."""

    FOLLOWER = "follower"
    """Another replica, or nobody as long as none leads."""
    ROLL_CALL = "roll_call"
    """It has been given the lead, and asks the others what they have; nobody decides."""
    LEADER = "leader"
    """It decides, on those of all replicas."""
    LOCAL = "local"
    """It decides on its own with a part of each engine, as nobody can be reached who decides for all."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Times of a fleet, in seconds."""

    beat_seconds: float = 0.5
    """How often the shell gives the store a sign of life."""
    life_seconds: float = 2.0
    """How long one holds: after that a replica is taken to be gone, and a leader does not lead any more."""
    patience_seconds: float = 1.0
    """Without the store's answer for so long, every replica decides on its own."""
    roll_call_seconds: float = 1.0
    """Who has not told a new leader what it has after this time is not waited for."""
    silence_seconds: float = 3.0
    """So does one that the leader does not hear, or that does not hear the leader, although the store answers."""

    def __post_init__(self) -> None:
        if not 0 < self.beat_seconds < self.patience_seconds < self.life_seconds < self.silence_seconds:
            raise ValueError("of a fleet's times, beat < patience < life < silence")
        if not self.beat_seconds < self.roll_call_seconds:
            raise ValueError("a roll call lasts longer than a beat")


class Member:
    """A scheduler to its shell (``handle``, ``on_tokens``, ``tick``, ``next_deadline``), whoever decides.

    Beside that, the shell gives the store a sign of life every ``beat_seconds`` and says what it answered
    (``on_standing``), hands over letters (``receive``), and sends those that are to go (``take_outbox``), once after
    whatever it has told. ``now`` never decreases from call to call, over all of them.
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

    @property
    def willing(self) -> bool:
        """Whether it would lead: to be told to the store with each sign of life. Not so while it drains."""
        return not self.scheduler.draining

    @property
    def resigns(self) -> bool:
        """Whether it leads no more although it has the lease, as it drains: the shell is to give that back now."""
        return False

    def handle(self, event: Event, now: float) -> list[Action]:
        """As ``Scheduler.handle``; what is done about it may also come later, from other calls."""
        return self.scheduler.handle(event, now)

    def on_tokens(self, request_id: str, chunks: int, now: float) -> list[Action]:
        """As ``Scheduler.on_tokens``."""
        return self.scheduler.on_tokens(request_id, chunks, now)

    def tick(self, now: float) -> list[Action]:
        """As ``Scheduler.tick``."""
        return self.scheduler.tick(now)

    def next_deadline(self) -> float | None:
        """As ``Scheduler.next_deadline``."""
        return self.scheduler.next_deadline()

    def on_standing(self, standing: Standing | None, sent_at: float, now: float) -> list[Action]:  # noqa: ARG002
        """Take in what the store answered to the sign of life sent at ``sent_at``; ``None``: nothing, or an error."""
        if standing is not None:
            self.leader, self.epoch = standing.leader, standing.epoch
            self.role = Role.LEADER if standing.leader == self.id else Role.FOLLOWER
        return []

    def receive(self, letter: Letter, now: float) -> list[Action]:  # noqa: ARG002
        """Take in a letter to this replica; of one sender they must come in the order in which they were sent."""
        return []

    @property
    def has_mail(self) -> bool:
        """Whether ``take_outbox`` would give something."""
        return False

    def take_outbox(self, now: float) -> list[Letter]:  # noqa: ARG002
        """Return the letters that are to be sent now, in this order."""
        return []

    def leave(self, now: float) -> None:
        """Tell the leader, by a last letter, that this replica ends and has nothing any more."""
