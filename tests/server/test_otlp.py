"""What an OpenTelemetry collector gets from the whole proxy, by HTTP and by gRPC, and what one costs that is unwell."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from live_proxy import COMPLETIONS, LiveProxy, live_proxy
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_receiver import Received, grpc_receiver, http_receiver, values
from scripted_engine import DONE, Call, ScriptedEngine, last, scripted_engine, token, usage
from test_generate_telemetry import Clock, writes

from proxy.config import Settings
from proxy.server.app import PROXY, create_app
from proxy.telemetry.otlp import TelemetryUnavailableError

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STREAMED = b'{"model": "m", "prompt": "SECRET-PROMPT", "stream": true, "max_tokens": 9}'
LATE = writes((0.5, token()), (0.52, token()), (3.52, token()), (3.54, last() + usage(6, 3) + DONE))

Receiver = Callable[[], AbstractAsyncContextManager[Received]]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing of the machine's own; what is sent is sent when the proxy ends."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    return monkeypatch


@asynccontextmanager
async def sending(url: str | None, engine: ScriptedEngine, clock: Clock, **settings: Any) -> AsyncIterator[LiveProxy]:
    async with live_proxy(engine, otlp_endpoint=url, **settings) as proxy:
        proxy.driver._clock = clock
        yield proxy


async def one_late_stream(url: str | None, **headers: str) -> ScriptedEngine:
    """A request through a proxy that has ended: its third token came 3 s late, as the engine stalled."""
    clock = Clock()
    async with scripted_engine(LATE(clock)) as engine, sending(url, engine, clock) as proxy:
        sent = {"x-slo-tbt-ms": "100", "x-request-id": "mine", "Authorization": "Bearer SECRET-KEY", **headers}
        assert (await proxy.fetch(body=STREAMED, headers=sent))[0] == 200
    return engine


def by_kind(received: Received) -> dict[int, Any]:
    assert len(received.spans) == 2
    return {span.kind: span for span in received.spans}


@pytest.mark.parametrize(
    ("receiver", "protocol"),
    [pytest.param(http_receiver, "http/protobuf", id="http"), pytest.param(grpc_receiver, "grpc", id="grpc")],
)
async def test_everything_arrives(receiver: Receiver, protocol: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    async with receiver() as received:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
        engine = await one_late_stream(received.url, **headers)

    check_spans(received, engine)
    check_metrics(received)
    assert {resource["service.name"] for resource in received.resources} == {"slai-proxy"}
    assert len({resource["service.instance.id"] for resource in received.resources}) == 1
    everything = f"{received.spans}{received.metrics}"
    assert "SECRET" not in everything


def check_spans(received: Received, engine: ScriptedEngine) -> None:
    """One of the request, and a child of it that is the engine's parent; the breach with its cause."""
    spans = by_kind(received)
    server, client = spans[Span.SPAN_KIND_SERVER], spans[Span.SPAN_KIND_CLIENT]
    assert (server.name, client.name) == ("POST /v1/completions", "text_completion m")
    assert {server.trace_id.hex(), client.trace_id.hex()} == {TRACE_ID}
    assert server.parent_span_id.hex() == PARENT_ID
    assert client.parent_span_id == server.span_id
    assert server.trace_state == client.trace_state == "vendor=1"
    (generation,) = [call for call in engine.calls if call.target == COMPLETIONS]
    assert generation.header("traceparent") == [f"00-{TRACE_ID}-{client.span_id.hex()}-01"], "the engine's parent"
    assert generation.header("tracestate") == ["vendor=1"]

    told = values(client.attributes)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.provider.name"] == "vllm"
    assert told["gen_ai.request.model"] == "m"
    assert told["gen_ai.request.max_tokens"] == 9
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (6, 3)
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.5)
    assert (told["server.address"], told["server.port"]) == ("127.0.0.1", int(engine.url.rpartition(":")[2]))
    assert values(server.attributes)["slai.request.client_id"] == "mine"

    assert [event.name for event in client.events] == ["first_token"]
    events = {event.name: values(event.attributes) for event in server.events}
    assert set(events) == {"dispatched", "first_token", "slai.tbt.breach"}
    assert events["dispatched"] == {"slai.queue.duration": 0.0, "slai.engine": engine.url}
    breach = events["slai.tbt.breach"]
    assert breach["slai.tbt.cause"] == "stall"
    assert breach["slai.tbt.gap"] == pytest.approx(3.0)
    assert breach["slai.tbt.deadline"] == pytest.approx(0.1)
    assert breach["slai.engine"] == engine.url


def check_metrics(received: Received) -> None:
    """As ``/metrics`` has them, by their own names; exemplars lead to the span."""
    server = by_kind(received)[Span.SPAN_KIND_SERVER]
    points = {labels["class"]: point for labels, point in received.points("slai.tbt")}
    assert (points["relaxed"].count, points["relaxed"].sum) == (2, pytest.approx(3.02))
    assert len(points["relaxed"].bucket_counts) == len(points["relaxed"].explicit_bounds) + 1
    (exemplar,) = points["relaxed"].exemplars
    assert (exemplar.trace_id.hex(), exemplar.span_id) == (TRACE_ID, server.span_id)
    assert exemplar.as_double == pytest.approx(3.0)
    ((labels, ttft),) = received.points("gen_ai.server.time_to_first_token")
    assert labels["gen_ai.operation.name"] == "text_completion"
    assert received.metrics["gen_ai.server.time_to_first_token"].unit == "s"
    assert (ttft.count, ttft.sum) == (1, pytest.approx(0.5))
    outcomes = {labels["outcome"]: point.as_double for labels, point in received.points("slai.requests")}
    assert outcomes["completed"] == 1
    ((_, memory),) = received.points("process_resident_memory_bytes")
    assert memory.as_double > 1e6


async def test_what_otlp_has_is_what_prometheus_has() -> None:
    clock = Clock()
    async with http_receiver() as received:
        async with scripted_engine(LATE(clock)) as engine, sending(received.url, engine, clock) as proxy:
            await proxy.fetch(body=STREAMED)
            metrics = proxy.app[PROXY].metrics
        sent = {name.replace(".", "_") for name in received.metrics}
    for family in metrics.collect().collect():
        if family.samples:
            assert any(family.name.startswith(name) for name in sent), family.name


async def test_each_attempt_at_an_engine_is_a_span() -> None:
    async def busy_once(call: Call) -> None:
        if len([c for c in engine.calls if c.target == COMPLETIONS]) == 1:
            await call.answer(b"", status="503 Busy", headers=("Retry-After: 0.1",))
        else:
            await call.stream(token())

    async with (
        http_receiver() as received,
        scripted_engine(busy_once) as engine,
        live_proxy(engine, otlp_endpoint=received.url) as proxy,
    ):
        assert (await proxy.fetch(body=STREAMED))[0] == 200
    attempts = [span for span in received.spans if span.kind == Span.SPAN_KIND_CLIENT]
    first, second = sorted(attempts, key=lambda span: int(span.start_time_unix_nano))
    told = values(first.attributes)
    assert (told["error.type"], told["http.response.status_code"]) == ("503", 503)
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert values(second.attributes)["http.response.status_code"] == 200
    assert second.status.code == Status.STATUS_CODE_UNSET
    seen = [call.header("traceparent")[0].split("-")[2] for call in engine.calls if call.target == COMPLETIONS]
    assert seen == [first.span_id.hex(), second.span_id.hex()]


async def test_a_share_of_the_requests_is_traced(environment: pytest.MonkeyPatch) -> None:
    """And none where the client's own trace is not kept; the engine is told so, and no exemplar leads nowhere."""
    environment.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    environment.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    async with http_receiver() as received:
        engine = await one_late_stream(received.url)
        (call,) = [call for call in engine.calls if call.target == COMPLETIONS]
        assert not int(call.header("traceparent")[0].rpartition("-")[2], 16) & 1
        assert received.spans == []
        assert not [point for _, point in received.points("slai.tbt") if point.exemplars]
        kept = await one_late_stream(received.url, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")
        assert kept.calls
        assert len(received.spans) == 2, "the client's decision holds"


async def test_the_standard_variables_are_enough(environment: pytest.MonkeyPatch) -> None:
    async with http_receiver() as received:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        environment.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ours")
        environment.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        environment.setenv("OTEL_METRICS_EXPORTER", "none")
        environment.setenv("OTEL_SERVICE_NAME", "front")
        environment.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=here")
        await one_late_stream(None)
    assert len(received.spans) == 2
    assert received.metrics == {}
    assert {name.lower(): value for name, value in received.headers[0].items()}["x-tenant"] == "ours"
    (resource,) = received.resources
    assert resource["service.name"] == "front"
    assert resource["deployment.environment.name"] == "here"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "soon"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
    ],
)
def test_what_is_not_known_is_refused_at_the_start(name: str, value: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv(name, value)
    with pytest.raises(TelemetryUnavailableError, match=f"{name}={value}"):
        create_app(Settings(engines=("http://127.0.0.1:1",), otlp_endpoint="http://127.0.0.1:1"))


async def test_what_is_no_text_takes_nobody_elses_spans_with_it() -> None:
    """A word of an engine's that UTF-8 has no way to write: the whole batch could not be sent."""

    async def broken_word(call: Call) -> None:
        await call.stream(token() + b'data: {"choices":[{"text":"","finish_reason":"\\ud83d"}]}\n\n' + DONE)

    async with (
        http_receiver() as received,
        scripted_engine(broken_word) as engine,
        live_proxy(engine, otlp_endpoint=received.url) as proxy,
    ):
        assert (await proxy.fetch(body=STREAMED))[0] == 200
    told = [values(span.attributes) for span in received.spans]
    assert [found["gen_ai.response.finish_reasons"] for found in told] == [["?"], ["?"]]


@asynccontextmanager
async def silent_collector() -> AsyncIterator[str]:
    """It takes connections and what is sent, and never answers."""
    held: list[asyncio.StreamWriter] = []

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        while await reader.read(1 << 16):
            pass

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in held:
            writer.close()


@pytest.mark.parametrize("is_there", [True, False], ids=["silent", "down"])
async def test_a_collector_that_is_not_well_holds_up_no_request(
    is_there: bool, environment: pytest.MonkeyPatch
) -> None:
    """All are served although its exporter is stuck with the first batch, and the queue of spans is full."""
    environment.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    environment.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    environment.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    environment.setattr("proxy.telemetry.sending.FLUSH_SECONDS", 0.5)
    async with silent_collector() as silent, scripted_engine() as engine:
        url = silent if is_there else "http://127.0.0.1:1"
        async with live_proxy(engine, otlp_endpoint=url) as proxy:
            longest = 0.0
            for _ in range(20):
                began = time.perf_counter()
                assert (await proxy.fetch(body=STREAMED))[0] == 200
                longest = max(longest, time.perf_counter() - began)
            assert longest < 2, "the exporter itself waits for 10 s"
            began = time.perf_counter()
        assert time.perf_counter() - began < 5, "the end waits no longer than it may"
