"""How requests fared by one more thing than their class: by the engine that served them, or by their tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from proxy.core.request import Outcome
from proxy.telemetry.metrics.names import QUEUE_EDGES, TBT_EDGES, TTFT_EDGES, Name
from proxy.telemetry.metrics.pooled import TbtHistogram, binned

if TYPE_CHECKING:
    from proxy.telemetry.metrics.instruments import Instruments
    from proxy.telemetry.metrics.pooled import Pool, PooledHistogram
    from proxy.telemetry.report import RequestReport


class Fared(NamedTuple):
    """How a request fared, worked out once for all that record it."""

    completed: bool
    """Latencies are recorded of completed ones alone, or those that fail fast would look well."""
    trace: dict[str, str] | None
    waited: float | None
    ttft: float | None
    due: list[tuple[str, int, int]]
    """Of each kind of deadline that fell due: how many did, and how many of these were missed."""
    gap_max: float
    gap_mean: float | None
    gaps: list[int] | None
    """Binned; ``None`` where there are none."""
    gap_seconds: float
    """All of these together."""


def fared(report: RequestReport) -> Fared:
    """Return how it fared whose report this is."""
    times, mean = report.times, report.times.gap_mean()
    return Fared(
        report.outcome is Outcome.COMPLETED and report.ended_at is not None,
        None if report.trace is None else report.trace.exemplar,
        report.queue_seconds,
        report.ttft_seconds,
        [(kind, due, missed) for kind, due, missed in report.deadlines() if due],
        times.gap_max,
        mean,
        binned(times.gaps) if times.gap_count else None,
        (mean or 0.0) * len(times.gaps),
    )


class Served:
    """TTFT, TPOT, TBT, time in the queue and deadlines of requests that have ended, under names of their own."""

    def __init__(self, instruments: Instruments, of: str, labels: tuple[str, ...]) -> None:
        """``of`` is the part of the names that tells them apart, and what the first of ``labels`` says."""

        def histograms(name: str, description: str, edges: tuple[float, ...]) -> Pool[PooledHistogram]:
            return instruments.histograms(f"slai.{of}.{name}", f"{description}, by {of}", edges, labels)

        self.ttft = histograms("time_to_first_token", "Arrival to first token", TTFT_EDGES)
        self._tpot = histograms("time_per_output_token", "Mean TBT of a request", TBT_EDGES)
        self._queue = histograms("queue.duration", "Arrival to dispatch", QUEUE_EDGES)
        by_kind = (*labels, "kind")
        self._deadlines = instruments.counts(
            f"slai.{of}.deadlines", f"Deadlines that fell due, by {of}: ttft or tbt", by_kind
        )
        self._misses = instruments.counts(f"slai.{of}.deadline.misses", f"Those of them missed, by {of}", by_kind)
        name = Name(f"slai.{of}.tbt", f"Gaps between tokens of streams that have ended, by {of}", "s", labels)
        self._tbt = instruments.pool(name, TbtHistogram)

    def record(self, labels: tuple[str, ...], found: Fared) -> None:
        """Record a request."""
        trace = found.trace
        if found.waited is not None:
            self._queue[labels].observe(found.waited, trace)
        for kind, due, missed in found.due:
            self._deadlines[*labels, kind] += due
            self._misses[*labels, kind] += missed
        if found.gaps is not None:
            tbt = self._tbt[labels]
            tbt.add(found.gaps, found.gap_seconds)
            tbt.exemplify(found.gap_max, trace)
        if found.completed:
            if found.ttft is not None:
                self.ttft[labels].observe(found.ttft, trace)
            if found.gap_mean is not None:
                self._tpot[labels].observe(found.gap_mean, trace)

    def forget(self, first: str) -> None:
        """Show no more of what ``first``, the first label, stands for."""
        for made in (self.ttft, self._tpot, self._queue, self._tbt, self._deadlines, self._misses):
            made.forget(first)
