"""Writing a relayed stream to the client from the callback that read it.

aiohttp's own way of writing is a coroutine per piece: a task switch for every token, about half of what relaying one
costs. So the head goes out by aiohttp, and so does the end; what lies between is written to the transport here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.server.answers import join_head
from proxy.wire.chunks import chunk

if TYPE_CHECKING:
    import asyncio

    from aiohttp import web
    from aiohttp.abc import AbstractStreamWriter

    from proxy.server.driver import Driver
    from proxy.server.meter import StreamMeter
    from proxy.upstream.client import EngineAnswer
    from proxy.wire.usage import UsageRemover

_MOST_UNSENT_BYTES = 1 << 16


class Downstream:
    """The body of one answer on its way to the client; bytes are framed as the head has announced."""

    __slots__ = ("_chunked", "_driver", "_look", "_remover", "_response", "_transport", "_writer")

    _transport: asyncio.Transport
    _writer: AbstractStreamWriter
    _chunked: bool

    def __init__(
        self,
        response: web.StreamResponse,
        meter: StreamMeter,
        driver: Driver,
        remover: UsageRemover | None = None,
    ) -> None:
        """``meter`` sees all that is read, ``remover`` takes out what the client has not asked for."""
        self._response = response
        self._look = meter.on_read
        self._driver = driver
        self._remover = remover

    async def begin(self, request: web.Request, first: bytes) -> None:
        """Send the head of the answer, with the ``first`` piece of it if one has come.

        Raises:
            ConnectionResetError: the client has left.
        """
        response = self._response
        passed = self._filtered(first)
        if passed:
            join_head(response)
        writer = await response.prepare(request)
        transport = request.transport
        if transport is None or writer is None:
            raise ConnectionResetError("the client has left")
        self._transport, self._writer = transport, writer
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        if passed:
            await writer.write(passed)
        else:
            writer.send_headers()
        if first:
            self._driver.note(self._look, first)

    def pass_on(self, data: bytes, read: bytes | None = None) -> bool:
        """Send a piece of the body, which must not be empty; whether the client keeps up. The path of every token.

        ``read``: the piece as a chunk, if it came as one.

        Raises:
            ConnectionResetError: the client has left.
        """
        passed = data if self._remover is None else self._remover.feed(data)
        transport = self._transport
        if transport.is_closing():
            raise ConnectionResetError("the client has left")
        transport.write(read if read is not None and passed is data and self._chunked else self._framed(passed))
        self._driver.note(self._look, data)
        return transport.get_write_buffer_size() <= _MOST_UNSENT_BYTES

    async def go_on(self, upstream: EngineAnswer) -> None:
        """Send the rest of the answer.

        Of one that is cut, the part of an event that is held back goes with it: the error takes its place.

        Raises:
            EngineError: as from ``EngineAnswer.pump``.
            ConnectionResetError: the client has left.
        """
        try:
            await upstream.pump(self.pass_on, self._writer.drain)
        finally:
            self._driver.catch_up()
        if self._remover is not None and (rest := self._remover.end()):
            if self._transport.is_closing():
                raise ConnectionResetError("the client has left")
            self._transport.write(self._framed(rest))

    def _filtered(self, data: bytes) -> bytes:
        return data if self._remover is None or not data else self._remover.feed(data)

    def _framed(self, data: bytes) -> bytes:
        return chunk(data) if data and self._chunked else data
