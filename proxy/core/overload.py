"""Overload: when somebody who comes now would get a first token, who is refused, and when to come back.

An overloaded server cannot serve all. It can tell at once those whom it would make wait for nothing, and keep their
place in the order until they come back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING, assert_never

from proxy.core.actions import Reject
from proxy.core.heap import Heap
from proxy.core.holdings import Holdings
from proxy.core.outflow import Outflow
from proxy.core.queue import flow_of
from proxy.core.request import RejectReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.core.config import SchedulerConfig
    from proxy.core.engine import EngineBelief
    from proxy.core.lane import Waiting
    from proxy.core.queue import Backlog, Servers
    from proxy.core.request import Request

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 120.0
"""OpenAI's client libraries do not heed a longer wait."""
MAX_SENT_AWAY = 10_000
"""Refused requests that are known again when they come back."""

_AGES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_RETRY_SECONDS / 2)
"""How much later a request might come back; nearer to each other than clients are spread."""
_SURE_SHARE = 0.5
"""Who comes back should be let in with so much of its limit: others come meanwhile, and others come back."""

_GOLDEN = 0.6180339887498949
"""The fractional parts of its multiples are spread evenly, however many there are."""


class Overload:
    """What is known of every queue, beside the queue itself: how it empties, whose limit ends when, who was refused."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._ageing = config.ordering(1, 1.0) - config.ordering(1, 0.0)
        self._outflows: dict[Servers, Outflow] = {}
        self._holdings = Holdings(config.max_queue_requests, config.max_queue_bytes, config.max_queue_tokens)
        self._due: Heap[Waiting] = Heap(lambda w: (due_at(w), w.number))
        self._sent_away: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # when first here, from when on back
        self._refusals = 0
        self._began_at = 0.0
        self._refused_at = -inf

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Work by other limits; the order has to be the same."""
        self._config = config
        self._holdings.rebound(config.max_queue_requests, config.max_queue_bytes, config.max_queue_tokens)

    def __repr__(self) -> str:
        return f"<Overload {list(self._outflows.values())}>"

    # -- what happens to the queues --

    def arrive(self, waiting: Waiting, servers: Servers, now: float) -> None:
        self._outflow(servers).arrive(waiting.key, _work(waiting.request), now, flow_of(waiting.request))

    def wait(self, waiting: Waiting, servers: Servers, now: float) -> None:
        request = waiting.request
        self._outflow(servers).wait(waiting.key, waiting.number, _work(request), now, flow_of(request))
        self._holdings.add(waiting)
        if has_limit(request):
            self._due.add(waiting)

    def bypass(self, waiting: Waiting, servers: Servers, now: float) -> None:
        """As ``wait``, ``arrive`` and ``release`` at once, where nobody else waits."""
        self._outflow(servers).bypass(waiting.key, _work(waiting.request), now)

    def release(self, waiting: Waiting, servers: Servers, now: float) -> None:
        request = waiting.request
        self._outflows[servers].release(waiting.key, waiting.number, _work(request), now, flow_of(request))
        self._holdings.remove(waiting)
        self._due.discard(waiting)

    def leave(self, waiting: Waiting, servers: Servers) -> None:
        request = waiting.request
        self._outflows[servers].leave(waiting.key, waiting.number, _work(request), flow_of(request))
        self._holdings.remove(waiting)
        self._due.discard(waiting)

    def resume(self, now: float) -> None:
        """Note that an engine takes prompts again which was left alone."""
        for outflow in self._outflows.values():
            outflow.resume(now)

    def hand_over(self, servers: Servers, others: Servers, now: float) -> None:
        """Note that all who waited for ``servers`` wait for others now; how fast these are is to be seen."""
        outflow = self._outflows[others] = self._outflows.pop(servers)
        outflow.begin_anew(now)

    def forget_idle(self) -> None:
        """Forget queues in which nobody waits: the engines of some may never be those of any request again."""
        self._outflows = {servers: outflow for servers, outflow in self._outflows.items() if outflow.tokens}

    def _outflow(self, servers: Servers) -> Outflow:
        outflow = self._outflows.get(servers)
        if outflow is None:
            outflow = self._outflows[servers] = Outflow(self._ageing)
        return outflow

    # -- when --

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens released per second while somebody waited, over all queues."""
        return sum(outflow.tokens_per_second or 0.0 for outflow in self._outflows.values())

    def first_token_seconds(
        self,
        request: Request,
        key: float,
        servers: Servers,
        engines: Iterable[EngineBelief],
        now: float,
        *,
        share: float,
    ) -> float | None:
        """Estimate when somebody who comes now would have a first token; ``None`` until that can be told.

        ``share``: of the engines' service, that of the request's flow (see ``Outflow.wait_seconds``).

        That one with a TTFT deadline goes first when that is near is left out on purpose. Seven of ten that are refused
        would be in time for it, but at the cost of others. Where half of the requests must have a token within 2 s or
        are refused (1,500 requests, 3 seeds), an estimate with it brings 0.5 % more of them in time at 0.8 of the
        capacity, 0.5 % fewer at 1.2 and 9 % fewer at 1.5; from 1.2 on three to eight times as many wait for their
        whole limit before they are refused, and the other half's p99 TTFT doubles.
        """
        outflow = self._outflows.get(servers)
        if outflow is None or not outflow.trusted:
            return None
        wait = outflow.wait_seconds(key, now, flow_of(request), share)
        if wait is None:
            return None
        at_engine = (e.estimated_wait_seconds(request.prompt_tokens) for e in engines if e.up and e.id in servers)
        return wait + min(at_engine, default=0.0)

    def let_in_seconds(
        self,
        request: Request,
        key: float,
        servers: Servers,
        engines: Iterable[EngineBelief],
        now: float,
        *,
        share: float,
    ) -> float:
        """Return how much older a request has to be for the queue to let it in, if that stays as it is now.

        It keeps its place when it is refused, so it comes back with its age.
        """
        engines, soon = tuple(engines), _SURE_SHARE * self.limit_seconds(request)

        def waits(age: float) -> float:
            aged = key - age * self._ageing
            return self.first_token_seconds(request, aged, servers, engines, now, share=share) or 0.0

        ages = _AGES_SECONDS[:-1]
        return _AGES_SECONDS[bisect_left(ages, True, key=lambda age: waits(age) <= soon)]

    def emptied_seconds(self, servers: Servers, engines: Iterable[EngineBelief]) -> float:
        """Return when all that waits now for ``servers`` will have been released, if nothing else comes."""
        outflow = self._outflows.get(servers)
        if outflow is None:
            return 0.0
        # As long as little has been seen to leave the queue: what the engines can prefill if they do nothing else.
        rate = outflow.tokens_per_second if outflow.trusted else None
        if rate is None:
            rate = sum(e.prefill_budget / e.step_seconds for e in engines if e.up and e.id in servers)
        return outflow.tokens / max(rate, 1.0)

    def next_due(self) -> float | None:
        """When the limit of a waiting request ends; ``None`` if none has one."""
        return due_at(self._due.first) if self._due else None

    def overdue(self, now: float) -> Waiting | None:
        """A waiting request whose limit has ended by ``now``."""
        return self._due.first if self._due and due_at(self._due.first) <= now else None

    # -- who is refused --

    def is_full(self, request: Request, backlog: Backlog) -> bool:
        """Whether ``request`` is more than may wait."""
        config = self._config
        most_tokens = config.max_queue_tokens
        return (
            len(backlog) >= config.max_queue_requests
            or backlog.size_bytes + request.size_bytes > config.max_queue_bytes
            or (most_tokens is not None and backlog.prompt_tokens + request.prompt_tokens > most_tokens)
        )

    def overflows(self, backlog: Backlog) -> bool:
        """Whether more waits than may."""
        config = self._config
        most_tokens = config.max_queue_tokens
        return (
            len(backlog) > config.max_queue_requests
            or backlog.size_bytes > config.max_queue_bytes
            or (most_tokens is not None and backlog.prompt_tokens > most_tokens)
        )

    def has_even_part_for(self, request: Request) -> bool:
        """Whether others make room for a request in a full queue, as its tenant holds no more than its even part."""
        return self._holdings.has_even_part_for(request)

    def first_to_make_room(self) -> Waiting:
        """Who goes when one has to make room; somebody must wait."""
        return self._holdings.newest_of_greatest()

    def limit_seconds(self, request: Request) -> float:
        """The time from its arrival after which a request is of no more use, or is refused in any case."""
        limit = request.request_class.ttft_limit_seconds
        return self._config.queue_timeout_seconds if limit is None else limit

    def refuse(
        self,
        request: Request,
        reason: RejectReason,
        arrived_at: float,
        now: float,
        *,
        least_seconds: float = 0.0,
        estimated_wait_seconds: float | None = None,
    ) -> Reject:
        """Refuse a request, and tell its client when to come back: not before ``least_seconds`` have gone by."""
        retry_after: float | None
        match reason:
            case RejectReason.NO_ENGINE | RejectReason.DRAINING:
                retry_after = self._config.no_engine_retry_seconds
            case RejectReason.UNKNOWN_MODEL | RejectReason.TOO_LONG:
                retry_after = None
            case RejectReason.NO_QUEUE:  # says nothing of an overload
                retry_after = min(max(MIN_RETRY_SECONDS, least_seconds), MAX_RETRY_SECONDS)
            case RejectReason.QUEUE_FULL | RejectReason.QUEUE_TIMEOUT | RejectReason.TOO_LATE:
                retry_after = self._send_away(request, arrived_at, least_seconds, now)
            case _:
                assert_never(reason)
        return Reject(request.id, reason, retry_after, estimated_wait_seconds)

    def _send_away(self, request: Request, arrived_at: float, least_seconds: float, now: float) -> float:
        """Return after what time a request that is refused now shall come back; its place in the order is kept.

        That is not before ``least_seconds``, when the queue would let it in if it stays as it is. But nobody knows when
        an overload ends. One that has lasted for some time can be expected to last as long again (Lindy's law), so
        those whom it refuses are spread over the time from once to twice its age: the first come back soon, and none
        in a herd. It is over when nobody was refused for half of its age.
        """
        if now - self._refused_at > MIN_RETRY_SECONDS + (self._refused_at - self._began_at) / 2:
            self._began_at = now
        self._refused_at = now
        self._refusals += 1
        least = min(max(MIN_RETRY_SECONDS, now - self._began_at, least_seconds), MAX_RETRY_SECONDS / 2)
        retry_after = least * (1 + self._refusals * _GOLDEN % 1)
        if request.fingerprint is not None:
            self._sent_away[request.fingerprint] = arrived_at - request.waited_before_seconds, now + retry_after
            self._sent_away.move_to_end(request.fingerprint)
            if len(self._sent_away) > MAX_SENT_AWAY:
                self._sent_away.popitem(last=False)
        return retry_after

    def waited_before_seconds(self, request: Request, arrived_at: float) -> float:
        """Return how long before ``arrived_at`` a request came first, if it was sent away then and is back in time.

        Otherwise 0. Once a request has used its place, the next of the same content is a new one.
        """
        if request.fingerprint is None or request.fingerprint not in self._sent_away:
            return 0.0
        first_at, back_at = self._sent_away[request.fingerprint]
        if arrived_at < back_at:
            return 0.0
        del self._sent_away[request.fingerprint]
        return arrived_at - first_at if arrived_at <= back_at + MAX_RETRY_SECONDS else 0.0


def has_limit(request: Request) -> bool:
    return not request.may_wait or request.request_class.ttft_limit_seconds is not None


def due_at(waiting: Waiting) -> float:
    """When a waiting request's limit ends."""
    limit = waiting.request.request_class.ttft_limit_seconds or 0.0
    return waiting.arrived_at + (limit if waiting.request.may_wait else 0.0)


def _work(request: Request) -> int:
    return max(1, request.prompt_tokens)
