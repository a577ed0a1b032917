"""From Prometheus' data model to OpenTelemetry's: the same metrics, under their own names and units."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from proxy import __version__
from proxy.telemetry.metrics.names import Name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import prometheus_client
    from opentelemetry.sdk.resources import Resource
    from prometheus_client.samples import Sample

_CUMULATIVE = AggregationTemporality.CUMULATIVE


def translate(
    families: Iterable[prometheus_client.Metric],
    names: Mapping[str, Name],
    resource: Resource,
    *,
    began_ns: int,
    now_ns: int,
) -> MetricsData:
    """Return families as OpenTelemetry has them; ``names`` are those of our own, others keep Prometheus'.

    ``began_ns``: since when they have been counted.
    """
    translator = _Translator(began_ns, now_ns)
    metrics = [translator.metric(f, names.get(f.name) or Name(f.name, f.documentation)) for f in families if f.samples]
    scope = ScopeMetrics(InstrumentationScope("slai-proxy", __version__), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


class _Translator:
    def __init__(self, began_ns: int, now_ns: int) -> None:
        self._times = began_ns, now_ns

    def metric(self, family: prometheus_client.Metric, name: Name) -> Metric:
        labels = dict(zip(name.prometheus_labels, name.labels, strict=True))
        data: Gauge | Histogram | Sum
        match family.type:
            case "histogram":
                data = Histogram([*self._histograms(family.samples, labels)], _CUMULATIVE)
            case "counter":
                data = Sum([*self._numbers(family.samples, labels)], _CUMULATIVE, is_monotonic=True)
            case _:
                data = Gauge([*self._numbers(family.samples, labels)])
        return Metric(name.otel, name.description, name.unit, data)

    def _numbers(self, samples: Iterable[Sample], labels: Mapping[str, str]) -> Iterator[NumberDataPoint]:
        for sample in samples:
            yield NumberDataPoint(_attributes(sample.labels, labels), *self._times, sample.value)

    def _histograms(self, samples: Iterable[Sample], labels: Mapping[str, str]) -> Iterator[HistogramDataPoint]:
        """Each is a row of buckets, which are cumulated, and then its count and sum."""
        buckets: list[Sample] = []
        for sample in samples:
            if sample.name.endswith("_bucket"):
                buckets.append(sample)
            elif sample.name.endswith("_sum"):
                totals = [0, *(int(bucket.value) for bucket in buckets)]
                edges = [float(bucket.labels["le"]) for bucket in buckets]
                yield HistogramDataPoint(
                    _attributes(sample.labels, labels),
                    *self._times,
                    count=totals[-1],
                    sum=sample.value,
                    bucket_counts=[after - before for before, after in pairwise(totals)],
                    explicit_bounds=[edge for edge in edges if edge < inf],
                    min=None,  # type: ignore[arg-type]  # the format has neither
                    max=None,  # type: ignore[arg-type]
                    exemplars=[*_exemplars(buckets)],
                )
                buckets = []


def _attributes(labels: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {names.get(label, label): value for label, value in labels.items()}


def _exemplars(buckets: Iterable[Sample]) -> Iterator[Exemplar]:
    for bucket in buckets:
        if (found := bucket.exemplar) is not None:
            trace, span = (int(found.labels[name], 16) for name in ("trace_id", "span_id"))
            yield Exemplar({}, found.value, round(float(found.timestamp or 0) * 1e9), span, trace)
