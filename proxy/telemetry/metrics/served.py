"""How requests fared by one more thing than their class: by the engine that served them, or by their tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.telemetry.metrics.names import QUEUE_EDGES, TBT_EDGES, TTFT_EDGES, Name
from proxy.telemetry.metrics.pooled import TbtCollector, TbtHistogram, binned

if TYPE_CHECKING:
    from prometheus_client import Histogram

    from proxy.telemetry.metrics.names import Instruments
    from proxy.telemetry.report import RequestReport

Exemplar = dict[str, str] | None


class Served:
    """TTFT, TPOT, TBT, time in the queue and deadlines of requests that have ended, under names of their own."""

    def __init__(self, instruments: Instruments, of: str, labels: tuple[str, ...]) -> None:
        """``of`` is the part of the names that tells them apart, and what the first of ``labels`` says."""

        def histogram(name: str, description: str, edges: tuple[float, ...]) -> Histogram:
            return instruments.histogram(f"slai.{of}.{name}", f"{description}, by {of}", edges, labels)

        self.ttft = histogram("time_to_first_token", "Arrival to first token", TTFT_EDGES)
        self._tpot = histogram("time_per_output_token", "Mean TBT of a request", TBT_EDGES)
        self._queue = histogram("queue.duration", "Arrival to dispatch", QUEUE_EDGES)
        self._first_label = labels[0]
        by_kind = (*labels, "kind")
        self._deadlines = instruments.counter(
            f"slai.{of}.deadlines", f"Deadlines that fell due, by {of}: ttft or tbt", by_kind
        )
        self._misses = instruments.counter(f"slai.{of}.deadline.misses", f"Those of them missed, by {of}", by_kind)
        self._tbt: dict[tuple[str, ...], TbtHistogram] = {}
        name = Name(f"slai.{of}.tbt", f"Gaps between tokens of streams that have ended, by {of}", "s", labels)
        instruments.registry.register(TbtCollector(instruments.note(name), self._tbt))

    def record(self, labels: tuple[str, ...], report: RequestReport, trace: Exemplar, *, completed: bool) -> None:
        """Record a request; latencies of completed ones alone, or those that fail fast would look well."""
        times = report.times
        if report.queue_seconds is not None:
            self._queue.labels(*labels).observe(report.queue_seconds, trace)
        for kind, due, missed in report.deadlines():
            if due:
                self._deadlines.labels(*labels, kind).inc(due)
                self._misses.labels(*labels, kind).inc(missed)
        if times.gap_count:
            tbt = self._tbt.setdefault(labels, TbtHistogram())
            tbt.add(binned(times.gaps), (times.gap_mean() or 0.0) * len(times.gaps))
            tbt.exemplify(times.gap_max, trace)
        if completed:
            if report.ttft_seconds is not None:
                self.ttft.labels(*labels).observe(report.ttft_seconds, trace)
            if (mean := times.gap_mean()) is not None:
                self._tpot.labels(*labels).observe(mean, trace)

    def forget(self, first: str) -> None:
        """Show no more of what ``first``, the first label, stands for."""
        for instrument in (self.ttft, self._tpot, self._queue, self._deadlines, self._misses):
            instrument.remove_by_labels({self._first_label: first})
        for labels in [found for found in self._tbt if found[0] == first]:
            del self._tbt[labels]
