"""Requests that wait for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sortedcontainers import SortedKeyList

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


class WaitingQueue:
    """One model's waiting requests, by key and by age; O(log n) for every change.

    Requests older than ``max_wait_seconds`` go first, oldest first, whatever their key: the bound after which
    nobody can be overtaken any more.
    """

    def __init__(self, max_wait_seconds: float) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._by_key: SortedKeyList[Waiting] = SortedKeyList(key=lambda w: (w.key, w.number))
        self._by_age: SortedKeyList[Waiting] = SortedKeyList(key=lambda w: (w.arrived_at, w.number))

    def __len__(self) -> int:
        return len(self._by_key)

    def __repr__(self) -> str:
        return f"<WaitingQueue {len(self)} waiting>"

    def __iter__(self) -> Iterator[Waiting]:
        """Give all waiting requests, oldest first."""
        return iter(self._by_age)

    def push(self, waiting: Waiting) -> None:
        self._by_key.add(waiting)
        self._by_age.add(waiting)

    def remove(self, waiting: Waiting) -> None:
        self._by_key.remove(waiting)
        self._by_age.remove(waiting)

    @property
    def oldest(self) -> Waiting:
        """The request that has waited longest; the queue must not be empty."""
        return self._by_age[0]  # type: ignore[no-any-return]

    def head(self, now: float) -> Waiting:
        """The request to release next; the queue must not be empty."""
        oldest = self.oldest
        if now - oldest.arrived_at >= self._max_wait_seconds:
            return oldest
        return self._by_key[0]  # type: ignore[no-any-return]
