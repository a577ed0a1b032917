"""A client that costs little: requests as bytes, answers known by their last bytes."""

from __future__ import annotations

import asyncio
from typing import cast
from urllib.parse import urlsplit

_LAST_CHUNK = b"0\r\n\r\n"
_PROMPT = "All happy families are alike; each unhappy family is unhappy in its own way. " * 6
"""Some 460 bytes, as a short question has with its instructions."""


def request(url: str, tokens: int, begin: str = "") -> bytes:
    """Return a streamed chat request that asks for so many tokens; its prompt has a beginning of its own, if told."""
    message = f'{{"role": "user", "content": "{begin}{_PROMPT}"}}'
    body = f'{{"model": "null", "stream": true, "max_tokens": {tokens}, "messages": [{message}]}}'.encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Authorization: Bearer sk-bench\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Load:
    """Connections that each send a request, and the next when that one has been answered, until all are."""

    def __init__(self, url: str, *, requests: int, tokens: int) -> None:
        self.url = url
        self.sent = request(url, tokens)
        self.requests = requests
        self.begun = self.answered = self.first = 0
        """Requests sent, those answered to the end, and those of which something has come."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._made: list[asyncio.Transport] = []

    async def open(self, connections: int) -> None:
        """Make the connections, and send the first requests."""
        target, loop = urlsplit(self.url), asyncio.get_running_loop()
        host, port = target.hostname or "", target.port or 80
        for _ in range(connections):
            transport, client = await loop.create_connection(lambda: _Client(self), host, port)
            self._made.append(transport)
            client.next()

    async def finish(self) -> None:
        """Wait until all requests have been answered.

        Raises:
            RuntimeError: one was not, or not as it should be.
        """
        try:
            await self._over
        finally:
            self.close()

    def close(self) -> None:
        """Leave, whatever is still to come."""
        self._end()
        for transport in self._made:
            transport.abort()

    def note_answer(self) -> None:
        """Count one."""
        self.answered += 1
        if self.answered == self.requests:
            self._end()

    def fail(self, why: str) -> None:
        """End it all."""
        if not self._over.done():
            self._over.set_exception(RuntimeError(f"{self.answered} of {self.requests} requests answered: {why}"))

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)


class _Client(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self._load = load
        self._begun = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def next(self) -> None:
        load = self._load
        if load.begun < load.requests:
            load.begun += 1
            self._begun = False
            self._transport.write(load.sent)

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._load.first += 1
            if not data.startswith(b"HTTP/1.1 200 "):
                self._load.fail(data[:200].decode(errors="replace"))
        self._tail = (self._tail + data[-len(_LAST_CHUNK) :])[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK:
            self._load.note_answer()
            self.next()

    def connection_lost(self, error: Exception | None) -> None:
        self._load.fail(f"a connection has ended ({error})")
