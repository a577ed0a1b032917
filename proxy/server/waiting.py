"""Telling a client that its request still waits, by comments in a stream that has not begun.

A comment says nothing to a client of server-sent events, but every proxy and timeout on its way sees that the
connection is alive. The price: the head of the answer is out, with status 200, before anybody knows how the request
will end. A refusal, or an engine's error, is then the stream's only event.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.server.answers import STARTED, carried

if TYPE_CHECKING:
    from proxy.core.actions import Action
    from proxy.server.driver import Ticket

_COMMENT = b": waiting\n\n"


async def decided(ticket: Ticket, request: web.Request, every_seconds: float, headers: dict[str, str]) -> Action:
    """Wait for the scheduler's decision on a stream's request, with a comment to its client each ``every_seconds``.

    ``headers`` go into the head of the answer, which the first comment needs.

    Raises:
        ConnectionResetError: the client has left.
    """
    while True:
        done, _ = await asyncio.wait((ticket,), timeout=every_seconds)
        if done:
            return ticket.result()
        response = carried(request, STARTED)
        if response is None:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **headers})
            response.headers["Cache-Control"] = "no-cache"
            request[STARTED] = response
            await response.prepare(request)
        await response.write(_COMMENT)


def as_event(body: bytes, *, named: bool = False) -> bytes:
    """Return a whole answer as one event, its bytes as they are but for their line ends.

    ``named``: as an error of an API whose events have names.
    """
    return (
        (b"event: error\n" if named else b"")
        + b"".join(b"data: %b\n" % line for line in body.splitlines() or [b""])
        + b"\n"
    )
