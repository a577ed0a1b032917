"""Who holds how much of the KV cache, and what stays free for whom.

A flow that keeps the cache full makes everybody else wait for its answers to end, however early they would be their
turn. So what a flow held lately stays free for it while it has nothing to release: others may use the rest. With one
flow, nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.fairness import Flow

SPAN_SECONDS = 60.0
"""What a flow held at most in this span of time and the one before is kept for it."""


@dataclass(slots=True)
class _Holding:
    tokens: float = 0.0
    peak: float = 0.0
    """The most tokens in this span."""
    earlier_peak: float = 0.0
    """The most in the one before."""
    longest: float = 0.0
    """The most that one request held in this span."""
    earlier_longest: float = 0.0
    span_began_at: float = 0.0
    waiting: bool = False
    kept: float = 0.0
    """What it adds to ``Occupancy.kept``."""


class Occupancy:
    """The flows of one pool of engines; O(1) for every change, and nothing of a flow is kept that was gone for long."""

    def __init__(self, span_seconds: float = SPAN_SECONDS) -> None:
        self._span_seconds = span_seconds
        self._holdings: dict[Flow, _Holding] = {}  # in the order of the last time that they took something
        self._kept = 0.0
        self._keepers = 0  # flows for which anything is kept: sums of their tokens may not come back to nothing

    def __len__(self) -> int:
        return len(self._holdings)

    def kept_for_others(self, flow: Flow) -> float:
        """Tokens of KV cache that this flow has to leave free."""
        own = self._holdings.get(flow)
        own_kept = own.kept if own is not None else 0.0
        return max(0.0, self._kept - own_kept) if self._keepers > (own_kept > 0) else 0.0

    def held(self, flow: Flow) -> float:
        """Tokens that the flow's requests are said to hold."""
        holding = self._holdings.get(flow)
        return 0.0 if holding is None else holding.tokens

    def take(self, flow: Flow, tokens: float, now: float) -> None:
        """Note that a request of the flow is released and will hold so many tokens."""
        holding = self._holdings.pop(flow, None) or _Holding(span_began_at=now)
        self._holdings[flow] = holding
        passed = now - holding.span_began_at
        if passed >= self._span_seconds:
            holding.earlier_peak = holding.peak if passed < 2 * self._span_seconds else holding.tokens
            holding.earlier_longest = holding.longest if passed < 2 * self._span_seconds else 0.0
            holding.peak, holding.longest, holding.span_began_at = holding.tokens, 0.0, now
        holding.tokens += tokens
        holding.peak, holding.longest = max(holding.peak, holding.tokens), max(holding.longest, tokens)
        self._recount(holding)
        self._forget_before(now - 2 * self._span_seconds)

    def give(self, flow: Flow, tokens: float) -> None:
        """Note that a request of the flow is over that was said to hold so many tokens."""
        holding = self._holdings.get(flow)
        if holding is not None:
            holding.tokens -= tokens
            self._recount(holding)

    def wait(self, flow: Flow, *, waiting: bool) -> None:
        """Note whether the flow has a waiting request: then its turn decides what it gets, and nothing is kept."""
        holding = self._holdings.setdefault(flow, _Holding())
        holding.waiting = waiting
        self._recount(holding)

    def know(self, flow: Flow) -> None:
        """As a ``wait`` that is over at once."""
        if flow not in self._holdings:
            self._holdings[flow] = _Holding()

    def _recount(self, holding: _Holding) -> None:
        peak = max(holding.peak, holding.earlier_peak)
        kept = 0.0 if holding.waiting else max(peak - holding.tokens, holding.longest, holding.earlier_longest)
        self._keep(holding, max(kept, 0.0))

    def _keep(self, holding: _Holding, tokens: float) -> None:
        self._kept += tokens - holding.kept
        self._keepers += (tokens > 0) - (holding.kept > 0)
        holding.kept = tokens

    def _forget_before(self, time: float) -> None:
        while True:
            flow, holding = next(iter(self._holdings.items()))
            if holding.span_began_at > time:
                return
            if holding.tokens > 0 or holding.waiting:  # it goes on: keep what it has
                del self._holdings[flow]
                holding.peak = holding.earlier_peak = holding.tokens
                holding.longest = holding.earlier_longest = 0.0
                holding.span_began_at = time + 2 * self._span_seconds
                self._holdings[flow] = holding
                self._recount(holding)
            else:
                self._keep(holding, 0.0)
                del self._holdings[flow]
