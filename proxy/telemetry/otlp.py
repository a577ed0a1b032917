"""Which of traces and metrics an OpenTelemetry collector gets, where it is, and by which protocol.

``--otlp-endpoint`` or the standard variables ``OTEL_*`` switch it on. What the exporters understand (endpoints,
headers, certificates, compression, timeouts) they read for themselves.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from proxy.telemetry.otlpspans import export_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter

    from proxy.telemetry.otlpspans import EndedSpan

_HTTP, _GRPC = "http/protobuf", "grpc"
_INTERVAL_MS = 60_000


class TelemetryUnavailableError(RuntimeError):
    """Traces or metrics were asked for in a way that is not known, or the package that sends them is not installed."""


class _Written:
    """Stands for the message that spans are sent by, which the exporter by HTTP wants for nothing but its bytes."""

    def __init__(self, spans: Sequence[EndedSpan]) -> None:
        self._bytes = export_request(spans)

    def SerializePartialToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Return them."""
        return self._bytes


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
        if (exporters := self._exporters("TRACES", "trace_exporter")) is None:
            return None
        # Should they come to look for it elsewhere, they encode our spans themselves, as any: that takes long, no more.
        vars(exporters)["encode_spans"] = _message if self._protocol("TRACES") == _GRPC else _Written
        spans: SpanExporter = exporters.OTLPSpanExporter(endpoint=self._address("TRACES"))
        return spans

    def metrics(self) -> MetricExporter | None:
        """Return what sends metrics; ``None``: nobody wants them.

        Raises:
            TelemetryUnavailableError: it cannot be had.
        """
        if (exporters := self._exporters("METRICS", "metric_exporter")) is None:
            return None
        metrics: MetricExporter = exporters.OTLPMetricExporter(endpoint=self._address("METRICS"))
        return metrics

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

    def _address(self, signal: str) -> str | None:
        """The collector's, as the flag has it; one that ends with the path of traces is that of before."""
        base = self.endpoint and self.endpoint.rstrip("/").removesuffix("/v1/traces")
        return base if self._protocol(signal) == _GRPC else base and f"{base}/v1/{signal.lower()}"

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

    def _exporters(self, signal: str, module: str) -> ModuleType | None:
        """Return OpenTelemetry's module for the protocol, if the signal is wanted."""
        if not self._wanted(signal):
            return None
        package, extra = ("grpc", "otlp-grpc") if self._protocol(signal) == _GRPC else ("http", "otlp")
        try:
            return import_module(f"opentelemetry.exporter.otlp.proto.{package}.{module}")
        except ImportError as error:
            raise TelemetryUnavailableError(f"OpenTelemetry needs: pip install 'slai-proxy[{extra}]'") from error


def _message(spans: Sequence[EndedSpan]) -> object:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    return ExportTraceServiceRequest.FromString(export_request(spans))


def otlp(endpoint: str | None) -> Otlp:
    """Return what the flag and this process's environment say."""
    return Otlp(endpoint, os.environ)
