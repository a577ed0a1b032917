"""Spans of requests, as an exporter gets them."""

import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from proxy.core.blame import Blame, Cause
from proxy.core.request import Outcome, RequestClass
from proxy.telemetry.otlp import TelemetryUnavailableError, otlp
from proxy.telemetry.report import Breach, RequestReport, TokenTimes
from proxy.telemetry.tracing import Tracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    tracing = Tracing(SimpleSpanProcessor(exporter))
    yield tracing
    tracing.close()


def a_report(outcome: Outcome = Outcome.COMPLETED, reason: str | None = None) -> RequestReport:
    report = RequestReport("4-x", "x", "chat", 100.0, RequestClass("gold", 1.0, 0.1), model="tiny", stream=True)
    report.prompt_tokens, report.max_tokens, report.status = 7, 20, 200
    report.dispatched_at, report.engine_id, report.dispatches = 100.5, "http://e0", 2
    report.times = TokenTimes(0.1)
    for now in (101.5, 101.75, 102.5):
        report.times.on_read(now, 1)
    report.outcome, report.reason, report.ended_at = outcome, reason, 103.0
    return report


def finish(tracing: Tracing, report: RequestReport, headers: dict[str, str] | None = None) -> None:
    span = tracing.begin(headers or {}, "/v1/completions", 1_000_000_000)
    tracing.end(span, report, 103.0, 4_000_000_000)


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def test_everything_that_the_report_knows(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    finish(tracing, a_report())
    span = only(exporter)
    assert span.name == "POST /v1/completions"
    assert span.kind is SpanKind.SERVER
    assert (span.start_time, span.end_time) == (1_000_000_000, 4_000_000_000)
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.time_to_first_chunk": 1.5,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "slai.request.id": "4-x",
        "slai.request.client_id": "x",
        "slai.class": "gold",
        "slai.outcome": "completed",
        "slai.engine": "http://e0",
        "slai.dispatches": 2,
        "slai.queue.duration": 0.5,
        "slai.ttft.missed": True,
        "slai.tbt.max": 0.75,
        "slai.tbt.p99": 0.75,
        "slai.tbt.mean": 0.5,
        "slai.tbt.misses": 2,
    }
    assert span.status.status_code is StatusCode.UNSET


def test_events_have_the_wall_clock_times_of_what_they_tell(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    finish(tracing, a_report())
    assert [(event.name, event.timestamp) for event in only(exporter).events] == [
        ("dispatched", 1_500_000_000),
        ("first_token", 2_500_000_000),
    ]


def test_a_breach_names_whose_prompt_it_was(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    report = a_report()
    blame = Blame(Cause.PREFILL, step_seconds=0.7, prompt_tokens=6000, request_id="17", request_tokens=5500)
    report.breaches.append(Breach(102.5, 0.75, blame))
    finish(tracing, report)
    (event,) = [event for event in only(exporter).events if event.name == "slai.tbt.breach"]
    assert event.timestamp == 3_500_000_000
    assert dict(event.attributes or {}) == {
        "slai.tbt.gap": 0.75,
        "slai.tbt.deadline": 0.1,
        "slai.tbt.cause": "prefill",
        "slai.engine": "http://e0",
        "slai.step.duration": 0.7,
        "slai.step.prompt_tokens": 6000,
        "slai.step.largest_prompt.request.id": "17",
        "slai.step.largest_prompt.tokens": 5500,
    }


def test_what_never_happened_is_left_out(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    report = RequestReport("5-y", "y", "chat", 100.0, RequestClass("gold"))
    report.outcome, report.reason, report.status = Outcome.REJECTED, "queue_full", 429
    finish(tracing, report)
    span = only(exporter)
    attributes = dict(span.attributes or {})
    assert attributes["error.type"] == "queue_full"
    assert not {"slai.tbt.max", "slai.engine", "slai.queue.duration", "gen_ai.request.model"} & attributes.keys()
    assert list(span.events) == []


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.COMPLETED, StatusCode.UNSET),
        (Outcome.CLIENT_GONE, StatusCode.UNSET),
        (Outcome.ENGINE_FAILED, StatusCode.ERROR),
        (Outcome.ENGINE_ERROR, StatusCode.ERROR),
        (Outcome.REJECTED, StatusCode.ERROR),
    ],
)
def test_an_error_is_what_went_wrong_on_our_side(
    tracing: Tracing, exporter: InMemorySpanExporter, outcome: Outcome, status: StatusCode
) -> None:
    finish(tracing, a_report(outcome, "why"))
    assert only(exporter).status.status_code is status


def test_the_clients_trace_goes_on(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    span = tracing.begin(headers, "/v1/completions", 0)
    forwarded = dict(headers)
    tracing.inject(span, forwarded)
    tracing.end(span, a_report(), 103.0, 1)
    found = only(exporter)
    assert found.context is not None
    assert found.parent is not None
    assert f"{found.context.trace_id:032x}" == TRACE_ID
    assert f"{found.parent.span_id:016x}" == PARENT_ID
    assert forwarded == {"traceparent": f"00-{TRACE_ID}-{found.context.span_id:016x}-01", "tracestate": "vendor=1"}


@pytest.mark.parametrize(
    "traceparent", ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", f"ff-{TRACE_ID}-{PARENT_ID}-01"]
)
def test_a_traceparent_that_is_none_begins_a_new_trace(
    tracing: Tracing, exporter: InMemorySpanExporter, traceparent: str
) -> None:
    finish(tracing, a_report(), {"traceparent": traceparent})
    assert only(exporter).parent is None


def test_what_is_not_sampled_is_told_to_the_engine_as_such(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracing, headers, report = Tracing(SimpleSpanProcessor(exporter)), {"traceparent": TRACEPARENT}, a_report()
    report.trace = tracing.begin(headers, "/v1/completions", 0)
    tracing.attempt(report, headers)
    tracing.end(report.trace, report, 103.0, 1)
    assert exporter.get_finished_spans() == ()
    assert headers["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert headers["traceparent"].endswith("-00")


def test_limits_of_the_environment_hold(exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "3")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4")
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "1")
    finish(Tracing(SimpleSpanProcessor(exporter)), a_report())
    span = only(exporter)
    assert len(span.attributes or {}) == 3
    assert span.dropped_attributes == 19
    assert (len(span.events), span.dropped_events) == (1, 1)
    assert all(len(value) <= 4 for value in (span.attributes or {}).values() if isinstance(value, str))


def test_without_an_exporter_there_is_nothing() -> None:
    tracing = Tracing()
    span = tracing.begin({"traceparent": TRACEPARENT}, "/v1/completions", 0)
    headers = {"traceparent": TRACEPARENT}
    tracing.inject(span, headers)
    tracing.end(span, a_report(), 103.0, 1)
    tracing.close()
    assert span is None
    assert headers == {"traceparent": TRACEPARENT}, "it goes to the engine as it came"


def test_closing_hands_out_what_is_buffered() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing.to(exporter)
    finish(tracing, a_report())
    tracing.close()
    assert len(exporter.get_finished_spans()) == 1


def test_a_missing_package_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TelemetryUnavailableError, match=r"slai-proxy\[otlp\]"):
        otlp("http://127.0.0.1:1/v1/traces").spans()
