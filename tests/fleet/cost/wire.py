"""A client and an engine that cost little, in one process, so that one clock tells of both."""

from __future__ import annotations

import asyncio
import re
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

_LAST_CHUNK = b"0\r\n\r\n"
_PROMPT = "All happy families are alike; each unhappy family is unhappy in its own way. " * 6
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MODELS = b'{"object":"list","data":[{"id":"null","object":"model"}]}'
_EVENT = b'data: {"id":"c","object":"text_completion","model":"null","choices":[{"index":0,"text":" a"}]}\n\n'


class InstantEngine:
    """Answers each request at once with one token, and keeps when the last one came."""

    def __init__(self) -> None:
        self.url = ""
        self.asked_at = 0.0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Answering(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()


class _Answering(asyncio.Protocol):
    def __init__(self, engine: InstantEngine) -> None:
        self._engine = engine
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head = self._received.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(self._received, 0, head)
        if head < 4 or len(self._received) < head + (int(length[1]) if length else 0):
            return
        if self._received.startswith(b"POST"):
            self._engine.asked_at = perf_counter()
            answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            events = _EVENT + b"data: [DONE]\n\n"
            answer += b"%x\r\n%b\r\n%b" % (len(events), events, _LAST_CHUNK)
        else:
            answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_MODELS)
            answer += _MODELS
        self._received = b""
        self._transport.write(answer)


class Connection(asyncio.Protocol):
    """A client's, that is kept; one request at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._answered: asyncio.Future[None] | None = None
        self._first_at = 0.0
        self._tail = b""

    @classmethod
    async def open(cls, url: str) -> Connection:
        target = urlsplit(url)
        make = asyncio.get_running_loop().create_connection
        _, made = await make(lambda: cls(url), target.hostname or "", target.port or 80)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    async def ask(self, tokens: int = 1) -> float:
        """Send a streamed request and return when the answer began, once it is complete.

        Raises:
            RuntimeError: it is not answered, or refused.
        """
        body = b'{"model": "null", "stream": true, "max_tokens": %d, "prompt": "%b"}' % (tokens, _PROMPT.encode())
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(self._url).netloc}\r\nContent-Type: application/json\r\n"
        )
        self._answered = asyncio.get_running_loop().create_future()
        self._first_at = 0.0
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self._answered
        return self._first_at

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._first_at:
            self._first_at = perf_counter()
            if not data.startswith(b"HTTP/1.1 200 "):
                self._fail(data[:200].decode(errors="replace"))
        self._tail = (self._tail + data[-len(_LAST_CHUNK) :])[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection has ended ({error})")

    def _fail(self, why: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(RuntimeError(f"{self._url} did not answer: {why}"))
