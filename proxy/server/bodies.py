"""Reading the body of a request, within its limits of size and time, and looking into one that is compressed."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, hdrs, web

from proxy.core.request import RejectReason
from proxy.server.access import AccessError
from proxy.server.answers import carried
from proxy.wire.coding import BrokenCodingError, TooLongError, inflate
from proxy.wire.errors import answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import StreamReader
    from multidict import MultiMapping

    from proxy.config import Settings

BODY_SECONDS = web.AppKey("body_seconds", list[float])
"""How long a body may take, as the one item of a list: it can change while the application runs."""


_EMPTY: deque[bytes] = deque()


@dataclass(slots=True)
class Uploads:
    """What is held of bodies that have not come to their end, or pass the queue by.

    Each is bounded, but so must be all of them together.
    """

    most_bytes: int
    held_bytes: int = 0

    def hold(self, size: int) -> None:
        """Count more of a body.

        Raises:
            AccessError: too much is held already.
        """
        if self.held_bytes + size > self.most_bytes:
            raise AccessError(RejectReason.QUEUE_FULL, answer(RejectReason.QUEUE_FULL))
        self.held_bytes += size

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Count a body for as long as it is needed.

        Raises:
            AccessError: too much is held already.
        """
        self.hold(size)
        try:
            yield
        finally:
            self.held_bytes -= size


UPLOADS = web.AppKey("uploads", Uploads)


_CONTINUED = web.RequestKey("continued", bool)
"""There for a request whose client waited for a word before it sent the body, and has got it."""


def limit_bodies(app: web.Application, settings: Settings) -> None:
    """Bound the time of every body that is read by ``read_body``, and the size of all that are being read."""
    app[BODY_SECONDS] = [settings.body_timeout_seconds]
    app[UPLOADS] = Uploads(settings.max_upload_bytes)


async def expect_later(request: web.Request) -> None:
    """Leave an ``Expect`` alone: whether the body is wanted is not known before its request has been let in.

    Raises:
        HTTPExpectationFailed: it is not ``100-continue``.
    """
    if request.version == HttpVersion11 and not withholds_body(request):
        raise web.HTTPExpectationFailed(text="of all that can be expected, only 100-continue is known here")


def withholds_body(request: web.Request) -> bool:
    """Whether the client sends its body only when it is told to go on, or has waited for that in vain."""
    if hdrs.EXPECT not in request.headers:
        return False
    expects = request.headers[hdrs.EXPECT].lower() == "100-continue"
    return expects and request.version == HttpVersion11 and request.can_read_body and not carried(request, _CONTINUED)


def close_unread(request: web.Request, response: web.StreamResponse) -> None:
    """End the connection of a client that was answered instead of being told to go on: its body may follow or not."""
    if withholds_body(request):
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"  # the head has been made by now


@dataclass(slots=True)
class Body:
    """A request's body. It is let go of when an engine has answered: streams last for long, and prompts are large."""

    sent: bytes
    """As it came, or as an engine is to get it."""
    plain: bytes
    """As it reads once its ``Content-Encoding`` is undone."""

    @property
    def size_bytes(self) -> int:
        """What it takes up."""
        return len(self.sent) if self.plain is self.sent else len(self.sent) + len(self.plain)

    def forget(self) -> None:
        """Let go of it."""
        self.sent = self.plain = b""


async def read_body(request: web.Request) -> bytes:
    """Return the whole body, as it came; its client is told to send it, if it waits for that.

    Raises:
        AccessError: too much is held of other bodies.
        HTTPRequestEntityTooLarge: it is larger than the application allows.
        RequestPayloadError: its chunks are malformed.
        HTTPRequestTimeout: it has not come in time.
    """
    if not request.can_read_body:
        return b""
    uploads, content, most = request.app[UPLOADS], request.content, request.client_max_size
    if (told := request.content_length or 0) > most:
        raise web.HTTPRequestEntityTooLarge(most, told)
    if withholds_body(request):
        request[_CONTINUED] = True
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # of the answer, nothing has been sent
    if content.is_eof():  # all of it has come with the head, as most do: nothing to wait for
        whole = _take(content)
        if len(whole) > most:
            raise web.HTTPRequestEntityTooLarge(most, len(whole))
        uploads.hold(len(whole))
        uploads.held_bytes -= len(whole)
        return whole
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(request.app[BODY_SECONDS][0]):
            while piece := await content.readany():
                if size + len(piece) > most:
                    raise web.HTTPRequestEntityTooLarge(most, size + len(piece))
                uploads.hold(len(piece))
                size += len(piece)
                pieces.append(piece)
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    finally:
        uploads.held_bytes -= size
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _take(content: StreamReader) -> bytes:
    """Return all of a body that has come to its end. What aiohttp keeps it in goes with it: a stream lasts for long."""
    buffer = content._buffer  # noqa: SLF001
    if len(buffer) == 1 and not content._protocol._reading_paused and content.exception() is None:  # noqa: SLF001
        whole = buffer[0]  # read by aiohttp, each would have it look for more in a connection that does not pause
    else:
        whole = content.read_nowait()
    content._buffer = _EMPTY  # noqa: SLF001 - a deque takes as much as a short prompt
    return whole


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
