"""How requests fared by one more thing than their class: by the engine that served them, or by their tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.telemetry.metrics.names import QUEUE_EDGES, TBT_EDGES, TTFT_EDGES, Name
from proxy.telemetry.metrics.pooled import TbtHistogram, binned

if TYPE_CHECKING:
    from proxy.telemetry.metrics.instruments import Instruments
    from proxy.telemetry.metrics.pooled import Pool, PooledHistogram
    from proxy.telemetry.report import RequestReport

Exemplar = dict[str, str] | None


class Served:
    """TTFT, TPOT, TBT, time in the queue and deadlines of requests that have ended, under names of their own."""

    def __init__(self, instruments: Instruments, of: str, labels: tuple[str, ...]) -> None:
        """``of`` is the part of the names that tells them apart, and what the first of ``labels`` says."""

        def histograms(name: str, description: str, edges: tuple[float, ...]) -> Pool[PooledHistogram]:
            return instruments.histograms(f"slai.{of}.{name}", f"{description}, by {of}", edges, labels)

        self.ttft = histograms("time_to_first_token", "Arrival to first token", TTFT_EDGES)
        self._tpot = histograms("time_per_output_token", "Mean TBT of a request", TBT_EDGES)
        self._queue = histograms("queue.duration", "Arrival to dispatch", QUEUE_EDGES)
        self._first_label = labels[0]
        by_kind = (*labels, "kind")
        self._deadlines = instruments.counters(
            f"slai.{of}.deadlines", f"Deadlines that fell due, by {of}: ttft or tbt", by_kind
        )
        self._misses = instruments.counters(f"slai.{of}.deadline.misses", f"Those of them missed, by {of}", by_kind)
        name = Name(f"slai.{of}.tbt", f"Gaps between tokens of streams that have ended, by {of}", "s", labels)
        self._tbt = instruments.pool(name, TbtHistogram)

    def record(self, labels: tuple[str, ...], report: RequestReport, trace: Exemplar, *, completed: bool) -> None:
        """Record a request; latencies of completed ones alone, or those that fail fast would look well."""
        times = report.times
        if report.queue_seconds is not None:
            self._queue[labels].observe(report.queue_seconds, trace)
        for kind, due, missed in report.deadlines():
            if due:
                self._deadlines[*labels, kind].inc(due)
                self._misses[*labels, kind].inc(missed)
        if times.gap_count:
            tbt = self._tbt[labels]
            tbt.add(binned(times.gaps), (times.gap_mean() or 0.0) * len(times.gaps))
            tbt.exemplify(times.gap_max, trace)
        if completed:
            if report.ttft_seconds is not None:
                self.ttft[labels].observe(report.ttft_seconds, trace)
            if (mean := times.gap_mean()) is not None:
                self._tpot[labels].observe(mean, trace)

    def forget(self, first: str) -> None:
        """Show no more of what ``first``, the first label, stands for."""
        for pool in (self.ttft, self._tpot, self._queue, self._tbt):
            pool.forget(first)
        for counters in (self._deadlines, self._misses):
            counters.forget(self._first_label, first)
