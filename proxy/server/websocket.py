"""WebSockets (``/v1/realtime`` and others): what either side says goes to the other, the end of it included."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import WSMsgType, web

from proxy.server.answers import error_response
from proxy.wire import headers as wire_headers
from proxy.wire.errors import UpstreamFailure, answer

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from proxy.upstream.credentials import EngineTrust

_Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse

_HEARTBEAT_SECONDS = 30.0
"""Who does not answer a ping within half of it is gone."""
_CLOSE_SECONDS = 2.0
_LOOK_SECONDS = 0.1
"""How often it is looked whether a client is there whose bytes are not read."""
_TCP_ENDED = (7, 8)
"""States of a TCP connection, as Linux numbers them: closed, or closed by the other side (close wait)."""
_KEY_PROTOCOL = "openai-insecure-api-key."
"""So begins the subprotocol by which browsers hand over their key."""
_NO_STATUS, _ABNORMAL, _NORMAL, _FAILED = 1005, 1006, 1000, 1011


def wants_websocket(request: web.Request) -> bool:
    """Whether a request asks to go on as a WebSocket."""
    return request.method == "GET" and request.headers.get("Upgrade", "").lower() == "websocket"


class WebSockets:
    """Relays them, one connection to an engine for each of a client."""

    def __init__(self, trust: EngineTrust, connect_seconds: float, most_message_bytes: int) -> None:
        """A longer message than ``most_message_bytes`` ends the connection of its sender (1009)."""
        self._trust = trust
        self._connect_seconds = connect_seconds
        self._most_message_bytes = most_message_bytes
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent",),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def relay(self, request: web.Request, engine_id: str, *, keep_credentials: bool) -> web.StreamResponse:
        """Connect to an engine, and then the client to it, until one of them ends it."""
        protocols = [
            name
            for header in request.headers.getall("Sec-WebSocket-Protocol", ())
            for name in (part.strip() for part in header.split(","))
            if name and (keep_credentials or not name.startswith(_KEY_PROTOCOL))
        ]
        if request.transport is not None:
            request.transport.pause_reading()  # what a client sends ahead of the answer waits in its own buffers
        try:
            connecting = self._connect(request, engine_id, protocols, keep_credentials=keep_credentials)
            engine = await _while_there(request.transport, connecting)
        except aiohttp.WSServerHandshakeError as refusal:
            status = refusal.status if refusal.status >= 400 else 502
            return web.Response(status=status, text=f"the engine refuses the WebSocket: {refusal.status}\n")
        except TimeoutError:
            return error_response(answer(UpstreamFailure.TIMED_OUT), request.path)
        except (aiohttp.ClientError, OSError):
            return error_response(answer(UpstreamFailure.CONNECT_FAILED), request.path)
        finally:
            if request.transport is not None:
                request.transport.resume_reading()
        async with engine:
            client = web.WebSocketResponse(
                protocols=() if engine.protocol is None else (engine.protocol,),
                max_msg_size=self._most_message_bytes,
                heartbeat=_HEARTBEAT_SECONDS,
                timeout=_CLOSE_SECONDS,
                autoclose=False,
                compress=False,
            )
            await client.prepare(request)
            await _join(client, engine)
            return client

    async def _connect(
        self, request: web.Request, engine_id: str, protocols: list[str], *, keep_credentials: bool
    ) -> aiohttp.ClientWebSocketResponse:
        headers = [
            (name, value)
            for name, value in wire_headers.forward_request_headers(request.headers, keep_credentials=keep_credentials)
            if not name.lower().startswith("sec-websocket-")
        ]
        async with asyncio.timeout(self._connect_seconds):
            return await self._session.ws_connect(
                engine_id + request.rel_url.raw_path_qs,
                headers=[*headers, *self._trust.keys.headers(engine_id).items()],
                protocols=protocols,
                max_msg_size=self._most_message_bytes,
                heartbeat=_HEARTBEAT_SECONDS,
                timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_SECONDS),
                autoclose=False,
                ssl=self._trust.tls or True,
            )


async def _while_there(
    client: asyncio.BaseTransport | None, connecting: Coroutine[None, None, aiohttp.ClientWebSocketResponse]
) -> aiohttp.ClientWebSocketResponse:
    """Connect to an engine for a client whose bytes are not read meanwhile, so that its end is not noticed by itself.

    Raises:
        ConnectionResetError: the client has left.
    """
    task = asyncio.ensure_future(connecting)
    try:
        while not (await asyncio.wait((task,), timeout=_LOOK_SECONDS))[0]:
            if client is None or _has_left(client):
                raise ConnectionResetError("the client has left")
        return task.result()
    finally:
        task.cancel()


def _has_left(client: asyncio.BaseTransport) -> bool:
    connection, info = client.get_extra_info("socket"), getattr(socket, "TCP_INFO", None)
    if client.is_closing() or connection is None or info is None:
        return client.is_closing()
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, info, 1)[0] in _TCP_ENDED
    except OSError:
        return False  # not a TCP connection


async def _join(client: _Socket, engine: _Socket) -> None:
    """Relay both ways until one side ends; the other is told why."""
    ways = [
        (asyncio.ensure_future(_pump(client, engine)), engine),
        (asyncio.ensure_future(_pump(engine, client)), client),
    ]
    try:
        await asyncio.wait([way for way, _ in ways], return_when=asyncio.FIRST_COMPLETED)
        for way, other in ways:
            if way.done():
                code, reason = (_ABNORMAL, b"") if way.exception() is not None else way.result()
                await _end(other, code, reason)
                await _end(client if other is engine else engine, code, b"")
                break
    finally:
        for way, _ in ways:
            way.cancel()
        await asyncio.gather(*(way for way, _ in ways), return_exceptions=True)


async def _pump(source: _Socket, sink: _Socket) -> tuple[int, bytes]:
    """Hand on messages until the source ends; return its code and reason."""
    while True:
        message = await source.receive()
        match message.type:
            case WSMsgType.TEXT:
                await sink.send_str(message.data)
            case WSMsgType.BINARY:
                await sink.send_bytes(message.data)
            case WSMsgType.CLOSE:
                return message.data or _NO_STATUS, (message.extra or "").encode()
            case WSMsgType.PING | WSMsgType.PONG | WSMsgType.CONTINUATION:
                continue
            case _:  # it has ended without a word, or by what it may not say
                return source.close_code or _ABNORMAL, b""


async def _end(socket: _Socket, code: int, reason: bytes) -> None:
    """Close one side; codes that only stand for the lack of one are not sent."""
    code = {_NO_STATUS: _NORMAL, _ABNORMAL: _FAILED, 1015: _FAILED}.get(code, code)
    with suppress(ConnectionError, RuntimeError):
        await socket.close(code=code, message=reason)
