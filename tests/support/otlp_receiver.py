"""A small OpenTelemetry collector: takes what is sent by HTTP and by gRPC, and keeps it as protobuf has it."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

Values = dict[str, Any]


def values(attributes: Any) -> Values:
    """Attributes by name."""
    return {a.key: _value(a.value) for a in attributes}


def _value(value: Any) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return [_value(v) for v in value.array_value.values]
    return getattr(value, which)


@dataclass
class Received:
    """What has come so far."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    """The last of each name."""
    resources: list[Values] = field(default_factory=list)
    headers: list[Values] = field(default_factory=list)

    def take_spans(self, request: trace_pb.ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.resources.append(values(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def take_metrics(self, request: metrics_pb.ExportMetricsServiceRequest) -> None:
        for resource in request.resource_metrics:
            self.resources.append(values(resource.resource.attributes))
            for scope in resource.scope_metrics:
                self.metrics.update({metric.name: metric for metric in scope.metrics})

    def points(self, name: str) -> Iterator[tuple[Values, Any]]:
        metric = self.metrics[name]
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            yield values(point.attributes), point


@asynccontextmanager
async def http_receiver() -> AsyncIterator[Received]:
    received = Received()

    async def body(request: web.Request) -> bytes:
        received.headers.append(dict(request.headers))
        data = await request.read()
        return gzip.decompress(data) if request.headers.get("Content-Encoding") == "gzip" else data

    async def traces(request: web.Request) -> web.Response:
        received.take_spans(trace_pb.ExportTraceServiceRequest.FromString(await body(request)))
        return web.Response(content_type="application/x-protobuf")

    async def metrics(request: web.Request) -> web.Response:
        received.take_metrics(metrics_pb.ExportMetricsServiceRequest.FromString(await body(request)))
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", traces)
    app.router.add_post("/v1/metrics", metrics)
    runner = web.AppRunner(app, auto_decompress=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        received.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield received
    finally:
        await runner.cleanup()


class _Traces(trace_grpc.TraceServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - as it is generated
        self._received.headers.append(dict(context.invocation_metadata()))
        self._received.take_spans(request)
        return trace_pb.ExportTraceServiceResponse()


class _Metrics(metrics_grpc.MetricsServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._received.take_metrics(request)
        return metrics_pb.ExportMetricsServiceResponse()


@asynccontextmanager
async def grpc_receiver() -> AsyncIterator[Received]:
    received = Received()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_grpc.add_TraceServiceServicer_to_server(_Traces(received), server)  # type: ignore[no-untyped-call]
    metrics_grpc.add_MetricsServiceServicer_to_server(_Metrics(received), server)  # type: ignore[no-untyped-call]
    received.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        await asyncio.to_thread(server.stop(None).wait, 5)
