"""What all metrics are, for whoever asks; as text for Prometheus in its classic format, or OpenMetrics with exemplars.

Thousands of series take tens of milliseconds, in which no token would pass. So on the loop is read only what is the
scheduler's; instruments may be read in another thread, and the text is made there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client import CollectorRegistry, Metric

_OPENMETRICS = "application/openmetrics-text"


class Snapshot(Collector):
    """What has been read, and the instruments, which are read when they are told; from whatever thread."""

    def __init__(self, read: Sequence[Metric], instruments: CollectorRegistry) -> None:
        self._read = read
        self._instruments = instruments

    def collect(self) -> Iterator[Metric]:
        """Give all of it."""
        yield from self._read
        for family in self._instruments.collect():
            # When a series began tells nobody anything, and there would be one more for each.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def exposed(snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
    """Return the text and its content type, as the header ``Accept`` asks for it."""
    if _OPENMETRICS in accept:
        return openmetrics.generate_latest(snapshot), openmetrics.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
    return generate_latest(snapshot), CONTENT_TYPE_PLAIN_0_0_4
