"""The spans of a generation request, with the names of the GenAI semantic conventions (v0.1.0).

One of kind SERVER is the request as its client sees it, its time in the queue included; each attempt at an engine is a
child of kind CLIENT, as is each slice that is sent ahead, and the engine's own spans are children of these. They say
what they have to say when they end, from the request's report: nothing is traced while tokens flow. Without an exporter
there are none at all, and a client's ``traceparent`` goes to the engine as it came.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy import __version__
from proxy.core.codec import LONGEST_TEXT
from proxy.core.request import Outcome
from proxy.telemetry.resource import our_resource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

    from proxy.core.actions import Slice
    from proxy.telemetry.report import Breach, RequestReport

Value = str | int | float | bool | tuple[str]


@dataclass(slots=True)
class Trace:
    """The spans of one request."""

    server: Span
    client: Span | None = None
    """Of the attempt under way."""

    @property
    def exemplar(self) -> dict[str, str] | None:
        """What makes a measurement lead here; ``None`` if nobody keeps the spans."""
        context = self.server.get_span_context()
        if not context.trace_flags.sampled:
            return None
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


@dataclass(slots=True)
class SliceTrace:
    """What there is to tell of a slice, by who sends it."""

    headers: dict[str, str] = field(default_factory=dict)
    """To send with it."""
    status: int | None = None
    failure: str | None = None
    cached_tokens: int | None = None
    """That the engine found of what was sent before."""
    cached: bool = False


class Tracing:
    """The tracer of this process; with no processor every call is free of effect."""

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        """Which requests are traced ``OTEL_TRACES_SAMPLER`` says; by default all but those whose clients do not."""
        self._provider: TracerProvider | None = None
        if processor is not None:
            self._provider = TracerProvider(resource=our_resource(), shutdown_on_exit=False)
            self._provider.add_span_processor(processor)
            self._tracer = self._provider.get_tracer("slai-proxy", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, exporter: SpanExporter) -> Tracing:
        """Trace to an exporter, from a thread of its own; spans for which its queue has no room are lost."""
        return cls(BatchSpanProcessor(exporter))

    def begin(self, headers: Mapping[str, str], path: str, now_ns: int) -> Trace | None:
        """Begin a request's span, a child of the client's if it sent a valid ``traceparent``."""
        if self._provider is None:
            return None
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        context: Context = self._propagator.extract(carrier)
        return Trace(self._tracer.start_span(f"POST {path}", context, SpanKind.SERVER, start_time=now_ns))

    def inject(self, spans: Trace | None, headers: MutableMapping[str, str]) -> None:
        """Make an engine's spans children of what is under way."""
        if spans is not None:
            self._propagator.inject(headers, trace.set_span_in_context(spans.client or spans.server))

    def attempt(self, report: RequestReport, headers: MutableMapping[str, str]) -> None:
        """Begin the span of an attempt at the engine that the report names; ``headers`` go there."""
        if (spans := report.trace) is not None:
            name = f"{report.operation} {_clean(report.model)}".rstrip()
            context = trace.set_span_in_context(spans.server)
            spans.client = self._tracer.start_span(name, context, SpanKind.CLIENT, start_time=time.time_ns())
            self.inject(spans, headers)

    @contextmanager
    def slice(self, report: RequestReport, piece: Slice) -> Iterator[SliceTrace]:
        """A span of kind CLIENT around a slice that is sent ahead of a request."""
        if (spans := report.trace) is None:
            yield SliceTrace()
            return
        context = trace.set_span_in_context(spans.server)
        name = f"text_completion {_clean(report.model)}".rstrip()
        span = self._tracer.start_span(name, context, SpanKind.CLIENT, start_time=time.time_ns())
        told = SliceTrace()
        self._propagator.inject(told.headers, trace.set_span_in_context(span))
        try:
            yield told
        finally:
            if span.is_recording():
                found = {
                    **_called("text_completion", report, piece.engine_id),
                    "gen_ai.usage.cache_read.input_tokens": told.cached_tokens,
                    "http.response.status_code": told.status,
                    "error.type": told.failure or (None if told.status else "cancelled"),
                    "slai.slice.number": piece.number,
                    "slai.slice.tokens": piece.tokens - piece.held_tokens,
                    "slai.slice.held_tokens": piece.held_tokens,
                    "slai.slice.cached": told.cached,
                }
                span.set_attributes(_told(found))
                if told.failure is not None:
                    span.set_status(Status(StatusCode.ERROR, told.failure))
            span.end(time.time_ns())

    def turned_away(self, report: RequestReport, why: str, status: int | None = None) -> None:
        """End the span of an attempt that the engine has not begun with."""
        if (spans := report.trace) is None or (span := spans.client) is None:
            return
        spans.client = None
        found = {**_attempt(report), "error.type": why, "http.response.status_code": status}
        span.set_attributes(_told(found))
        span.set_status(Status(StatusCode.ERROR, why))
        span.end(time.time_ns())

    def end(self, spans: Trace | None, report: RequestReport, now: float, now_ns: int) -> None:
        """End the spans with what the report says; ``now`` and ``now_ns`` are one instant on either clock."""
        if spans is None:
            return
        for span in (spans.client, spans.server):
            if span is None:
                continue
            if span.is_recording():
                _describe(span, report, lambda at: now_ns - round((now - at) * 1e9), is_attempt=span is spans.client)
            span.end(now_ns)

    def close(self) -> None:
        """Send what is left. It may take long: the exporter waits for a collector that is slow or not there."""
        if self._provider is not None:
            self._provider.shutdown()


def _describe(span: Span, report: RequestReport, instant: Callable[[float], int], *, is_attempt: bool) -> None:
    first_at, dispatched_at = report.times.first_at, report.dispatched_at
    if is_attempt:
        since_sent = None if first_at is None or dispatched_at is None else first_at - dispatched_at
        found = {**_attempt(report), **_answer(report), "gen_ai.response.time_to_first_chunk": since_sent}
    else:
        found = {**_answer(report), **_request(report)}
        if dispatched_at is not None:
            waited = {"slai.queue.duration": report.queue_seconds, "slai.engine": report.engine_id}
            span.add_event("dispatched", _told(waited), instant(dispatched_at))
    span.set_attributes(_told(found))
    if first_at is not None:
        span.add_event("first_token", timestamp=instant(first_at))
    if not is_attempt:
        for breach in report.breaches:
            span.add_event("slai.tbt.breach", _told(_breach(breach, report)), instant(breach.at))
    if report.outcome not in (Outcome.COMPLETED, Outcome.CLIENT_GONE):
        span.set_status(Status(StatusCode.ERROR, report.reason))


def _clean(text: str) -> str:
    """Make of what others sent something that can be sent on: what cannot would take a whole batch with it."""
    return text[:LONGEST_TEXT].encode(errors="replace").decode()


def _told(found: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in found.items() if value is not None}


def _breach(breach: Breach, report: RequestReport) -> dict[str, Value | None]:
    blame = breach.blame
    return {
        "slai.tbt.gap": breach.gap_seconds,
        "slai.tbt.deadline": report.times.tbt_seconds,
        "slai.tbt.cause": blame.cause.value,
        "slai.engine": report.engine_id,
        "slai.step.duration": blame.step_seconds or None,
        "slai.step.prompt_tokens": blame.prompt_tokens or None,
        "slai.step.largest_prompt.request.id": blame.request_id,
        "slai.step.largest_prompt.tokens": blame.request_tokens or None,
    }


def _attempt(report: RequestReport) -> dict[str, Value | None]:
    """Describe whom the request went to."""
    return _called(report.operation, report, report.engine_id)


def _called(operation: str, report: RequestReport, engine_id: str | None) -> dict[str, Value | None]:
    engine = urlsplit(engine_id or "")
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": _clean(report.model) or None,
        "server.address": engine.hostname,
        "server.port": engine.port,
        "slai.engine": engine_id,
        "slai.request.id": report.request_id,
    }


def _answer(report: RequestReport) -> dict[str, Value | None]:
    """Describe what was asked for and came of it, in the terms of the GenAI conventions."""
    return {
        "gen_ai.operation.name": report.operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": _clean(report.model) or None,
        "gen_ai.request.stream": report.stream,
        "gen_ai.request.max_tokens": report.max_tokens,
        "gen_ai.request.choice.count": report.sequences if report.sequences > 1 else None,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.output_tokens or None,
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        "gen_ai.response.finish_reasons": report.finish_reason and (_clean(report.finish_reason),),
        "gen_ai.response.time_to_first_chunk": report.ttft_seconds,
        "http.response.status_code": report.status,
        "error.type": report.reason,
    }


def _request(report: RequestReport) -> dict[str, Value | None]:
    """Describe what the proxy did with it."""
    times = report.times
    return {
        "http.request.method": "POST",
        "url.path": report.path or None,
        "slai.request.id": report.request_id,
        "slai.request.client_id": report.client_id,
        "slai.class": report.request_class.name,
        "slai.tenant": report.tenant or None,
        "slai.outcome": report.outcome and report.outcome.value,
        "slai.engine": report.engine_id,
        "slai.dispatches": report.dispatches,
        "slai.replays": report.replays or None,
        "slai.queue.duration": report.queue_seconds,
        "slai.ttft.missed": report.missed_ttft,
        "slai.tbt.max": times.gap_max if times.gap_count else None,
        "slai.tbt.p99": times.gap_p99(),
        "slai.tbt.mean": times.gap_mean(),
        "slai.tbt.misses": times.misses,
    }
