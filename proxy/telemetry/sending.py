"""The way of traces and metrics to a collector.

All is sent from threads of their own, over bounded queues: a collector that is slow or not there costs requests
nothing, and what it does not take is lost.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from proxy.telemetry.otlpmetrics import translate
from proxy.telemetry.resource import our_resource
from proxy.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.metrics.export import MetricExporter

    from proxy.telemetry.metrics import Metrics, Snapshot
    from proxy.telemetry.metrics.names import Name
    from proxy.telemetry.otlp import Otlp

FLUSH_SECONDS = 5.0
"""How long what is left may take to go out at the end."""


class Telemetry:
    """What a proxy sends, from its start to its end."""

    def __init__(self, otlp: Otlp, tracing: Tracing | None = None) -> None:
        """``tracing`` takes the place of what ``otlp`` says of traces.

        Raises:
            TelemetryUnavailableError: it is asked for in a way that is not known, or a package for it is missing.
        """
        if tracing is None:
            spans = otlp.spans()
            tracing = Tracing() if spans is None else Tracing.to(spans)
        self.tracing = tracing
        self._exporter = otlp.metrics()
        self._interval = otlp.interval_seconds
        self._push: MetricsPush | None = None

    async def run(self, metrics: Metrics) -> None:
        """Send the metrics again and again, until cancelled."""
        if self._exporter is not None:
            self._push = MetricsPush(self._exporter, metrics)
            while True:
                await asyncio.sleep(self._interval)
                self._push.push()

    async def close(self) -> None:
        """Send what is left, for no longer than ``FLUSH_SECONDS``."""
        closings = [self.tracing.close]
        if self._push is not None:
            self._push.push()
            closings.append(self._push.close)
        await asyncio.to_thread(_call_within, FLUSH_SECONDS, closings)


class MetricsPush:
    """Sends all metrics as they are: read on the loop, as they are the scheduler's, and sent from a thread."""

    def __init__(self, exporter: MetricExporter, metrics: Metrics) -> None:
        self._exporter = exporter
        self._metrics = metrics
        self._began_ns = time.time_ns()
        self._waiting: queue.Queue[tuple[Snapshot, dict[str, Name], int] | None] = queue.Queue(maxsize=1)
        # A daemon, as nothing can end one that waits for a collector.
        self._thread = threading.Thread(target=self._send, name="otlp metrics", daemon=True)
        self._thread.start()

    def push(self) -> None:
        """Send what the metrics are now; nothing if what they were before is not on its way yet."""
        with suppress(queue.Full):
            self._waiting.put_nowait((self._metrics.collect(), self._metrics.names(), time.time_ns()))

    def close(self) -> None:
        """Wait until all is sent. It may take long, see ``Tracing.close``."""
        self._waiting.put(None)
        self._thread.join()
        self._exporter.shutdown()

    def _send(self) -> None:
        resource = our_resource()
        while (found := self._waiting.get()) is not None:
            snapshot, names, now_ns = found
            self._exporter.export(
                translate(snapshot.collect(), names, resource, began_ns=self._began_ns, now_ns=now_ns)
            )


def _call_within(seconds: float, closings: list[Callable[[], None]]) -> None:
    """Call each in a thread of its own and wait for them together, but no longer than so many seconds."""
    threads = [threading.Thread(target=close, name="otlp flush", daemon=True) for close in closings]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
