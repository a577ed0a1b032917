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


Servers = frozenset[str]
"""The ids of all engines that serve a request, up or not."""


class Backlog:
    """All waiting requests, one queue for each set of engines that serve them, and what they hold.

    A head that finds no place then blocks nobody who could be served, and clients cannot make queues at will.
    """

    def __init__(self, max_wait_seconds: float) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._queues: dict[Servers, WaitingQueue] = {}  # an empty queue is removed
        self._servers: dict[str, Servers] = {}  # by request id
        self.size_bytes = 0
        self.prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._servers)

    def __repr__(self) -> str:
        return f"<Backlog {len(self)} waiting in {len(self._queues)} queues>"

    def __contains__(self, servers: Servers) -> bool:
        """Whether anybody waits for just these engines."""
        return servers in self._queues

    def queues(self) -> list[tuple[Servers, WaitingQueue]]:
        return list(self._queues.items())

    def servers_of(self, waiting: Waiting) -> Servers:
        return self._servers[waiting.request.id]

    def push(self, waiting: Waiting, servers: Servers) -> None:
        queue = self._queues.get(servers)
        if queue is None:
            queue = self._queues[servers] = WaitingQueue(self._max_wait_seconds)
        queue.push(waiting)
        self._servers[waiting.request.id] = servers
        self.size_bytes += waiting.request.size_bytes
        self.prompt_tokens += waiting.request.prompt_tokens

    def remove(self, waiting: Waiting) -> None:
        servers = self._servers.pop(waiting.request.id)
        queue = self._queues[servers]
        queue.remove(waiting)
        if not queue:
            del self._queues[servers]
        self.size_bytes -= waiting.request.size_bytes
        self.prompt_tokens -= waiting.request.prompt_tokens
