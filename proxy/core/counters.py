"""Who shares with whom, and how much each was served: the virtual token counters of ``fairness``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from proxy.core.heap import Ranking

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

_Key = TypeVar("_Key", bound="Hashable")
_EXPECTED_WEIGHT = 0.1


@dataclass(slots=True)
class Counter(Generic[_Key]):
    key: _Key
    weight: float
    served: float
    """Tokens charged, per unit of weight."""
    number: int
    """Order of appearance; breaks ties."""
    waiting: bool = False
    expected_output: float = 0.0
    """Moving average of its answers' lengths, in tokens."""


class Level(Generic[_Key]):
    """The counters of flows that share directly with each other; O(log n) for every change."""

    def __init__(self, credit_seconds: float, remembered: int) -> None:
        self._credit_seconds = credit_seconds
        self._remembered = remembered
        self._counters: dict[_Key, Counter[_Key]] = {}
        self._waiting: Ranking[_Key, Counter[_Key]] = Ranking(lambda c: (c.served, c.number))
        self._idle: dict[_Key, None] = {}  # idle longest first
        self._waiting_weight = 0.0
        self._number = 0
        self._clock = 0.0  # the highest counter that anything was released at: those who wait have about this much
        # The clock at the start of this span of credit_seconds, and of the one before.
        self._span_began_at = 0.0
        self._mark = self._earlier_mark = 0.0

    def __len__(self) -> int:
        """How many flows wait."""
        return len(self._waiting)

    def counters(self) -> Iterable[Counter[_Key]]:
        """All that are remembered."""
        return self._counters.values()

    def reweigh(self, weight_of: Callable[[_Key], float]) -> None:
        """Give every flow another weight; nobody's counter changes by that."""
        for counter in self._counters.values():
            counter.weight = weight_of(counter.key)
        self._waiting_weight = sum(counter.weight for counter in self._waiting)

    def enter(self, key: _Key, weight: float) -> None:
        """A flow begins to wait. What it left unused long ago is forgiven, and a new one begins where the others are.

        A newcomer gets no credit: or making up names would pay.
        """
        counter = self._return(key, weight)
        counter.waiting = True
        self._waiting.add(key, counter)
        self._waiting_weight += counter.weight

    def leave(self, key: _Key) -> None:
        counter = self._counters[key]
        self._waiting.remove(key)
        self._waiting_weight = self._waiting_weight - counter.weight if self._waiting else 0.0  # no error stays
        counter.waiting = False
        self._rest(key)

    def bypass(self, key: _Key, weight: float) -> None:
        """As ``enter`` and ``leave`` at once, where no flow waits."""
        self._return(key, weight)
        self._rest(key)

    def _return(self, key: _Key, weight: float) -> Counter[_Key]:
        counter = self._counters.get(key)
        if counter is None:
            self._number += 1
            counter = self._counters[key] = Counter(key, weight, self._clock, self._number)
        self._idle.pop(key, None)
        counter.served = max(counter.served, self._earlier_mark)
        return counter

    def _rest(self, key: _Key) -> None:
        self._idle[key] = None
        if len(self._idle) > self._remembered:
            forgotten = next(iter(self._idle))
            del self._idle[forgotten], self._counters[forgotten]

    def waits(self, key: _Key) -> bool:
        counter = self._counters.get(key)
        return counter is not None and counter.waiting

    def turn(self, key: _Key) -> tuple[float, int]:
        """By what those that wait are ordered; the flow must be one of them."""
        counter = self._counters[key]
        return counter.served, counter.number

    def share(self, key: _Key, weight: float) -> float:
        """The part that is the flow's, of all that wait and itself."""
        counter = self._counters.get(key)
        others = 0.0 if counter is not None and counter.waiting else weight
        return weight / (self._waiting_weight + others)

    def first(self) -> _Key:
        return self._waiting.first.key

    def charge(self, key: _Key, tokens: float, now: float) -> None:
        counter = self._counters.get(key)
        if counter is None:
            return  # forgotten: it was idle for longer than a thousand others
        if now - self._span_began_at >= self._credit_seconds:
            long_ago = now - self._span_began_at >= 2 * self._credit_seconds
            self._earlier_mark = self._clock if long_ago else self._mark
            self._mark, self._span_began_at = self._clock, now
        self._clock = max(self._clock, counter.served)
        self.correct(key, tokens)

    def correct(self, key: _Key, tokens: float) -> None:
        """Change a counter without a release: what was charged before was too little, or (negative) too much."""
        counter = self._counters.get(key)
        if counter is None:
            return
        counter.served += tokens / counter.weight
        if counter.waiting:
            self._waiting.change(key)

    def expected_output(self, key: _Key) -> float:
        counter = self._counters.get(key)
        return counter.expected_output if counter is not None else 0.0

    def learn_output(self, key: _Key, tokens: int) -> None:
        counter = self._counters.get(key)
        if counter is not None:
            known = counter.expected_output
            counter.expected_output += (_EXPECTED_WEIGHT if known else 1.0) * (tokens - known)

    def ahead(self, key: _Key) -> float:
        """How much more the flow was served than the one that goes next, per unit of weight."""
        counter = self._counters.get(key)
        return counter.served - self._waiting.first.served if counter is not None and self._waiting else 0.0
