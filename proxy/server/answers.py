"""Answers of the proxy's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from proxy.wire.errors import ErrorAnswer


STARTED = web.RequestKey("started", web.StreamResponse)
"""Where a request keeps its answer once the head of it is on its way."""


async def start(request: web.Request, response: web.StreamResponse) -> None:
    """Send the head of a relayed answer. From here on, a failure can only be told by cutting the connection."""
    request[STARTED] = response
    await response.prepare(request)


def error_response(told: ErrorAnswer) -> web.Response:
    return web.Response(status=told.status, body=told.body(), headers=told.headers())
