"""What tenants are guaranteed: so many tokens a minute, which come before whatever is shared.

Up to its guarantee a tenant's work goes before all that is beyond anybody's, and need leave nothing free for others.
What is beyond is shared by weight (``fairness``), in the room that the guaranteed leave. The account is a token bucket,
full at first. A request that it lets go may leave it in debt, which is paid back before another goes by it.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from proxy.core.quota import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


BURST_SECONDS = 10.0
"""An account holds what comes in so long. More would let a flood begin with a burst that others wait behind; less does
not hurt who is within its rate, as what is beyond has to wait only where there is much to do."""


class Guarantees:
    """The accounts of those tenants that are guaranteed anything, for one pool of engines."""

    def __init__(self, tokens_per_minute: Mapping[str, int] | None = None) -> None:
        self._buckets: dict[str, TokenBucket] = {}
        self.change(tokens_per_minute or {}, 0.0)

    def __iter__(self) -> Iterator[str]:
        """Give the tenants that have one."""
        return iter(self._buckets)

    def change(self, tokens_per_minute: Mapping[str, int], now: float) -> None:
        """Guarantee other rates from now on; what was used of the last minute stays used."""
        known, self._buckets = self._buckets, {}
        for tenant, limit in tokens_per_minute.items():
            self._buckets[tenant] = bucket = known.get(tenant) or TokenBucket(limit, now, BURST_SECONDS)
            bucket.resize(limit, now)

    def left(self, tenant: str, now: float) -> float:
        """Return the part of its account that the tenant has left; 0 or less: its work is beyond."""
        bucket = self._buckets.get(tenant)
        return 0.0 if bucket is None else bucket.level(now) / bucket.capacity

    def ahead(self, tenant: str, now: float) -> tuple[float, float]:
        """By what guaranteed work is ordered before all that is not: whose guarantee is used less goes first."""
        return -inf, -self.left(tenant, now)

    def use(self, tenant: str, tokens: float, now: float) -> None:
        """Take so many tokens out of the account."""
        bucket = self._buckets.get(tenant)
        if bucket is not None:
            bucket.take(tokens, now)

    def correct(self, tenant: str, tokens: float) -> None:
        """Change the account without a release: what was taken before was too little, or (negative) too much."""
        bucket = self._buckets.get(tenant)
        if bucket is not None:
            bucket.correct(tokens)
