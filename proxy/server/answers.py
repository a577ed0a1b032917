"""Answers of the proxy's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from proxy.wire.errors import ANTHROPIC_PATH

if TYPE_CHECKING:
    from proxy.wire.errors import ErrorAnswer


STARTED = web.RequestKey("started", web.StreamResponse)
"""Where a request keeps its answer once the head of it is on its way."""


async def start(request: web.Request, response: web.StreamResponse) -> None:
    """Send the head of a relayed answer. From here on, a failure can only be told by cutting the connection."""
    request[STARTED] = response
    await response.prepare(request)


def error_response(told: ErrorAnswer, path: str = "") -> web.Response:
    """Make an answer of an error, in the shape that clients of ``path`` expect."""
    anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
    body = told.anthropic_body() if anthropic else told.body()
    return web.Response(status=told.status, body=body, headers=told.headers())
