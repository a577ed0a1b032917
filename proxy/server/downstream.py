"""Writing a relayed stream to the client from the callback that read it.

aiohttp's own way of writing is a coroutine per piece: a task switch for every token, about half of what relaying one
costs. So the head goes out by aiohttp, and so does the end; what lies between is written to the transport here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.server.answers import join_head

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiohttp import web
    from aiohttp.abc import AbstractStreamWriter

    from proxy.server.meter import StreamMeter
    from proxy.wire.usage import UsageRemover

_MOST_UNSENT_BYTES = 1 << 16


class Downstream:
    """The body of one answer on its way to the client; bytes are framed as the head has announced."""

    __slots__ = ("_chunked", "_meter", "_now", "_remover", "_response", "_transport", "_writer")

    _transport: asyncio.Transport
    _writer: AbstractStreamWriter
    _chunked: bool

    def __init__(
        self,
        response: web.StreamResponse,
        meter: StreamMeter,
        now: Callable[[], float],
        remover: UsageRemover | None = None,
    ) -> None:
        """``meter`` sees all that is read, ``remover`` takes out what the client has not asked for."""
        self._response = response
        self._meter = meter
        self._now = now
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
            self._meter.on_read(first, self._now())

    def pass_on(self, data: bytes) -> bool:
        """Send a piece of the body, which must not be empty; whether the client keeps up. The path of every token.

        Raises:
            ConnectionResetError: the client has left.
        """
        passed = data if self._remover is None else self._remover.feed(data)
        keeps_up = self._write(passed) if passed else True
        self._meter.on_read(data, self._now())
        return keeps_up

    def end(self) -> None:
        """Send what was held back.

        Of a stream that was cut, the part of an event that is held back goes with it: the error takes its place.

        Raises:
            ConnectionResetError: the client has left.
        """
        if self._remover is not None and (rest := self._remover.end()):
            self._write(rest)

    async def drain(self) -> None:
        """Wait until the client has read most of what was sent."""
        await self._writer.drain()

    def _filtered(self, data: bytes) -> bytes:
        return data if self._remover is None or not data else self._remover.feed(data)

    def _write(self, data: bytes) -> bool:
        transport = self._transport
        if transport.is_closing():
            raise ConnectionResetError("the client has left")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return transport.get_write_buffer_size() <= _MOST_UNSENT_BYTES
