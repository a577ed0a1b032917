"""Answers of the proxy's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from aiohttp import HttpVersion11, web

from proxy.wire.errors import ANTHROPIC_PATH
from proxy.wire.headers import forward_response_headers

if TYPE_CHECKING:
    from proxy.upstream.client import EngineAnswer
    from proxy.wire.errors import ErrorAnswer


STARTED = web.RequestKey("started", web.StreamResponse)
"""Where a request keeps its answer once the head of it is on its way."""


_Carried = TypeVar("_Carried")


def carried(request: web.Request, key: web.RequestKey[_Carried]) -> _Carried | None:
    """What a request carries under a key, if anything; its own ``get`` raises an exception inside if nothing does."""
    found: _Carried | None = request._state.get(key)  # noqa: SLF001
    return found


def forget(request: web.Request, key: web.RequestKey[_Carried]) -> None:
    """Let a request carry nothing more under a key."""
    request._state.pop(key, None)  # noqa: SLF001


UNTYPED = web.RequestKey("untyped", bool)
"""There for a request whose engine has answered without a Content-Type."""


def relayed(request: web.Request, upstream: EngineAnswer) -> web.StreamResponse:
    """Make the client's answer of an engine's: its status and headers, with no type where the engine tells none."""
    if "Content-Type" not in upstream.headers:
        request[UNTYPED] = True
    return web.StreamResponse(
        status=upstream.status,
        reason=upstream.reason,
        headers=forward_response_headers(upstream.headers, keep_content_length=True),
    )


class _Sent(web.StreamResponse):
    """Stands for an answer of which nothing is left to be sent, whatever it was."""

    _eof_sent = True
    _keep_alive = True


_SENT = _Sent()


def send_whole(request: web.Request, head: bytes, body: bytes) -> web.StreamResponse:
    """Send an answer at once, past aiohttp, on a connection that stays open; return what stands for it.

    Raises:
        ConnectionResetError: the client has left.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client has left")
    request[STARTED] = _SENT
    request.writer.output_size += len(head) + len(body)
    transport.write(head + body)
    return _SENT


def join_head(response: web.StreamResponse) -> None:
    """Send the head of an answer with the first piece of its body, which is there already: one write, and not two."""
    response._send_headers_immediately = False  # noqa: SLF001 - as aiohttp does it with answers of its own


def leave_untyped(request: web.Request, response: web.StreamResponse) -> None:
    """Take out the Content-Type that aiohttp has made up, just before a head is sent."""
    if carried(request, UNTYPED):
        response.headers.popall("Content-Type", None)


def end_by_closing(request: web.Request, response: web.StreamResponse) -> None:
    """Close the connection after an answer whose end nothing else tells: HTTP/1.0 has no chunks.

    aiohttp does not say that it stays open then, but leaves it open for a client that asked for it.
    """
    if request.version < HttpVersion11 and response.content_length is None:
        response.force_close()


async def start(request: web.Request, response: web.StreamResponse) -> None:
    """Send the head of a relayed answer. From here on, a failure can only be told by cutting the connection."""
    request[STARTED] = response
    await response.prepare(request)


def error_response(told: ErrorAnswer, path: str = "") -> web.Response:
    """Make an answer of an error, in the shape that clients of ``path`` expect."""
    anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
    body = told.anthropic_body() if anthropic else told.body()
    return web.Response(status=told.status, body=body, headers=told.headers())
