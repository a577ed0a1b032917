"""Which of traces and metrics an OpenTelemetry collector gets, where it is, and by which protocol.

``--otlp-endpoint`` or the standard variables ``OTEL_*`` switch it on. What the exporters understand (endpoints,
headers, certificates, compression, timeouts) they read for themselves.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter

_HTTP, _GRPC = "http/protobuf", "grpc"
_INTERVAL_MS = 60_000


class TelemetryUnavailableError(RuntimeError):
    """Traces or metrics were asked for in a way that is not known, or the package that sends them is not installed."""


@dataclass(frozen=True, slots=True)
class Otlp:
    """What is to be sent, and how."""

    endpoint: str | None
    """Of the collector, for both; ``None``: as the variables say."""
    environment: Mapping[str, str]

    def spans(self) -> SpanExporter | None:
        """Return what sends spans; ``None``: nobody wants them.

        Raises:
            TelemetryUnavailableError: it cannot be had.
        """
        if not self._wanted("TRACES"):
            return None
        try:
            if self._protocol("TRACES") == _GRPC:
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc

                spans: SpanExporter = ByGrpc(endpoint=self._base)
                return spans
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp

            return ByHttp(endpoint=self._base and f"{self._base}/v1/traces")
        except ImportError as error:
            raise self._missing("TRACES") from error

    def metrics(self) -> MetricExporter | None:
        """Return what sends metrics; ``None``: nobody wants them.

        Raises:
            TelemetryUnavailableError: it cannot be had.
        """
        if not self._wanted("METRICS"):
            return None
        try:
            if self._protocol("METRICS") == _GRPC:
                from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as ByGrpc

                metrics: MetricExporter = ByGrpc(endpoint=self._base)
                return metrics
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as ByHttp

            return ByHttp(endpoint=self._base and f"{self._base}/v1/metrics")
        except ImportError as error:
            raise self._missing("METRICS") from error

    @property
    def interval_seconds(self) -> float:
        """Between two times that metrics are sent.

        Raises:
            TelemetryUnavailableError: ``OTEL_METRIC_EXPORT_INTERVAL`` is no number of milliseconds.
        """
        told = self.environment.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip() or str(_INTERVAL_MS)
        if not told.isdecimal() or not int(told):
            raise TelemetryUnavailableError(f"OTEL_METRIC_EXPORT_INTERVAL={told} is no number of milliseconds")
        return int(told) / 1000

    @property
    def _base(self) -> str | None:
        """The collector's address, as the flag has it; one that ends with the path of traces is that of before."""
        return self.endpoint and self.endpoint.rstrip("/").removesuffix("/v1/traces")

    def _wanted(self, signal: str) -> bool:
        if self.environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return False
        name = f"OTEL_{signal}_EXPORTER"
        chosen = self.environment.get(name, "").strip().lower()
        if chosen in ("none", "prometheus"):  # /metrics is always there
            return False
        if chosen not in ("", "otlp"):
            raise TelemetryUnavailableError(f"{name}={chosen}: it can be otlp or none")
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        return bool(chosen or self.endpoint or any(self.environment.get(e, "").strip() for e in endpoints))

    def _protocol(self, signal: str) -> str:
        of_all = "OTEL_EXPORTER_OTLP_PROTOCOL"
        of_signal = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
        chosen = self.environment.get(of_signal) or self.environment.get(of_all) or _HTTP
        if chosen not in (_HTTP, _GRPC):
            raise TelemetryUnavailableError(f"{of_all}={chosen}: it can be {_HTTP} or {_GRPC}")
        return chosen

    def _missing(self, signal: str) -> TelemetryUnavailableError:
        extra = "otlp-grpc" if self._protocol(signal) == _GRPC else "otlp"
        return TelemetryUnavailableError(f"OpenTelemetry needs: pip install 'slai-proxy[{extra}]'")


def otlp(endpoint: str | None) -> Otlp:
    """Return what the flag and this process's environment say."""
    return Otlp(endpoint, os.environ)
