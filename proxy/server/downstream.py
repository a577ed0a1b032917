"""Writing a relayed stream to the client from the callback that read it.

aiohttp's own way of writing is a coroutine per piece: a task switch for every token, about half of what relaying one
costs. So the head goes out by aiohttp, and so does the end; what lies between is written to the transport here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from aiohttp import web
    from aiohttp.abc import AbstractStreamWriter

_MOST_UNSENT_BYTES = 1 << 16


class Downstream:
    """The body of one answer on its way to the client; bytes are framed as the head has announced."""

    __slots__ = ("_chunked", "_transport", "_writer")

    def __init__(self, transport: asyncio.Transport, writer: AbstractStreamWriter, *, chunked: bool) -> None:
        self._transport = transport
        self._writer = writer
        self._chunked = chunked

    @classmethod
    async def begin(cls, request: web.Request, response: web.StreamResponse) -> Downstream:
        """Send the head of an answer.

        Raises:
            ConnectionResetError: the client has left.
        """
        writer = await response.prepare(request)
        transport = request.transport
        if transport is None or writer is None:
            raise ConnectionResetError("the client has left")
        writer.send_headers()
        return cls(transport, writer, chunked=response.headers.get("Transfer-Encoding") == "chunked")

    def write(self, data: bytes) -> bool:
        """Send a piece of the body, which must not be empty; whether the client keeps up.

        Raises:
            ConnectionResetError: the client has left.
        """
        transport = self._transport
        if transport.is_closing():
            raise ConnectionResetError("the client has left")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return transport.get_write_buffer_size() <= _MOST_UNSENT_BYTES

    async def drain(self) -> None:
        """Wait until the client has read most of what was sent."""
        await self._writer.drain()
