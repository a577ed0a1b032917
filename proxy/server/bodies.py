"""Reading the body of a request, within its limits of size and time, and looking into one that is compressed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.wire.coding import BrokenCodingError, TooLongError, inflate

if TYPE_CHECKING:
    from multidict import MultiMapping

BODY_SECONDS = web.AppKey("body_seconds", list[float])
"""How long a body may take, as the one item of a list: it can change while the application runs."""


async def read_body(request: web.Request) -> bytes:
    """Return the whole body, as it came.

    Raises:
        HTTPRequestEntityTooLarge: it is larger than the application allows.
        RequestPayloadError: its chunks are malformed.
        HTTPRequestTimeout: it has not come in time.
    """
    if not request.can_read_body:
        return await request.read()
    try:
        async with asyncio.timeout(request.app[BODY_SECONDS][0]):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


async def looked_into(headers: MultiMapping[str], body: bytes, most_bytes: int) -> bytes:
    """Return a body as it reads once its ``Content-Encoding`` is undone.

    Raises:
        RequestPayloadError: the body is not what its headers say.
        HTTPRequestEntityTooLarge: more than ``most_bytes`` are in it.
        UnknownCodingError: as from ``inflate``.
    """
    codings = ",".join(headers.getall("Content-Encoding", ()))
    if not codings or not body:
        return body
    try:
        # A few bytes may hold megabytes, for which the streams of others must not wait.
        return await asyncio.to_thread(inflate, body, codings, most_bytes)
    except BrokenCodingError as error:
        raise web.RequestPayloadError from error
    except TooLongError as error:
        raise web.HTTPRequestEntityTooLarge(most_bytes, most_bytes + 1) from error
