"""What all metrics are at one time, as text for Prometheus: its classic format, or OpenMetrics with exemplars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import Metric

_OPENMETRICS = "application/openmetrics-text"


class _Collected(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def exposed(families: Sequence[Metric], accept: str = "") -> tuple[bytes, str]:
    """Return the text and its content type, as the header ``Accept`` asks for it.

    It reads nothing but ``families``, so it may run in another thread: thousands of series take tens of milliseconds.
    """
    if _OPENMETRICS in accept:
        return openmetrics.generate_latest(_Collected(families)), openmetrics.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
    return generate_latest(_Collected(families)), CONTENT_TYPE_PLAIN_0_0_4
