"""Answers of the proxy's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from proxy.wire.errors import ErrorAnswer


def error_response(told: ErrorAnswer) -> web.Response:
    return web.Response(status=told.status, body=told.body(), headers=told.headers())
