"""One OpenTelemetry span per generation request, with the names of the GenAI semantic conventions (v0.1.0).

Spans are made when the request is over, from its report: nothing is traced while tokens flow. Without an exporter
there are none at all, and a client's ``traceparent`` goes to the engine as it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy import __version__
from proxy.core.request import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

    from proxy.telemetry.report import Breach, RequestReport


class TracingUnavailableError(RuntimeError):
    """Traces were asked for, but the package that sends them is not installed."""


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to an OpenTelemetry collector.

    Raises:
        TracingUnavailableError: the extra ``slai-proxy[otlp]`` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError as error:
        raise TracingUnavailableError("--otlp-endpoint needs: pip install 'slai-proxy[otlp]'") from error
    return OTLPSpanExporter(endpoint=endpoint)


class Tracing:
    """The tracer of this process; with no processor every call is free of effect."""

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        self._provider: TracerProvider | None = None
        if processor is not None:
            resource = Resource.create({"service.name": "slai-proxy", "service.version": __version__})
            self._provider = TracerProvider(resource=resource)
            self._provider.add_span_processor(processor)
            self._tracer = self._provider.get_tracer("slai-proxy", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, exporter: SpanExporter) -> Tracing:
        return cls(BatchSpanProcessor(exporter))

    def begin(self, headers: Mapping[str, str], path: str, now_ns: int) -> Span | None:
        """Begin a request's span, a child of the client's if it sent a valid ``traceparent``."""
        if self._provider is None:
            return None
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        context: Context = self._propagator.extract(carrier)
        return self._tracer.start_span(f"POST {path}", context, SpanKind.SERVER, start_time=now_ns)

    def inject(self, span: Span | None, headers: MutableMapping[str, str]) -> None:
        """Make the engine's spans children of ours."""
        if span is not None:
            self._propagator.inject(headers, trace.set_span_in_context(span))

    def end(self, span: Span | None, report: RequestReport, now: float, now_ns: int) -> None:
        """End the span with what the report says; ``now`` and ``now_ns`` are one instant on either clock."""
        if span is None:
            return
        span.set_attributes(_attributes(report))
        for name, at in (("dispatched", report.dispatched_at), ("first_token", report.times.first_at)):
            if at is not None:
                span.add_event(name, timestamp=now_ns - round((now - at) * 1e9))
        for breach in report.breaches:
            span.add_event("slai.tbt.breach", _breach(breach), timestamp=now_ns - round((now - breach.at) * 1e9))
        if report.outcome not in (Outcome.COMPLETED, Outcome.CLIENT_GONE):
            span.set_status(Status(StatusCode.ERROR, report.reason))
        span.end(now_ns)

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()


def _breach(breach: Breach) -> dict[str, str | int | float]:
    blame = breach.blame
    found: dict[str, str | int | float | None] = {
        "slai.tbt.gap": breach.gap_seconds,
        "slai.tbt.cause": blame.cause.value,
        "slai.step.duration": blame.step_seconds or None,
        "slai.step.prompt_tokens": blame.prompt_tokens or None,
        "slai.step.largest_prompt.request.id": blame.request_id,
        "slai.step.largest_prompt.tokens": blame.request_tokens or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _attributes(report: RequestReport) -> dict[str, str | int | float | bool]:
    times = report.times
    found: dict[str, str | int | float | bool | None] = {
        "gen_ai.operation.name": report.operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": report.model or None,
        "gen_ai.request.stream": report.stream,
        "gen_ai.request.max_tokens": report.max_tokens,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.output_tokens or None,
        "gen_ai.response.time_to_first_chunk": report.ttft_seconds,
        "http.response.status_code": report.status,
        "error.type": report.reason,
        "slai.request.id": report.request_id,
        "slai.request.client_id": report.client_id,
        "slai.class": report.request_class.name,
        "slai.outcome": report.outcome and report.outcome.value,
        "slai.engine": report.engine_id,
        "slai.dispatches": report.dispatches,
        "slai.queue.duration": report.queue_seconds,
        "slai.ttft.missed": report.missed_ttft,
        "slai.tbt.max": times.gap_max if times.gap_count else None,
        "slai.tbt.p99": times.gap_p99(),
        "slai.tbt.mean": times.gap_mean(),
        "slai.tbt.misses": times.misses,
    }
    return {name: value for name, value in found.items() if value is not None}
