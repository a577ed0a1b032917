"""WebSockets pass both ways, with their ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from live_proxy import LiveProxy, live_proxy, until

Script = Callable[[web.WebSocketResponse, web.Request], Awaitable[None]]


@asynccontextmanager
async def proxied(script: Script, **settings: Any) -> AsyncIterator[tuple[LiveProxy, list[web.Request]]]:
    """A proxy before an engine that serves WebSockets by ``script``."""
    asked: list[web.Request] = []

    async def realtime(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        if request.query.get("refuse"):
            return web.Response(status=403)
        socket = web.WebSocketResponse(protocols=("realtime",), autoclose=False)
        await socket.prepare(request)
        await script(socket, request)
        return socket

    async def probe(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_get("/v1/realtime", realtime)
    for path in ("/health", "/v1/models"):
        app.router.add_get(path, probe)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with live_proxy(f"http://127.0.0.1:{runner.addresses[0][1]}", **settings) as proxy:
            yield proxy, asked
    finally:
        await runner.cleanup()


async def echo(socket: web.WebSocketResponse, _: web.Request) -> None:
    async for message in socket:
        if message.type is WSMsgType.TEXT:
            await socket.send_str(message.data.upper())
        elif message.type is WSMsgType.BINARY:
            await socket.send_bytes(message.data[::-1])
        else:
            await socket.close()


async def test_messages_pass_both_ways_and_the_socket_counts_as_load() -> None:
    async with proxied(echo) as (proxy, asked):
        async with proxy.client.ws_connect(
            "/v1/realtime?model=m&x=%20",
            protocols=("realtime",),
            headers={"OpenAI-Beta": "realtime=v1", "Authorization": "Bearer k"},
        ) as socket:
            assert socket.protocol == "realtime"
            await socket.send_str("grüß")
            assert await socket.receive_str() == "GRÜSS"
            await socket.send_bytes(b"\x00\xff")
            assert await socket.receive_bytes() == b"\xff\x00"
            assert [e.passing for e in proxy.scheduler.engines] == [1]
        assert asked[0].rel_url.raw_path_qs == "/v1/realtime?model=m&x=%20"
        assert asked[0].headers["OpenAI-Beta"] == "realtime=v1"
        assert asked[0].headers["Authorization"] == "Bearer k"
        await until(lambda: [e.passing for e in proxy.scheduler.engines] == [0])


@pytest.mark.parametrize(("code", "told"), [(1000, 1000), (1011, 1011), (4001, 4001)])
async def test_the_engine_s_close_code_reaches_the_client(code: int, told: int) -> None:
    async def script(socket: web.WebSocketResponse, _: web.Request) -> None:
        await socket.close(code=code, message=b"because")

    async with proxied(script) as (proxy, _), proxy.client.ws_connect("/v1/realtime") as socket:
        message = await socket.receive()
        assert (message.type, message.data) in {(WSMsgType.CLOSE, told), (WSMsgType.CLOSED, None)}
        assert socket.close_code == told


async def test_an_engine_that_breaks_off_is_told_as_a_failure() -> None:
    async def script(_: web.WebSocketResponse, request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()

    async with proxied(script) as (proxy, _), proxy.client.ws_connect("/v1/realtime") as socket:
        await socket.receive()
        assert socket.close_code == 1011, "1006 is not for the wire"


async def test_the_client_s_close_code_reaches_the_engine() -> None:
    codes: list[object] = []

    async def script(socket: web.WebSocketResponse, _: web.Request) -> None:
        message = await socket.receive()
        codes.append(message.data)
        await socket.close()

    async with proxied(script) as (proxy, _):
        async with proxy.client.ws_connect("/v1/realtime") as socket:
            await socket.close(code=4002)
        await until(lambda: codes)
        assert codes == [4002]


async def test_a_client_that_breaks_off_leaves_nothing_behind() -> None:
    ended = asyncio.Event()

    async def script(socket: web.WebSocketResponse, _: web.Request) -> None:
        await socket.receive()
        ended.set()

    async with proxied(script) as (proxy, _):
        socket = await proxy.client.ws_connect("/v1/realtime")
        socket._response.connection.transport.abort()  # type: ignore[union-attr]
        await asyncio.wait_for(ended.wait(), 5)
        await until(lambda: [e.passing for e in proxy.scheduler.engines] == [0])


async def test_a_message_that_is_too_long_ends_it() -> None:
    async with proxied(echo, max_body_bytes=1000) as (proxy, _), proxy.client.ws_connect("/v1/realtime") as socket:
        await socket.send_str("x" * 2000)
        await socket.receive()
        assert socket.close_code == 1009


async def test_an_engine_that_refuses_or_is_not_there() -> None:
    async with proxied(echo) as (proxy, _):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await proxy.client.ws_connect("/v1/realtime?refuse=1")
        assert refused.value.status == 403
        with pytest.raises(aiohttp.WSServerHandshakeError) as unknown:
            await proxy.client.ws_connect("/v1/unknown")
        assert unknown.value.status == 404
    async with live_proxy("http://127.0.0.1:9") as proxy:
        with pytest.raises(aiohttp.WSServerHandshakeError) as absent:
            await proxy.client.ws_connect("/v1/realtime")
        assert absent.value.status == 503
