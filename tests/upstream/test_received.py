"""A request on a connection that its engine is just closing: sent again if it provably was not read, and only then."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from proxy.upstream.client import EngineClient, EngineError, Timeouts
from proxy.upstream.connection import Connection
from proxy.upstream.received import nothing_received
from proxy.wire.errors import UpstreamFailure

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

linux = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs Linux's TCP_INFO")


class Engine:
    """A server of blocking sockets, so that a test decides when which packet is sent."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests = 0

    def accept(self) -> socket.socket:
        return self._listener.accept()[0]

    def serve(self, connection: socket.socket) -> None:
        """Read a request and answer it."""
        self.read(connection)
        connection.sendall(ANSWER)

    def read(self, connection: socket.socket) -> None:
        data = b""
        while not data.endswith(b"body"):
            data += connection.recv(65536)
        self.requests += 1

    def close(self) -> None:
        self._listener.close()


@asynccontextmanager
async def used_connection(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Engine, EngineClient, socket.socket]]:
    """An idle connection that has carried a request, and that the client takes for good."""
    engine, client = Engine(), EngineClient(Timeouts(5, 5))
    first = asyncio.ensure_future(ask(client, engine))
    connection = await asyncio.to_thread(engine.accept)
    await asyncio.to_thread(engine.serve, connection)
    assert await first == b"ok"
    assert client.idle(engine.url) == 1
    monkeypatch.setattr(Connection, "stale", property(lambda _: False))
    try:
        yield engine, client, connection
    finally:
        await client.close()
        connection.close()
        engine.close()


async def ask(client: EngineClient, engine: Engine) -> bytes:
    async with client.send(engine.url, "POST", "/", [("X", "1")], b"body") as answer:
        return await answer.read()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@linux
async def test_what_came_after_the_end_is_sent_on_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with used_connection(monkeypatch) as (engine, client, connection):
        connection.close()  # and the loop has no turn to notice before the next request is written
        second = asyncio.ensure_future(ask(client, engine))
        fresh = await asyncio.to_thread(engine.accept)
        await asyncio.to_thread(engine.serve, fresh)
        assert await second == b"ok"
        fresh.close()
        assert engine.requests == 2


@pytest.mark.parametrize("end", [socket.socket.close, reset])
async def test_what_was_read_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[socket.socket], None]
) -> None:
    async with used_connection(monkeypatch) as (engine, client, connection):
        second = asyncio.ensure_future(ask(client, engine))
        await asyncio.to_thread(engine.read, connection)
        end(connection)
        with pytest.raises(EngineError) as failed:
            await second
        assert failed.value.failure is UpstreamFailure.CUT_BEFORE_ANSWER
        assert engine.requests == 2


async def test_what_was_received_and_not_read_is_not_sent_again_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset is all that comes of it, and of an engine that has read it and dies as well."""
    async with used_connection(monkeypatch) as (engine, client, connection):
        second = asyncio.ensure_future(ask(client, engine))
        await asyncio.to_thread(connection.recv, 1, socket.MSG_PEEK)
        connection.close()
        with pytest.raises(EngineError) as failed:
            await second
        assert failed.value.failure is UpstreamFailure.CUT_BEFORE_ANSWER


class Kernel:
    def __init__(self, said: bytes | OSError) -> None:
        self._said = said

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        if isinstance(self._said, OSError):
            raise self._said
        return self._said


def info(acknowledged: int) -> bytes:
    return bytes(120) + struct.pack("=Q", acknowledged)


@linux
@pytest.mark.parametrize(
    ("said", "sent_before", "expected"),
    [
        (info(100), 100, True),
        (info(101), 100, True),
        (info(102), 100, False),  # some of the request
        (info(99), 100, False),  # less than was answered: the kernel does not count
        (info(0), 100, False),
        (info(0), 0, False),  # the connection's first request: nothing shows that the kernel counts
        (info(1), 0, False),
        (b"short", 100, False),
        (OSError(), 100, False),
    ],
)
def test_only_a_figure_that_can_be_right_is_a_proof(said: bytes | OSError, sent_before: int, *, expected: bool) -> None:
    assert nothing_received(Kernel(said), sent_before) is expected
