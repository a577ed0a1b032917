"""Sending a client's request to an engine, and what can go wrong on the way."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from proxy.wire.errors import UpstreamFailure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from multidict import CIMultiDictProxy

# vLLM closes idle connections after 5 s. A pooled connection must be given up before that: a request sent on one
# that the engine is just closing fails, and nobody can tell whether it was read.
_KEEP_ALIVE_SECONDS = 4.0
_MAX_HEADER_BYTES = 1 << 16
_LARGE_BODY_BYTES = 1 << 20


class EngineError(Exception):
    """An engine failed a request; ``failure`` says at which point."""

    def __init__(self, failure: UpstreamFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. There is no limit on a whole answer: streams may last for hours."""

    connect: float
    idle: float
    """Longest silence of the engine, also before its first byte."""


class EngineAnswer:
    """An engine's answer whose head has come."""

    def __init__(self, response: aiohttp.ClientResponse, idle_seconds: float) -> None:
        self._response = response
        self._idle_seconds = idle_seconds
        self._loop = asyncio.get_running_loop()
        self._waits_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def reason(self) -> str | None:
        return self._response.reason

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        return self._response.headers

    @property
    def content_type(self) -> str:
        return self._response.content_type

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the connection's end tells the body's: then it cannot be told from a cut."""
        return "Content-Length" not in self.headers and "Transfer-Encoding" not in self.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """Give the body in the pieces in which it arrives.

        Raises:
            EngineError: the body ended too early, or the engine fell silent.
        """
        self._timer = self._loop.call_later(self._idle_seconds, self._check)
        content = self._response.content
        try:
            while True:
                self._waits_since = self._loop.time()
                data = await content.readany()
                self._waits_since = None
                if not data and content.at_eof():
                    return
                yield data
        except TimeoutError as error:
            raise EngineError(UpstreamFailure.TIMED_OUT) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(UpstreamFailure.CUT_MID_STREAM) from error

    async def read(self) -> bytes:
        """Return the whole body, of which we know that it is short.

        Raises:
            EngineError: as from ``chunks``.
        """
        return b"".join([data async for data in self.chunks()])

    def close(self) -> None:
        """Abort what has not been read. A connection whose answer is complete has gone back to the pool by itself."""
        if self._timer is not None:
            self._timer.cancel()
        self._response.close()

    def _check(self) -> None:
        """Look whether the engine has been silent for too long: one timer per answer, not one per read.

        aiohttp's own limit costs a timer for every read, and does not end an answer whose chunks are malformed.
        """
        waited = 0.0 if self._waits_since is None else self._loop.time() - self._waits_since
        if waited >= self._idle_seconds:
            self._response.content.set_exception(TimeoutError())
        else:
            self._timer = self._loop.call_later(self._idle_seconds - waited, self._check)


class EngineClient:
    """Connections to all engines; one per process."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._idle_seconds = timeouts.idle
        # aiohttp's defaults would queue at 100 connections, stop every answer after five minutes, inflate bodies that
        # must pass as they are, and keep one cookie jar for all clients.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS, enable_cleanup_closed=False),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            trust_env=False,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def send(
        self, base_url: str, method: str, path_and_query: str, headers: Iterable[tuple[str, str]], body: bytes
    ) -> AsyncIterator[EngineAnswer]:
        """Send a request and give the answer once its head has come; leaving early aborts it at the engine.

        Raises:
            EngineError: no answer came; ``CONNECT_FAILED`` is the only failure after which nothing was sent.
        """
        try:
            async with asyncio.timeout(self._idle_seconds):
                response = await self._session.request(
                    method,
                    URL(base_url + path_and_query, encoded=True),
                    headers=_one_spelling(headers),
                    # aiohttp warns of longer bodies in one piece: writing one may hold up the loop.
                    data=(body if len(body) < _LARGE_BODY_BYTES else BytesIO(body)) or None,
                    allow_redirects=False,
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineError(UpstreamFailure.CONNECT_FAILED) from error
        except TimeoutError as error:
            raise EngineError(UpstreamFailure.TIMED_OUT) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(UpstreamFailure.CUT_BEFORE_ANSWER) from error
        answer = EngineAnswer(response, self._idle_seconds)
        try:
            yield answer
        finally:
            answer.close()  # closing the connection is what makes vLLM abort the generation


def _one_spelling(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Spell every header as it came first: aiohttp would drop one that is repeated in another spelling."""
    names: dict[str, str] = {}
    return [(names.setdefault(name.lower(), name), value) for name, value in headers]
