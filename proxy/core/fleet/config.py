"""Who may decide, and how long a fleet waits for what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    """After the first sign of life that the store did not answer: then a replica decides on its own."""
    roll_call_seconds: float = 1.0
    """Who has not told a new leader what it has after this time is not waited for."""
    silent_beats: int = 6
    """A replica also decides on its own when the store has answered so often and the leader has not shown once that it
    hears it.
    """

    def __post_init__(self) -> None:
        if not 0 < self.beat_seconds < self.patience_seconds < self.life_seconds:
            raise ValueError("of a fleet's times, beat < patience < life")
        if not self.beat_seconds < self.roll_call_seconds or self.silent_beats < 1:
            raise ValueError("a roll call lasts longer than a beat, and silence at least one beat")
