"""How a metric is declared: once, by OpenTelemetry's name and unit; Prometheus' follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

OTHER = "other"
"""Label value that stands for whatever is not known beforehand: clients must not be able to make series."""

TTFT_EDGES = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TBT_EDGES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
QUEUE_EDGES = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
DURATION_EDGES = (0.1, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
LAG_EDGES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
DECISION_EDGES = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)

_UNITS = {"s": "seconds", "By": "bytes"}


@dataclass(frozen=True, slots=True)
class Name:
    """A metric's name and what it is; ``unit`` in UCUM's terms, ``labels`` as OpenTelemetry's attributes."""

    otel: str
    description: str
    unit: str = ""
    labels: tuple[str, ...] = ()

    @property
    def prometheus(self) -> str:
        """As Prometheus has it, without the ``_total`` of a counter."""
        name, unit = _plain(self.otel), _UNITS.get(self.unit, "")
        return name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"

    @property
    def prometheus_labels(self) -> tuple[str, ...]:
        """As Prometheus has them."""
        return tuple(map(_plain, self.labels))

    def family(self, points: Iterable[tuple[tuple[str, ...], float]], *, counts: bool) -> Metric:
        """Return what has been read of it: values by those of its labels. ``counts``: they only grow."""
        kind = CounterMetricFamily if counts else GaugeMetricFamily
        family = kind(self.prometheus, self.description, labels=self.prometheus_labels)
        for labels, value in points:
            family.add_metric(labels, float(value))
        return family


def _plain(name: str) -> str:
    return name.replace(".", "_")
