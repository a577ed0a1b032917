"""Gaps between tokens, counted as cheaply as a list index, and exposed like any histogram."""

from __future__ import annotations

import time
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from prometheus_client.core import Exemplar, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from proxy.core.blame import Cause
from proxy.telemetry.metrics.names import TBT_EDGES

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client import Metric

    from proxy.telemetry.metrics.names import Name

Made = TypeVar("Made")


def binned(gaps: array[float]) -> list[int]:
    """Return how many of a stream's gaps fall into which bucket; all at once, when it has ended."""
    # They are kept in single precision, in which one of just a deadline's length would be longer than it.
    seconds = np.round(np.frombuffer(gaps, dtype=np.float32).astype(np.float64), 6)
    counted: list[int] = np.bincount(np.searchsorted(TBT_EDGES, seconds), minlength=len(TBT_EDGES) + 1).tolist()
    return counted


class PooledHistogram:
    """Counts of durations by buckets. The library's own takes a lock for each value, and looks through all buckets."""

    __slots__ = ("counts", "edges", "exemplars", "sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, tuple[dict[str, str], float, float]] = {}
        """By the bucket: the last trace of what fell into it, its value, and the time."""

    def observe(self, seconds: float, trace: dict[str, str] | None = None) -> None:
        """Count one; ``trace``: in which it can be looked at."""
        bucket = bisect_left(self.edges, seconds)
        self.counts[bucket] += 1
        self.sum += seconds
        if trace is not None:
            self.exemplars[bucket] = trace, seconds, time.time()

    def add(self, counts: list[int], seconds: float) -> None:
        """Count many at once, ``binned``; ``seconds``: all of them together."""
        self.counts = [ours + more for ours, more in zip(self.counts, counts, strict=True)]
        self.sum += seconds

    def exemplify(self, seconds: float, trace: dict[str, str] | None) -> None:
        """Name a trace in which one like this can be looked at."""
        if trace is not None:
            self.exemplars[bisect_left(self.edges, seconds)] = trace, seconds, time.time()

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Cumulated, as Prometheus has them."""
        found: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        told = (*map(floatToGoString, self.edges), "+Inf")
        for number, (edge, total) in enumerate(zip(told, accumulate(self.counts), strict=True)):
            exemplar = self.exemplars.get(number)
            found.append((edge, total) if exemplar is None else (edge, total, Exemplar(*exemplar)))
        return found


class TbtHistogram(PooledHistogram):
    """Counts of gaps between tokens, and why the late ones were late."""

    __slots__ = ("causes",)

    def __init__(self) -> None:
        super().__init__(TBT_EDGES)
        self.causes = dict.fromkeys(Cause, 0)

    def blame(self, cause: Cause) -> None:
        """Count why a gap was longer than its deadline."""
        self.causes[cause] += 1


class Pool(dict[tuple[str, ...], Made]):
    """What is counted, by the values of its labels; each is made when it is first asked for."""

    def __init__(self, make: Callable[[], Made]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, labels: tuple[str, ...]) -> Made:
        made = self[labels] = self._make()
        return made

    def forget(self, first: str) -> None:
        """Show no more of those whose first label has this value."""
        for labels in [found for found in self if found[0] == first]:
            del self[labels]


class PoolCollector(Collector):
    """Exposes histograms."""

    def __init__(self, name: Name, pool: Pool[Any]) -> None:
        self._name = name
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """Give the one family."""
        name = self._name
        family = HistogramMetricFamily(name.prometheus, name.description, labels=name.prometheus_labels)
        for labels, histogram in self._pool.copy().items():  # which the loop adds to
            family.add_metric(labels, histogram.buckets(), sum_value=histogram.sum)
        yield family
