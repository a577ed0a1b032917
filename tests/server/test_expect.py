"""Clients that wait for a word before they send their bodies (``Expect: 100-continue``): it comes if we read on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from live_proxy import COMPLETIONS, LiveProxy, live_proxy, until
from scripted_engine import Call, scripted_engine, token

from proxy.core.events import DrainStarted

BODY = b'{"model": "m", "prompt": "hello", "stream": true}'
EMBEDDINGS = "/v1/embeddings"


async def hold(call: Call) -> None:
    await call.begin()
    await call.write(token())
    await call.gone.wait()


async def ask(proxy: LiveProxy, *headers: str, path: str = COMPLETIONS, length: int = len(BODY)) -> bytes:
    """Send a head that announces a body, and return what comes until the proxy closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    lines = (f"POST {path} HTTP/1.1", "Host: proxy", f"Content-Length: {length}", *headers, "", "")
    writer.write("\r\n".join(lines).encode())
    try:
        async with asyncio.timeout(20):
            told = await reader.readuntil(b"\r\n\r\n")
            if not told.startswith(b"HTTP/1.1 100"):
                writer.write_eof()  # whoever is answered need not send it
            return told + await reader.read() if writer.transport.is_closing() or b" 100 " not in told else told
    finally:
        writer.close()


@asynccontextmanager
async def full_queue(**settings: Any) -> AsyncIterator[LiveProxy]:
    """A proxy whose only engine is at work for one request while two wait, and nobody else may."""
    async with (
        scripted_engine(hold) as engine,
        live_proxy(engine, max_num_seqs=1, max_queue_requests=2, **settings) as proxy,
        asyncio.TaskGroup() as group,
    ):
        clients = [group.create_task(_until_cancelled(proxy)) for _ in range(3)]
        await until(lambda: proxy.scheduler.waiting == 2)
        yield proxy
        for client in clients:
            client.cancel()


async def _until_cancelled(proxy: LiveProxy) -> None:
    async with proxy.post(body=BODY) as response:
        await response.read()


async def test_who_can_be_served_is_told_to_go_on() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        for path in (COMPLETIONS, EMBEDDINGS):
            assert await ask(proxy, "Expect: 100-Continue", path=path) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert not engine.calls


async def test_a_full_queue_refuses_without_reading() -> None:
    async with full_queue() as proxy:
        told = await ask(proxy, "Expect: 100-continue")
        assert told.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nRetry-After: " in told
        assert b"\r\nConnection: close\r\n" in told
        assert proxy.reasons() == {"queue_full": 1}
        assert (await ask(proxy, "Expect: 100-continue", "x-slai-no-queue: 1")).startswith(b"HTTP/1.1 429 ")


async def test_what_is_not_scheduled_needs_no_queue() -> None:
    async with full_queue() as proxy:
        assert b" 100 " in await ask(proxy, "Expect: 100-continue", path=EMBEDDINGS)


async def test_the_body_tells_the_model_and_another_one_may_have_room() -> None:
    async with scripted_engine(hold, "other") as other, full_queue() as proxy:
        proxy.prober.add(other.url)
        await until(lambda: len([engine for engine in proxy.scheduler.engines if engine.up]) == 2)
        assert b" 100 " in await ask(proxy, "Expect: 100-continue")


async def test_another_tenant_may_have_the_room_that_one_takes() -> None:
    async with full_queue(tenants_from="header") as proxy:
        assert b" 100 " in await ask(proxy, "Expect: 100-continue", "x-slai-tenant: another")


async def test_a_connection_is_kept_whose_body_was_read() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        head = f"POST {EMBEDDINGS} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n".encode()
        async with asyncio.timeout(5):
            for _ in range(2):
                writer.write(head)
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                writer.write(b"{}")
                told = await reader.readuntil(b"\r\n\r\n")
                assert told.startswith(b"HTTP/1.1 200 ")
                assert b"close" not in told
                await reader.readuntil(b"}}")
        writer.close()


@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
async def test_what_is_refused_by_its_head_is_not_asked_for(path: str) -> None:
    async with scripted_engine() as engine, live_proxy(engine, max_body_bytes=1000) as proxy:
        assert (await ask(proxy, "Expect: 100-continue", path=path, length=1001)).startswith(b"HTTP/1.1 413 ")
        assert (await ask(proxy, "Expect: a-miracle", path=path)).startswith(b"HTTP/1.1 417 ")
        assert not engine.calls


async def test_nobody_sends_a_body_to_a_proxy_that_is_about_to_end_or_has_no_engine() -> None:
    async with live_proxy() as proxy:
        assert (await ask(proxy, "Expect: 100-continue")).startswith(b"HTTP/1.1 503 ")
        assert proxy.reasons() == {"no_engine": 1}
        proxy.driver.feed(DrainStarted())
        assert (await ask(proxy, "Expect: 100-continue")).startswith(b"HTTP/1.1 503 ")
        assert proxy.reasons() == {"no_engine": 1, "draining": 1}


async def test_a_body_that_is_sent_without_waiting_is_let_go() -> None:
    """The client has sent all of it before it reads the refusal, and reads that, not a reset."""
    async with full_queue() as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\nExpect: 100-continue\r\n\r\n"
        writer.write(head.encode() + b"x" * 3_000_000)
        async with asyncio.timeout(10):
            await writer.drain()
            assert (await reader.read()).startswith(b"HTTP/1.1 429 ")
        writer.close()
