"""A way to the Redis server that can be cut, held up and mended, without the server knowing."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from redis_server import free_port


class Link:
    """Passes bytes on to a port, both ways."""

    def __init__(self, to_port: int) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.delay_seconds = 0.0
        """Of everything that goes through."""
        self._to_port = to_port
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def cut(self) -> None:
        """Pass nothing on, and close nothing: as a network that swallows all."""
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.close()
            return
        async with asyncio.TaskGroup() as group:
            for task in (
                group.create_task(self._pump(reader, there_writer)),
                group.create_task(self._pump(there_reader, writer)),
            ):
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                writer.write(data)
                await writer.drain()
        writer.close()
