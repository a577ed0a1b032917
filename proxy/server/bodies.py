"""Reading the body of a request, within its limits of size and time."""

from __future__ import annotations

import asyncio

from aiohttp import web

BODY_SECONDS = web.AppKey("body_seconds", list[float])
"""How long a body may take, as the one item of a list: it can change while the application runs."""


async def read_body(request: web.Request) -> bytes:
    """Return the whole body, inflated if it is compressed.

    Raises:
        HTTPRequestEntityTooLarge: it is larger than the application allows, before or after it is inflated.
        RequestPayloadError: it cannot be inflated, or its chunks are malformed.
        HTTPRequestTimeout: it has not come in time.
    """
    if not request.can_read_body:
        return await request.read()
    try:
        async with asyncio.timeout(request.app[BODY_SECONDS][0]):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
