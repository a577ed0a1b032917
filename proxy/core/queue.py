"""Requests that wait for an engine."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from proxy.core.fairness import FairShares, Flow
from proxy.core.heap import Heap
from proxy.core.lane import Lane, Pace, Waiting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proxy.core.fairness import Bill
    from proxy.core.request import Request

Servers = frozenset[str]
"""The ids of all engines that serve a request, up or not."""

_NO_DEADLINES = Pace()


class WaitingQueue:
    """The requests that wait for one set of engines; O(log n) for every change.

    The flow that was served least goes first (``fairness``), and inside it the order is the lane's. With one flow that
    is all: by key, but who has waited for ``max_wait_seconds`` goes before everybody, oldest first.
    """

    def __init__(
        self, max_wait_seconds: float, shares: FairShares | None = None, servers: Servers = frozenset()
    ) -> None:
        self.servers = servers
        self.models: Counter[str] = Counter()
        """How many wait for each model."""
        self._max_wait_seconds = max_wait_seconds
        self._shares = shares or FairShares()
        self._lanes: dict[Flow, Lane] = {}  # an empty lane is removed
        self._by_age: Heap[Waiting] = Heap(lambda w: (w.arrived_at, w.number))

    def __len__(self) -> int:
        return len(self._by_age)

    def __repr__(self) -> str:
        return f"<WaitingQueue {len(self)} waiting in {len(self._lanes)} lanes>"

    def __iter__(self) -> Iterator[Waiting]:
        """Give all waiting requests, oldest first."""
        return iter(self._by_age)

    def first_lane(self, now: float) -> Lane:
        """The lane whose turn it is. To look at."""
        return self._lanes[self._shares.first(now)]

    def lane_of(self, request: Request) -> Lane:
        """The lane in which a waiting request is. To look at."""
        return self._lanes[flow_of(request)]

    def reconfigure(self, max_wait_seconds: float) -> None:
        """Work by another longest wait."""
        self._max_wait_seconds = max_wait_seconds
        for lane in self._lanes.values():
            lane.max_wait_seconds = max_wait_seconds

    def push(self, waiting: Waiting) -> None:
        flow = flow_of(waiting.request)
        lane = self._lanes.get(flow)
        if lane is None:
            lane = self._lanes[flow] = Lane(self._max_wait_seconds)
            self._shares.enter(flow)
        lane.push(waiting)
        self._by_age.add(waiting)
        self.models[waiting.request.model] += 1

    def remove(self, waiting: Waiting) -> None:
        flow = flow_of(waiting.request)
        lane = self._lanes[flow]
        lane.remove(waiting)
        self._by_age.remove(waiting)
        model = waiting.request.model
        self.models[model] -= 1
        if not self.models[model]:
            del self.models[model]
        if not lane:
            del self._lanes[flow]
            self._shares.leave(flow)

    @property
    def oldest(self) -> Waiting:
        """The request that has waited longest; the queue must not be empty."""
        return self._by_age.first

    def head(self, now: float, pace: Pace = _NO_DEADLINES) -> Waiting:
        """The request to release next; the queue must not be empty. ``pace`` is for those with a TTFT deadline."""
        return self.first_lane(now).head(now, pace)


_new_flow = partial(tuple.__new__, Flow)  # as Flow(...), in half the time: it is asked for ten times with each request


def flow_of(request: Request) -> Flow:
    return _new_flow((request.request_class.weight, request.tenant))


_REMEMBERED_POOLS = 64


class Backlog:
    """All waiting requests, one queue for each set of engines that serve them, and what they hold.

    A head that finds no place then blocks nobody who could be served, and clients cannot make queues at will.
    """

    def __init__(
        self,
        max_wait_seconds: float,
        tenant_weights: Mapping[str, float] | None = None,
        guaranteed: Mapping[str, int] | None = None,
    ) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._tenant_weights = tenant_weights or {}
        self._guaranteed = guaranteed or {}
        self._queues: dict[Servers, WaitingQueue] = {}  # an empty queue is removed
        self._shares: dict[Servers, FairShares] = {}  # outlive the queues; longest without a new queue first
        self._queue_of: dict[str, WaitingQueue] = {}  # by request id
        self.size_bytes = 0
        self.prompt_tokens = 0
        self.classes: Counter[str] = Counter()
        """How many requests of each class wait."""
        self.with_deadline = 0
        """Waiting requests to which a TTFT was promised."""

    def reconfigure(
        self, max_wait_seconds: float, tenant_weights: Mapping[str, float], guaranteed: Mapping[str, int], now: float
    ) -> None:
        """Work by another longest wait, other weights and other guarantees."""
        self._max_wait_seconds, self._tenant_weights = max_wait_seconds, tenant_weights
        self._guaranteed = guaranteed
        for queue in self._queues.values():
            queue.reconfigure(max_wait_seconds)
        for shares in self._shares.values():
            shares.reweigh(tenant_weights, guaranteed, now)

    def __len__(self) -> int:
        return len(self._queue_of)

    def __repr__(self) -> str:
        return f"<Backlog {len(self)} waiting in {len(self._queues)} queues>"

    def __contains__(self, servers: Servers) -> bool:
        """Whether anybody waits for just these engines."""
        return servers in self._queues

    def longest_wait(self, now: float) -> float:
        """Seconds since the arrival of whoever has waited longest; 0 where nobody waits."""
        return max((now - queue.oldest.arrived_at for queue in self._queues.values()), default=0.0)

    def queues(self) -> list[tuple[Servers, WaitingQueue]]:
        return list(self._queues.items())

    def shares(self) -> list[tuple[Servers, FairShares]]:
        """The counters of each set of engines for which somebody has waited lately. To look at."""
        return list(self._shares.items())

    def queue_of(self, waiting: Waiting) -> WaitingQueue:
        return self._queue_of[waiting.request.id]

    def servers_of(self, waiting: Waiting) -> Servers:
        return self._queue_of[waiting.request.id].servers

    def push(self, waiting: Waiting, servers: Servers) -> None:
        queue = self._queues.get(servers)
        if queue is None:
            queue = self._queues[servers] = WaitingQueue(self._max_wait_seconds, self._shares_of(servers), servers)
        queue.push(waiting)
        self._queue_of[waiting.request.id] = queue
        self.size_bytes += waiting.request.size_bytes
        self.prompt_tokens += waiting.request.prompt_tokens
        self.classes[waiting.request.request_class.name] += 1
        self.with_deadline += waiting.ttft_deadline is not None

    def remove(self, waiting: Waiting) -> None:
        queue = self._queue_of.pop(waiting.request.id)
        queue.remove(waiting)
        if not queue:
            del self._queues[queue.servers]
        self.size_bytes -= waiting.request.size_bytes
        self.prompt_tokens -= waiting.request.prompt_tokens
        self.classes[waiting.request.request_class.name] -= 1
        self.with_deadline -= waiting.ttft_deadline is not None

    def hand_over(self, queue: WaitingQueue, servers: Servers) -> None:
        """Let a whole queue wait for other engines, for which nobody waits yet; what its flows were served counts on.

        In constant time: when an engine joins, there may be tens of thousands who wait for it.
        """
        del self._queues[queue.servers]
        self._shares[servers] = self._shares.pop(queue.servers)
        self._queues[servers], queue.servers = queue, servers

    def take(self, waiting: Waiting, now: float) -> Bill:
        """Remove a request that is released, and begin to charge its flow."""
        bill = self._shares[self.servers_of(waiting)].open_bill(flow_of(waiting.request), now)
        self.remove(waiting)
        return bill

    def bypass(self, request: Request, servers: Servers, now: float) -> Bill:
        """As ``push`` and ``take`` at once, where nobody waits for these engines."""
        return self._shares_of(servers).bypass(flow_of(request), now)

    def share_of(self, request: Request, servers: Servers) -> float:
        """The part of these engines' service that is the request's flow's, beside those that wait now."""
        shares = self._shares.get(servers)
        return 1.0 if shares is None else shares.share_of(flow_of(request))

    def ahead(self, request: Request, servers: Servers, now: float) -> tuple[float, float]:
        """How far ahead of its turn the request at the head of these engines' queue is; see ``FairShares.ahead``."""
        return self._shares[servers].ahead(flow_of(request), now)

    def kept_from(self, request: Request, servers: Servers, now: float) -> float:
        """Tokens of KV cache, over these engines, that a release of the request has to leave free for other tenants."""
        shares = self._shares.get(servers)
        return 0.0 if shares is None else shares.kept_from(flow_of(request), now)

    def _shares_of(self, servers: Servers) -> FairShares:
        shares = self._shares.pop(servers, None) or FairShares(self._tenant_weights, self._guaranteed)
        self._shares[servers] = shares
        if len(self._shares) > _REMEMBERED_POOLS:  # engines come and go, and what they serve changes
            unused = next((s for s in self._shares if s not in self._queues), None)
            if unused is not None:
                del self._shares[unused]
        return shares
