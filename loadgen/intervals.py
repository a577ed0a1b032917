"""Exact quantiles, and how far chance alone would move them.

Intervals come from the bootstrap: the figure is computed anew for many draws, with replacement, of as many requests.
What is drawn are whole requests, each with all its gaps, and not single gaps: the gaps of one stream, and those of
streams that shared an engine's steps, resemble each other, so a run of 300 requests with 100,000 gaps knows its p99 TBT
by far less well than 100,000 independent gaps would. (Requests of one run are not quite independent either, since they
wait in one queue; near saturation only several runs, on several seeds, tell how far chance goes.)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from loadgen.sample import Floats, Integers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPLICATES = 200
CONFIDENCE = 0.95


def quantile(values: Floats, q: float) -> float:
    """Return the exact quantile by linear interpolation (numpy's ``linear``); ``nan`` entries are left out.

    Between a finite value and one that never came, it never came. ``nan`` where there is no value.
    """
    ordered = np.sort(values[~np.isnan(values)])
    return _at(ordered, q * (len(ordered) - 1)) if len(ordered) else np.nan


def _at(ordered: Floats, position: float) -> float:
    low = int(position)
    share = position - low
    if not share:
        return float(ordered[low])
    first, second = float(ordered[low]), float(ordered[low + 1])
    return second if not isfinite(second) else first + share * (second - first)


Weights: TypeAlias = Integers
"""How often each request has been drawn."""


class PooledQuantile:
    """A quantile of values of which each request owns several, or one, under any draw of the requests.

    Sorted once; for a draw only the neighbourhood of the quantile is gone through.
    """

    def __init__(self, values: Floats, owners: Integers, requests: int, q: float) -> None:
        known = ~np.isnan(values)
        values, owners = values[known], owners[known]
        order = np.argsort(values, kind="stable")
        self._values, self._owners, self._q = values[order], owners[order], q
        self._counts = np.bincount(owners, minlength=requests)
        size, reach = len(values), max(4096, len(values) // 20)
        self._start, self._end = max(0, int(q * size) - reach), min(size, int(q * size) + reach)
        self._below = np.bincount(self._owners[: self._start], minlength=requests)

    def __call__(self, weights: Weights) -> float:
        total = int(weights @ self._counts)
        if not total:
            return np.nan
        position = self._q * (total - 1)
        before = int(weights @ self._below)
        upto = before + np.cumsum(weights[self._owners[self._start : self._end]])
        values = self._values[self._start : self._end]
        low = int(position)
        high = min(low + 1, total - 1)
        if not (before <= low and len(upto) and high < upto[-1]):
            before, values = 0, self._values
            upto = np.cumsum(weights[self._owners])
        first, second = (float(values[np.searchsorted(upto, rank, side="right")]) for rank in (low, high))
        share = position - low
        if not share:
            return first
        return second if not isfinite(second) else first + share * (second - first)


def draws(requests: int, seed: int, replicates: int = REPLICATES) -> Iterator[Weights]:
    """Yield draws with replacement of as many requests as there are."""
    rng = np.random.default_rng([seed, requests])
    for _ in range(replicates):
        yield np.bincount(rng.integers(requests, size=requests), minlength=requests)


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a figure would lie in 95 of 100 repetitions, as far as a single run can tell."""

    low: float
    high: float
    deviation: float
    """Standard deviation over the draws; ``inf`` where some of them are infinite."""


def bootstrap(statistic: Callable[[Weights], float], requests: int, seed: int = 0) -> Interval | None:
    """Return the percentile interval of a figure; ``None`` where it has no value."""
    if requests < 2:
        return None
    found = np.array([statistic(weights) for weights in draws(requests, seed)])
    found = found[~np.isnan(found)]
    if not len(found):
        return None
    tail = (1 - CONFIDENCE) / 2
    finite = bool(np.isfinite(found).all())
    return Interval(quantile(found, tail), quantile(found, 1 - tail), float(found.std()) if finite else inf)
