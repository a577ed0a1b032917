"""Gaps between tokens, counted as cheaply as a list index, and exposed like any histogram."""

from __future__ import annotations

import time
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client.core import Exemplar, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from proxy.core.blame import Cause
from proxy.telemetry.metrics.names import TBT_EDGES, Name

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from prometheus_client import Metric

_LABELS_OF_EDGES = (*map(floatToGoString, TBT_EDGES), "+Inf")


def binned(gaps: array[float]) -> list[int]:
    """Return how many of a stream's gaps fall into which bucket; all at once, when it has ended."""
    # They are kept in single precision, in which one of just a deadline's length would be longer than it.
    seconds = np.round(np.frombuffer(gaps, dtype=np.float32).astype(np.float64), 6)
    counted: list[int] = np.bincount(np.searchsorted(TBT_EDGES, seconds), minlength=len(_LABELS_OF_EDGES)).tolist()
    return counted


class TbtHistogram:
    """Counts of gaps between tokens, and why the late ones were late."""

    __slots__ = ("causes", "counts", "exemplars", "sum")

    def __init__(self) -> None:
        self.counts = [0] * len(_LABELS_OF_EDGES)
        self.sum = 0.0
        self.causes = dict.fromkeys(Cause, 0)
        self.exemplars: dict[int, Exemplar] = {}
        """By the bucket: the last trace of a stream whose longest gap fell into it."""

    def observe(self, seconds: float) -> None:
        """Count one gap: the path of every token."""
        self.counts[bisect_left(TBT_EDGES, seconds)] += 1
        self.sum += seconds

    def add(self, counts: list[int], seconds: float) -> None:
        """Count the gaps of a stream that has ended, ``binned``; ``seconds``: all of them together."""
        self.counts = [ours + more for ours, more in zip(self.counts, counts, strict=True)]
        self.sum += seconds

    def blame(self, cause: Cause) -> None:
        """Count why a gap was longer than its deadline."""
        self.causes[cause] += 1

    def exemplify(self, seconds: float, trace: dict[str, str] | None) -> None:
        """Name a trace in which a gap like this can be looked at."""
        if trace is not None:
            self.exemplars[bisect_left(TBT_EDGES, seconds)] = Exemplar(trace, seconds, time.time())

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Cumulated, as Prometheus has them."""
        found: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for number, (edge, total) in enumerate(zip(_LABELS_OF_EDGES, accumulate(self.counts), strict=True)):
            exemplar = self.exemplars.get(number)
            found.append((edge, total) if exemplar is None else (edge, total, exemplar))
        return found


class TbtCollector(Collector):
    """Exposes such histograms, by the values of the labels of ``name``."""

    def __init__(self, name: Name, histograms: dict[tuple[str, ...], TbtHistogram]) -> None:
        self._name = name
        self._histograms = histograms

    def collect(self) -> Iterator[Metric]:
        """Give the one family."""
        family = HistogramMetricFamily(self._name.prometheus, self._name.description, labels=self._name.labels)
        for labels, histogram in self._histograms.copy().items():  # which the loop adds to
            family.add_metric(labels, histogram.buckets(), sum_value=histogram.sum)
        yield family
