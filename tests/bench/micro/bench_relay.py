"""What a token takes in the proxy but for the system's part: from the read that brings it to its being counted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from proxy.core.config import SchedulerConfig
from proxy.core.events import EngineUp
from proxy.core.limits import EngineLimits
from proxy.core.request import RELAXED, Request
from proxy.core.scheduler import Scheduler
from proxy.server.downstream import Downstream
from proxy.server.driver import Driver
from proxy.server.meter import StreamMeter
from proxy.telemetry.metrics import TbtHistogram
from proxy.telemetry.report import RequestReport
from proxy.upstream.connection import Connection, EngineAnswer, Watch
from proxy.wire.chunks import chunk

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

STREAMS = 64
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1764500000,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":" %d"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class Nowhere:
    """A transport, a client's request and its answer, all of which take everything."""

    headers = {"Transfer-Encoding": "chunked"}  # noqa: RUF012 - as an answer has them

    @property
    def transport(self) -> Nowhere:
        return self

    async def prepare(self, _: object) -> Nowhere:
        return self

    def send_headers(self) -> None:
        pass

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass

    async def drain(self) -> None:
        pass


class Stage:
    """Streams of one engine, each of which has had its first token."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.driver = Driver(Scheduler(SchedulerConfig()), loop)
        self.driver.feed(EngineUp("e", EngineLimits(), frozenset({"m"})))
        self.connections: list[Connection] = []
        self.answers: list[EngineAnswer] = []
        self.relays: list[asyncio.Task[None]] = []
        self._tokens = 0

    async def begin(self) -> None:
        watch, histogram, nowhere = Watch(self.loop), TbtHistogram(), cast("Any", Nowhere())
        for number in map(str, range(STREAMS)):
            self.driver.submit(Request(number, 10, model="m", size_bytes=500), self.driver.now())
            report = RequestReport(number, "c", "chat", self.driver.now(), RELAXED)
            report.times.tbt_seconds = RELAXED.tbt_seconds
            connection = Connection(watch)
            connection.connection_made(nowhere)
            self.answers.append(connection.ask("POST", b"", b"", 60.0))
            connection.data_received(_HEAD)
            meter = StreamMeter(report, histogram, self.driver.on_tokens, self.driver.scheduler.blame)
            stream = Downstream(nowhere, meter, self.driver)
            await stream.begin(nowhere, b"")
            self.relays.append(self.loop.create_task(stream.go_on(self.answers[-1])))
            self.connections.append(connection)
        await asyncio.sleep(0)
        self.tokens()
        self.tokens()
        await asyncio.sleep(0)

    def tokens(self) -> None:
        """Let each stream have a token: a step of the engine."""
        self._tokens += 1
        read = chunk(_EVENT % self._tokens)
        for connection in self.connections:
            connection.data_received(read)
        self.driver.catch_up()

    def end(self) -> None:
        for relay in self.relays:
            relay.cancel()
        self.loop.run_until_complete(asyncio.gather(*self.relays, return_exceptions=True))
        for answer in self.answers:
            answer.close()
        self.driver.close()


def test_step_of_64_tokens(benchmark: BenchmarkFixture) -> None:
    with asyncio.Runner() as runner:
        stage = Stage(runner.get_loop())
        runner.run(stage.begin())
        benchmark(stage.tokens)
        stage.end()
