"""How much of the queue each tenant holds, and who makes room in a full one.

A tenant that floods the queue fills it, and by the bounds of the queue alone everybody else would be refused with it.
So a newcomer whose tenant holds no more than its even part gets in, in place of the newest request of the tenant that
holds most. A tenant's part is its largest share of any bound: requests, bytes or tokens (dominant resource fairness:
Ghodsi et al., NSDI 2011).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from proxy.core.heap import Heap, Ranking

if TYPE_CHECKING:
    from proxy.core.lane import Waiting
    from proxy.core.request import Request


class _Held:
    """What one tenant holds."""

    __slots__ = ("newest_first", "order", "requests", "size_bytes", "tenant", "tokens")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.order = *(-ord(letter) for letter in tenant), 1
        """By names, the last first."""
        self.requests = 0
        self.size_bytes = 0
        self.tokens = 0
        # Who was refused before and came back has not come last.
        self.newest_first: Heap[Waiting] = Heap(lambda w: (-w.aged_from, -w.number))

    def count(self, request: Request, times: int) -> None:
        self.requests += times
        self.size_bytes += times * request.size_bytes
        self.tokens += times * request.prompt_tokens


class Holdings:
    """The tenants that have waiting requests, by what they hold; O(log n) for every change."""

    def __init__(self, max_requests: int, max_bytes: int, max_tokens: int | None) -> None:
        self._bounds = max_requests, max_bytes, inf if max_tokens is None else max_tokens
        self._held: dict[str, _Held] = {}
        self._by_part: Ranking[str, _Held] = Ranking(lambda h: (-self._part(h), h.order))

    def rebound(self, max_requests: int, max_bytes: int, max_tokens: int | None) -> None:
        """Measure by other bounds."""
        self._bounds = max_requests, max_bytes, inf if max_tokens is None else max_tokens
        for tenant in self._held:
            self._by_part.change(tenant)

    def __len__(self) -> int:
        """How many tenants have waiting requests."""
        return len(self._held)

    def __repr__(self) -> str:
        return f"<Holdings of {len(self)} tenants>"

    def add(self, waiting: Waiting) -> None:
        tenant = waiting.request.tenant
        held = self._held.get(tenant)
        if held is None:
            held = self._held[tenant] = _Held(tenant)
            self._by_part.add(tenant, held)
        held.newest_first.add(waiting)
        held.count(waiting.request, 1)
        self._by_part.change(tenant)

    def remove(self, waiting: Waiting) -> None:
        tenant = waiting.request.tenant
        held = self._held[tenant]
        held.newest_first.remove(waiting)
        held.count(waiting.request, -1)
        if held.requests:
            self._by_part.change(tenant)
        else:
            del self._held[tenant]
            self._by_part.remove(tenant)

    def has_even_part_for(self, request: Request) -> bool:
        """Whether its tenant would hold no more than an even part of the queue with this request.

        If so and the queue is full, some other tenant holds more than that part, and can make room.
        """
        held = self._held.get(request.tenant)
        tenants = len(self) + (held is None)
        amounts = 1, request.size_bytes, request.prompt_tokens
        if held is not None:
            amounts = held.requests + 1, held.size_bytes + amounts[1], held.tokens + amounts[2]
        return self._part_of(amounts) <= 1 / tenants

    def newest_of_greatest(self) -> Waiting:
        """The newest request of the tenant that holds most; somebody must wait."""
        return self._by_part.first.newest_first.first

    def _part(self, held: _Held) -> float:
        return self._part_of((held.requests, held.size_bytes, held.tokens))

    def _part_of(self, amounts: tuple[int, int, int]) -> float:
        requests, size_bytes, tokens = amounts
        most_requests, most_bytes, most_tokens = self._bounds
        return max(_ratio(requests, most_requests), _ratio(size_bytes, most_bytes), _ratio(tokens, most_tokens))


def _ratio(amount: int, bound: float) -> float:
    if not amount:
        return 0.0
    return amount / bound if bound else inf
