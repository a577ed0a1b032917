"""Spans in protocol buffers: the same as OpenTelemetry's own encoder makes of them."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from otlp_receiver import Received, grpc_receiver, http_receiver, values

from proxy.telemetry.otlp import otlp
from proxy.telemetry.otlpspans import EndedSpan, export_request

Receiver = Callable[[], AbstractAsyncContextManager[Received]]

RESOURCE = Resource({"service.name": "slai-proxy", "process.pid": 7, "words": ("a", "b")})
SCOPE = InstrumentationScope("slai-proxy", "1.2.3")

texts = st.text(st.characters(codec="utf-8"), max_size=300)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
numbers = st.floats(allow_nan=False)
attributes = st.dictionaries(
    texts.filter(bool), st.one_of(texts, st.booleans(), int64, numbers, st.lists(texts).map(tuple)), max_size=5
)
times = st.integers(0, (1 << 63) - 1)
contexts = st.builds(
    SpanContext,
    st.integers(1, (1 << 128) - 1),
    st.integers(1, (1 << 64) - 1),
    is_remote=st.booleans(),
    trace_flags=st.integers(0, 3).map(TraceFlags),
    trace_state=st.sampled_from([TraceState(), TraceState([("vendor", "1"), ("other", "two")])]),
)
spans = st.builds(
    EndedSpan,
    name=texts,
    context=contexts,
    parent=st.none() | contexts,
    resource=st.just(RESOURCE),
    instrumentation_scope=st.just(SCOPE),
    attributes=attributes,
    events=st.lists(st.builds(Event, texts, st.none() | attributes, times), max_size=3),
    kind=st.sampled_from(SpanKind),
    status=st.just(Status()) | texts.map(lambda why: Status(StatusCode.ERROR, why)),
    start_time=times,
    end_time=times,
)


def a_span(**fields: object) -> EndedSpan:
    whole = {"name": "POST /v1", "context": SpanContext(1, 2, is_remote=False), "start_time": 3, "end_time": 4}
    return EndedSpan(**{**whole, "resource": RESOURCE, "instrumentation_scope": SCOPE, **fields})


def as_message(found: list[EndedSpan]) -> ExportTraceServiceRequest:
    message: ExportTraceServiceRequest = ExportTraceServiceRequest.FromString(export_request(found))
    return message


@given(st.lists(spans, min_size=1, max_size=3))
def test_they_are_what_the_library_makes_of_them(found: list[EndedSpan]) -> None:
    assert as_message(found) == encode_spans(found)


def test_one_and_true_are_told_apart() -> None:
    found = [a_span(attributes={"n": value}) for value in (1, True, 1.0, 0, False, 0.0)]
    assert as_message(found) == encode_spans(found)


def test_what_limits_have_dropped_is_counted() -> None:
    fewer = BoundedAttributes(2, {"a": "1", "b": "2", "c": "3"})
    span = a_span(attributes=fewer, events=[Event("late", fewer, 3)])
    assert span.dropped_attributes == span.events[0].dropped_attributes == 1
    assert as_message([span]) == encode_spans([span])


@pytest.mark.parametrize(("value", "told"), [(1 << 70, str(1 << 70)), ("\ud83d", "?"), (None, "None")])
def test_what_otlp_has_no_way_to_write_is_told_as_text(value: object, told: str) -> None:
    (resource,) = as_message([a_span(attributes={"a": value})]).resource_spans
    assert values(resource.scope_spans[0].spans[0].attributes) == {"a": told}


@pytest.mark.parametrize(("protocol", "receiver"), [("http/protobuf", http_receiver), ("grpc", grpc_receiver)])
async def test_the_exporters_send_what_was_written_when_the_span_ended(
    protocol: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    async with receiver() as received:
        exporter = otlp(received.url).spans()
        assert exporter is not None
        span = a_span()
        span.written = a_span(name="as it was").written
        await asyncio.to_thread(exporter.export, [span])
        exporter.shutdown()
    assert [span.name for span in received.spans] == ["as it was"]
