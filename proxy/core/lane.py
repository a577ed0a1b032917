"""One flow's waiting requests, in the order in which they go."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from proxy.core.heap import Heap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.core.request import Request


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue. ``number`` breaks ties: the order in which requests came."""

    request: Request
    arrived_at: float
    key: float
    number: int

    @property
    def aged_from(self) -> float:
        """From when on it ages: its first arrival, if it was refused then and came back when it was told to."""
        return self.arrived_at - self.request.waited_before_seconds

    @property
    def ttft_deadline(self) -> float | None:
        """When its first token is due, if a time was promised."""
        promise = self.request.request_class.ttft_seconds
        return None if promise is None else self.arrived_at + promise


class Pace(NamedTuple):
    """How long a prompt takes from its release to its first token, at the fastest engine as it is now."""

    lead_seconds: float = 0.0
    seconds_per_token: float = 0.0


class Band(IntEnum):
    """What comes before what, whatever the keys are."""

    OVERDUE = 0
    """Waited as long as anybody may: nobody can overtake it any more. Oldest first."""
    URGENT = 1
    """Has to be released about now for its first token to be in time: within the time that one more prompt like it
    takes. Earliest deadline first, as long as all deadlines can be kept.
    """
    ORDINARY = 2
    """By key."""
    HOPELESS = 3
    """Its first token cannot be in time any more: those go first whom it still helps. By key."""


def urgency(
    waiting: Waiting, prompt_tokens: int, key: float, now: float, *, pace: Pace, max_wait_seconds: float
) -> tuple[Band, float]:
    """What to order requests by, of which ``prompt_tokens`` are still to work on and whose key is then ``key``."""
    if now - waiting.arrived_at >= max_wait_seconds:
        return Band.OVERDUE, waiting.arrived_at
    deadline = waiting.ttft_deadline
    if deadline is None:
        return Band.ORDINARY, key
    latest, urgent_at = latest_start(deadline, prompt_tokens, pace)
    if now > latest:
        return Band.HOPELESS, key
    return (Band.URGENT, deadline) if now >= urgent_at else (Band.ORDINARY, key)


def latest_start(deadline: float, prompt_tokens: int, pace: Pace) -> tuple[float, float]:
    """Return when a prompt has to be released for its first token to be in time, and when that becomes urgent."""
    seconds = pace.lead_seconds + prompt_tokens * pace.seconds_per_token
    latest = deadline - seconds
    return latest, latest - seconds


class _Timed:
    """A request with a TTFT deadline, its band, and when to look whether that is still right."""

    __slots__ = ("band", "check_at", "waiting")

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.band = Band.ORDINARY
        self.check_at = -inf


class Lane:
    """Waiting requests by band, then by key, age or deadline; O(log n) for every change.

    Without TTFT deadlines there are but two bands, and none ever has to be moved. A request with a deadline is looked
    at again when half of the time is over until it would change its band as things stand: some ten times, however the
    engines' pace may change meanwhile.
    """

    def __init__(self, max_wait_seconds: float) -> None:
        self.max_wait_seconds = max_wait_seconds
        self._by_age: Heap[Waiting] = Heap(lambda w: (w.arrived_at, w.number))
        self._by_key: Heap[Waiting] = Heap(lambda w: (w.key, w.number))
        self._urgent: Heap[Waiting] = Heap(lambda w: (w.ttft_deadline, w.number))
        self._hopeless: Heap[Waiting] = Heap(lambda w: (w.key, w.number))
        self._timed: dict[str, _Timed] = {}
        self._checks: Heap[_Timed] = Heap(lambda t: (t.check_at, t.waiting.number))

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Waiting]:
        """Give all waiting requests, oldest first."""
        return iter(self._by_age)

    def __repr__(self) -> str:
        return f"<Lane {len(self)} waiting>"

    def push(self, waiting: Waiting) -> None:
        self._by_age.add(waiting)
        self._by_key.add(waiting)
        if waiting.ttft_deadline is not None:
            timed = self._timed[waiting.request.id] = _Timed(waiting)
            self._checks.add(timed)

    def remove(self, waiting: Waiting) -> None:
        self._by_age.remove(waiting)
        timed = self._timed.pop(waiting.request.id, None)
        if timed is None:
            self._by_key.remove(waiting)
            return
        self._drop(timed)
        if timed.check_at < inf:
            self._checks.remove(timed)

    def head(self, now: float, pace: Pace) -> Waiting:
        """The request to release next; the lane must not be empty."""
        oldest = self._by_age.first
        if now - oldest.arrived_at >= self.max_wait_seconds:
            return oldest
        while self._checks and now >= self._checks.first.check_at:
            timed = self._checks.first
            self._checks.remove(timed)
            self._check(timed, now, pace)
        return self._first()

    def likely_head(self, now: float) -> Waiting:
        """As ``head``, if no deadline has become pressing since that was asked last. Leaves no trace: to look at."""
        oldest = self._by_age.first
        return oldest if now - oldest.arrived_at >= self.max_wait_seconds else self._first()

    def is_urgent(self, waiting: Waiting) -> bool:
        """Whether a waiting request was urgent when its deadline was looked at last."""
        timed = self._timed.get(waiting.request.id)
        return timed is not None and timed.band is Band.URGENT

    @property
    def oldest(self) -> Waiting:
        """The request that has waited longest; the lane must not be empty."""
        return self._by_age.first

    def _first(self) -> Waiting:
        # Where some are hopeless there is too much to do. What is urgent then is long, as short prompts went before; to
        # let it go first would cost several others their deadlines.
        in_time = self._by_key if self._hopeless else self._urgent or self._by_key
        return (in_time or self._hopeless).first

    def _drop(self, timed: _Timed) -> None:
        (self._hopeless if timed.band is Band.HOPELESS else self._by_key).remove(timed.waiting)
        if timed.band is Band.URGENT:
            self._urgent.remove(timed.waiting)

    def _check(self, timed: _Timed, now: float, pace: Pace) -> None:
        waiting = timed.waiting
        band, _ = urgency(waiting, waiting.request.prompt_tokens, waiting.key, now, pace=pace, max_wait_seconds=inf)
        if band is not timed.band:
            self._drop(timed)
            (self._hopeless if band is Band.HOPELESS else self._by_key).add(waiting)
            if band is Band.URGENT:
                self._urgent.add(waiting)
            timed.band = band
        timed.check_at = inf
        if band is Band.HOPELESS:
            return
        assert waiting.ttft_deadline is not None
        latest, urgent_at = latest_start(waiting.ttft_deadline, waiting.request.prompt_tokens, pace)
        left = (urgent_at if band is Band.ORDINARY else latest) - now
        timed.check_at = now + max(left / 2, 0.001)
        self._checks.add(timed)
