"""The order of releases, set against that of arrival: who went before whom, and what put it there.

Counts alone, for people: nothing is decided by them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.lane import Lane, Waiting
    from proxy.core.queue import WaitingQueue


class Turn(StrEnum):
    """Why a request left the queue before those that still waited in it for the same engines. Metric label."""

    ALONE = "alone"
    """Nobody else waited."""
    ARRIVAL = "arrival"
    """It had come first, and was no longer than who was next."""
    AGE = "age"
    """It had come first, and went before a shorter one: by length alone it would still wait."""
    OVERDUE = "overdue"
    """It had waited for as long as anybody may."""
    LENGTH = "length"
    """It went before an older one, as there was less of it, for its age."""
    DEADLINE = "deadline"
    """It went before an older one, as its first token was about to be late."""
    SHARE = "share"
    """It went before an older one of another tenant, or of a class of another weight, whose turn it was not."""


class Turns:
    """What has left the queue, by why it went first."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(Turn, 0)
        self.overtaking_seconds = 0.0
        """By how much those who went before older ones came later than the oldest of them, summed."""

    def __repr__(self) -> str:
        return f"<Turns {dict(self.counts)}>"

    def count(self, waiting: Waiting, queue: WaitingQueue, lane: Lane, now: float, *, urgent: bool) -> None:
        """Count a request that has just left ``queue``, and of it ``lane``; ``urgent``: as it was in there."""
        self.counts[self._turn(waiting, queue, lane, now, urgent=urgent)] += 1

    def count_alone(self) -> None:
        """Count a request that was alone, and was not even put into a queue."""
        self.counts[Turn.ALONE] += 1

    def _turn(self, waiting: Waiting, queue: WaitingQueue, lane: Lane, now: float, *, urgent: bool) -> Turn:
        if not queue:
            return Turn.ALONE
        if now - waiting.arrived_at >= lane.max_wait_seconds:
            return Turn.OVERDUE
        if (ahead := waiting.arrived_at - queue.oldest.arrived_at) > 0:
            self.overtaking_seconds += ahead
            if not lane or lane.oldest.arrived_at >= waiting.arrived_at:
                return Turn.SHARE
            return Turn.DEADLINE if urgent else Turn.LENGTH
        shorter = lane and lane.likely_head(now).request.prompt_tokens < waiting.request.prompt_tokens
        return Turn.AGE if shorter else Turn.ARRIVAL
