"""What the wire takes: a request's body and headers, and a token's event."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from multidict import CIMultiDict

from proxy.core.request import RELAXED
from proxy.server.meter import StreamMeter
from proxy.telemetry.metrics import TbtHistogram
from proxy.telemetry.report import RequestReport
from proxy.wire.fingerprint import Fingerprinter
from proxy.wire.headers import forward_request_headers
from proxy.wire.openai import peek, read_chunk
from proxy.wire.sse import EventSplitter

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

_PAYLOAD = (
    b'{"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1764500000,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":" happy"},"logprobs":null,"finish_reason":null}]}'
)
_EVENT = b"data: " + _PAYLOAD + b"\n\n"
_HEADERS = CIMultiDict({
    "Host": "proxy", "Accept": "*/*", "Accept-Encoding": "gzip", "Connection": "keep-alive", "User-Agent": "bench",
    "Authorization": "Bearer sk-bench", "Content-Type": "application/json", "Content-Length": "500",
})  # fmt: skip


def chat(size_bytes: int) -> bytes:
    text = "All happy families are alike. " * (size_bytes // 30)
    return json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}).encode()


@pytest.mark.parametrize("size_bytes", [500, 50_000])
def test_peek(benchmark: BenchmarkFixture, size_bytes: int) -> None:
    body = chat(size_bytes)
    benchmark(lambda: peek(body, chat=True))


@pytest.mark.parametrize("size_bytes", [500, 50_000])
def test_fingerprints(benchmark: BenchmarkFixture, size_bytes: int) -> None:
    body, fingerprinter = chat(size_bytes), Fingerprinter(bytes(32))
    benchmark(lambda: (fingerprinter.whole("/", b"key", body), fingerprinter.blocks(body, size_bytes // 4, chat=True)))


def test_headers(benchmark: BenchmarkFixture) -> None:
    benchmark(lambda: forward_request_headers(_HEADERS))


def test_chunk(benchmark: BenchmarkFixture) -> None:
    benchmark(read_chunk, _PAYLOAD)


def test_split(benchmark: BenchmarkFixture) -> None:
    benchmark(EventSplitter().feed, _EVENT)


def test_token(benchmark: BenchmarkFixture) -> None:
    meter = StreamMeter(RequestReport("1", "c", "chat", 0.0, RELAXED), TbtHistogram(), lambda *_: None)
    clock = iter(range(1 << 40))
    benchmark(lambda: meter.on_read(_EVENT, next(clock) / 1e6))
