"""The spans of a generation request, with the names of the GenAI semantic conventions (v0.1.0).

One of kind SERVER is the request as its client sees it, its time in the queue included; each attempt at an engine is a
child of kind CLIENT, as is each slice that is sent ahead, and the engine's own spans are children of these. Until it
ends a span is no more than its name and numbers; then it is made at once of the request's report, if it is sampled.
Without an exporter there are none, and a client's ``traceparent`` goes to the engine as it came.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import getrandbits
from typing import TYPE_CHECKING

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Event, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy import __version__
from proxy.core.request import Outcome
from proxy.telemetry import genai
from proxy.telemetry.otlpspans import EndedSpan
from proxy.telemetry.resource import our_resource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping, Sequence

    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.util.types import AnyValue

    from proxy.core.actions import Slice
    from proxy.telemetry.report import RequestReport

_SCOPE = InstrumentationScope("slai-proxy", __version__)
_ROOT = Context()
_WELL = Status(StatusCode.UNSET)


@dataclass(frozen=True, slots=True)
class Begun:
    """A span that has not ended."""

    name: str
    kind: SpanKind
    context: SpanContext
    parent: SpanContext | None
    began_ns: int

    def child(self, name: str) -> Begun:
        """Begin a span of kind CLIENT within this one."""
        parent = self.context
        own = SpanContext(parent.trace_id, _new_id(64), False, parent.trace_flags, parent.trace_state)
        return Begun(name, SpanKind.CLIENT, own, parent, time.time_ns())

    def inject(self, headers: MutableMapping[str, str]) -> None:
        """Make it the parent of what is begun where these are sent."""
        own = self.context
        headers["traceparent"] = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"
        if own.trace_state:
            headers["tracestate"] = own.trace_state.to_header()


@dataclass(slots=True)
class Trace:
    """The spans of one request."""

    server: Begun
    client: Begun | None = None
    """Of the attempt under way, if they are sampled."""

    @property
    def sampled(self) -> bool:
        """Whether somebody keeps them."""
        return self.server.context.trace_flags.sampled

    @property
    def exemplar(self) -> dict[str, str] | None:
        """What makes a measurement lead here; ``None`` if nobody keeps the spans."""
        if not self.sampled:
            return None
        context = self.server.context
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
    """Makes this process's spans; with no processor every call is free of effect."""

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        """Which requests are traced ``OTEL_TRACES_SAMPLER`` says; by default all but those whose clients do not."""
        self._processor = processor
        if processor is not None:
            provider = TracerProvider(resource=our_resource(), shutdown_on_exit=False)
            self._resource, self._sampler = provider.resource, provider.sampler
            limited = any(name.startswith("OTEL_") and name.endswith("_LIMIT") for name in os.environ)
            self._limits = SpanLimits() if limited else None  # we are far from those that hold by default
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, exporter: SpanExporter) -> Tracing:
        """Trace to an exporter, from a thread of its own; spans for which its queue has no room are lost."""
        return cls(BatchSpanProcessor(exporter))

    def begin(self, headers: Mapping[str, str], path: str, now_ns: int) -> Trace | None:
        """Begin a request's span, a child of the client's if it sent a valid ``traceparent``."""
        if self._processor is None:
            return None
        around, parent = _ROOT, None
        if "traceparent" in headers:
            carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
            around = self._propagator.extract(carrier)
            sent = get_current_span(around).get_span_context()
            parent = sent if sent.is_valid else None
        name = f"POST {path}"
        trace_id = _new_id(128) if parent is None else parent.trace_id
        sampling = self._sampler.should_sample(around, trace_id, name, SpanKind.SERVER)
        flags = TraceFlags.RANDOM_TRACE_ID if parent is None else parent.trace_flags & TraceFlags.RANDOM_TRACE_ID
        flags |= TraceFlags.SAMPLED if sampling.decision is Decision.RECORD_AND_SAMPLE else 0
        own = SpanContext(trace_id, _new_id(64), False, TraceFlags(flags), sampling.trace_state)
        return Trace(Begun(name, SpanKind.SERVER, own, parent, now_ns))

    def inject(self, spans: Trace | None, headers: MutableMapping[str, str]) -> None:
        """Make an engine's spans children of what is under way."""
        if spans is not None:
            (spans.client or spans.server).inject(headers)

    def attempt(self, report: RequestReport, headers: MutableMapping[str, str]) -> None:
        """Begin the span of an attempt at the engine that the report names; ``headers`` go there."""
        if (spans := report.trace) is not None:
            if spans.sampled:
                spans.client = spans.server.child(f"{report.operation} {genai.clean(report.model)}".rstrip())
            self.inject(spans, headers)

    @contextmanager
    def slice(self, report: RequestReport, piece: Slice) -> Iterator[SliceTrace]:
        """A span of kind CLIENT around a slice that is sent ahead of a request."""
        told = SliceTrace()
        if (spans := report.trace) is None:
            yield told
            return
        span = spans.server.child(f"text_completion {genai.clean(report.model)}".rstrip())
        span.inject(told.headers)
        try:
            yield told
        finally:
            if spans.sampled:
                found = {
                    **genai.called("text_completion", report, piece.engine_id),
                    "gen_ai.usage.cache_read.input_tokens": told.cached_tokens,
                    "http.response.status_code": told.status,
                    "error.type": told.failure or (None if told.status else "cancelled"),
                    "slai.slice.number": piece.number,
                    "slai.slice.tokens": piece.tokens - piece.held_tokens,
                    "slai.slice.held_tokens": piece.held_tokens,
                    "slai.slice.cached": told.cached,
                }
                self._end(span, found, time.time_ns(), _WELL if told.failure is None else _failed(told.failure))

    def turned_away(self, report: RequestReport, why: str, status: int | None = None) -> None:
        """End the span of an attempt that the engine has not begun with."""
        if (spans := report.trace) is not None and (span := spans.client) is not None:
            spans.client = None
            found = {**genai.attempt(report), "error.type": why, "http.response.status_code": status}
            self._end(span, found, time.time_ns(), _failed(why))

    def end(self, spans: Trace | None, report: RequestReport, now: float, now_ns: int) -> None:
        """End the spans with what the report says; ``now`` and ``now_ns`` are one instant on either clock."""
        if spans is None or not spans.sampled:
            return

        def event(name: str, at: float, found: genai.Found | None = None) -> Event:
            return Event(name, found and genai.told(found), now_ns - round((now - at) * 1e9))

        first_at, dispatched_at = report.times.first_at, report.dispatched_at
        first_token = [] if first_at is None else [event("first_token", first_at)]
        status = _WELL if report.outcome in (Outcome.COMPLETED, Outcome.CLIENT_GONE) else _failed(report.reason)
        answer = genai.answer(report)
        if spans.client is not None:
            since_sent = None if first_at is None or dispatched_at is None else first_at - dispatched_at
            found = {**genai.attempt(report), **answer, "gen_ai.response.time_to_first_chunk": since_sent}
            self._end(spans.client, found, now_ns, status, first_token)
        events = []
        if dispatched_at is not None:
            waited = {"slai.queue.duration": report.queue_seconds, "slai.engine": report.engine_id}
            events.append(event("dispatched", dispatched_at, waited))
        events += first_token
        events += (event("slai.tbt.breach", breach.at, genai.breach(breach, report)) for breach in report.breaches)
        self._end(spans.server, {**answer, **genai.request(report)}, now_ns, status, events)

    def close(self) -> None:
        """Send what is left. It may take long: the exporter waits for a collector that is slow or not there."""
        if self._processor is not None:
            self._processor.shutdown()

    def _end(
        self,
        span: Begun,
        found: genai.Found,
        now_ns: int,
        status: Status,
        events: Sequence[Event] = (),
    ) -> None:
        attributes: Mapping[str, AnyValue] = genai.told(found)
        if (limits := self._limits) is not None:
            attributes = BoundedAttributes(
                limits.max_span_attributes, attributes, max_value_len=limits.max_span_attribute_length
            )
            events = BoundedList.from_seq(limits.max_events, [_limited(event, limits) for event in events])
        assert self._processor is not None
        self._processor.on_end(
            EndedSpan(
                name=span.name,
                context=span.context,
                parent=span.parent,
                resource=self._resource,
                attributes=attributes,
                events=events,
                kind=span.kind,
                status=status,
                start_time=span.began_ns,
                end_time=now_ns,
                instrumentation_scope=_SCOPE,
            )
        )


def _new_id(bits: int) -> int:
    return getrandbits(bits) or 1  # 0 is none


def _failed(why: str | None) -> Status:
    return Status(StatusCode.ERROR, why)


def _limited(event: Event, limits: SpanLimits) -> Event:
    attributes = BoundedAttributes(
        limits.max_event_attributes, event.attributes, max_value_len=limits.max_attribute_length
    )
    return Event(event.name, attributes, event.timestamp)
