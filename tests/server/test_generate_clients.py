"""Clients that leave, at every stage: the engine hears of it within a second, and nothing is held for them any more."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from live_proxy import CHAT, LiveProxy, live_proxy, raw_post, serving, until
from scripted_engine import Call, ScriptedEngine, reset, scripted_engine, token

from proxy.config import Settings
from proxy.server.app import create_app

STREAMED = b'{"model": "m", "prompt": "hello", "stream": true}'
WHOLE = b'{"model": "m", "prompt": "hello"}'


async def hold(call: Call) -> None:
    """Stream one token and then nothing; without a stream, nothing at all."""
    if b'"stream": true' in call.body:
        await call.begin()
        await call.write(token())
    await call.gone.wait()


class Client:
    """A connection with a request on it that a test breaks off."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def leave(self, how: str = "FIN") -> None:
        if how == "RST":
            reset(self.writer)
        else:
            self.writer.close()


@asynccontextmanager
async def asking(proxy: LiveProxy, request: bytes) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.write(request)
        yield Client(reader, writer)
    finally:
        writer.close()


async def check_gone(proxy: LiveProxy, engine: ScriptedEngine | None = None, clients: int = 1) -> None:
    if engine is not None:
        async with asyncio.timeout(1):
            await engine.calls[-1].gone.wait()
    await proxy.idle(1)
    await until(proxy.outcomes, 1)
    assert proxy.outcomes() == {"client_gone": clients}
    assert proxy.reasons() == {}


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_while_streaming(how: str) -> None:
    async with (
        scripted_engine(hold) as engine,
        live_proxy(engine) as proxy,
        asking(proxy, raw_post(STREAMED)) as client,
    ):
        await client.reader.readuntil(token().rstrip())
        client.leave(how)
        await check_gone(proxy, engine)


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_while_waiting_for_an_answer_in_one_piece(how: str, path: str) -> None:
    async with (
        scripted_engine(hold) as engine,
        live_proxy(engine) as proxy,
        asking(proxy, raw_post(WHOLE, path=path)) as client,
    ):
        await until(lambda: engine.calls)
        client.leave(how)
        await check_gone(proxy, engine)


async def test_between_the_head_and_the_first_token() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await call.gone.wait()

    async with (
        scripted_engine(script) as engine,
        live_proxy(engine) as proxy,
        asking(proxy, raw_post(STREAMED)) as client,
    ):
        await client.reader.readuntil(b"\r\n\r\n")
        client.leave()
        await check_gone(proxy, engine)


async def test_just_before_the_proxy_writes(caplog: pytest.LogCaptureFixture) -> None:
    """The write fails before the news that the client has gone comes."""

    async def leave(request: web.BaseRequest, _: web.StreamResponse) -> None:
        assert request.transport is not None
        request.transport.abort()

    async with scripted_engine(hold) as engine:
        app = create_app(Settings(engines=(engine.url,)))
        app.on_response_prepare.append(leave)
        async with serving(app) as proxy:
            with pytest.raises(aiohttp.ClientError):
                await proxy.fetch()
            await check_gone(proxy, engine)
    assert not [record.message for record in caplog.records if record.levelno >= logging.ERROR]


async def test_in_the_middle_of_an_answer_in_one_piece() -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        await call.gone.wait()

    async with (
        scripted_engine(script) as engine,
        live_proxy(engine) as proxy,
        asking(proxy, raw_post(WHOLE)) as client,
    ):
        await client.reader.readuntil(b"\r\n\r\n{")
        client.leave()
        await check_gone(proxy, engine)


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_while_queued(how: str) -> None:
    async with (
        scripted_engine(hold) as engine,
        live_proxy(engine, max_num_seqs=1) as proxy,
        asking(proxy, raw_post(STREAMED)) as first,
        asking(proxy, raw_post(STREAMED)) as second,
    ):
        await until(lambda: proxy.scheduler.waiting == 1)
        second.leave(how)
        await until(lambda: proxy.scheduler.waiting == 0, 1)
        assert proxy.outcomes() == {"client_gone": 1}
        assert len(engine.calls) == 1, "it never came to an engine"
        assert not engine.calls[0].gone.is_set()
        first.leave()
        await check_gone(proxy, engine, clients=2)


async def test_who_leaves_makes_room_for_the_next() -> None:
    async with (
        scripted_engine(hold) as engine,
        live_proxy(engine, max_num_seqs=1, policy="fcfs") as proxy,
        asking(proxy, raw_post(STREAMED)) as first,
        asking(proxy, raw_post(STREAMED)) as second,
        asking(proxy, raw_post(WHOLE)) as third,
    ):
        await until(lambda: proxy.scheduler.waiting == 2)
        first.leave()
        await until(lambda: len(engine.calls) == 2, 1)
        second.leave()
        await until(lambda: len(engine.calls) == 3, 1)
        assert engine.calls[2].body == WHOLE
        third.leave()
        await check_gone(proxy, engine, clients=3)


async def test_while_an_engine_has_turned_it_away() -> None:
    async def script(call: Call) -> None:
        await call.answer(b"", status="503 Service Unavailable", headers=("Retry-After: 30",))

    async with (
        scripted_engine(script) as engine,
        live_proxy(engine) as proxy,
        asking(proxy, raw_post(STREAMED)) as client,
    ):
        await until(lambda: proxy.scheduler.waiting == 1)
        client.leave()
        await check_gone(proxy)
        assert len(engine.calls) == 1


@pytest.mark.parametrize("sent", [b"", b'{"model": '])
@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_before_the_body_is_complete(sent: bytes, how: str, caplog: pytest.LogCaptureFixture) -> None:
    request = raw_post(STREAMED).removesuffix(STREAMED) + sent
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        async with asking(proxy, request) as client:
            await until(_handlers)
            client.leave(how)
            await check_gone(proxy)
        assert engine.calls == []
    assert not caplog.records, "it is no fault of the proxy, and so no stack trace"


def _handlers() -> int:
    """Requests that aiohttp has begun to handle."""
    return sum("_handle_request" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def test_during_the_upload_of_a_large_body_to_the_engine() -> None:
    """The engine does not read; the client leaves while the proxy is still sending."""
    body = b'{"model": "m", "prompt": "' + b"x" * 8_000_000 + b'"}'
    accepted = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if b"POST" not in line:  # a probe
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            accepted.set()
            await asyncio.wait_for(left.wait(), 5)
        writer.close()

    left = asyncio.Event()
    async with await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1024) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with live_proxy(url) as proxy:
            async with asking(proxy, raw_post(body)) as client:
                await asyncio.wait_for(accepted.wait(), 5)
                client.leave("RST")
                await check_gone(proxy)
            left.set()


async def test_a_client_that_reads_slowly_holds_the_engine_up_instead_of_filling_the_memory() -> None:
    piece = token("x" * 100_000)
    written = 0

    async def script(call: Call) -> None:
        nonlocal written
        await call.begin()
        while written < 200_000_000:
            await call.write(piece)
            written += len(piece)

    async with (
        scripted_engine(script) as engine,
        live_proxy(engine) as proxy,
        asking(proxy, raw_post(STREAMED)) as client,
    ):
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        before = -1
        async with asyncio.timeout(10):
            while before != written:
                before = written
                for _ in range(50):
                    await asyncio.sleep(0.001)
        assert 0 < written < 40_000_000, "it stops when the buffers of the sockets are full"
        client.leave("RST")
        await check_gone(proxy, engine)


@pytest.mark.parametrize("clients", [60])
async def test_all_at_once(clients: int) -> None:
    async with scripted_engine(hold) as engine, live_proxy(engine, max_num_seqs=20) as proxy:
        writers = [(await asyncio.open_connection("127.0.0.1", proxy.port))[1] for _ in range(clients)]
        for writer in writers:
            writer.write(raw_post(STREAMED))
        await until(lambda: proxy.scheduler.waiting == clients - 20)
        for writer in writers:
            reset(writer)
        await check_gone(proxy, clients=clients)
        await until(lambda: all(call.gone.is_set() for call in engine.calls), 1)
