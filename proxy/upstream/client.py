"""Sending a client's request to an engine, and what can go wrong on the way."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from proxy.wire.errors import UpstreamFailure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

# vLLM closes idle connections after 5 s. A pooled connection must be given up before that: a request sent on one
# that the engine is just closing fails, and nobody can tell whether it was read.
_KEEP_ALIVE_SECONDS = 4.0


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


class EngineClient:
    """Connections to all engines; one per process."""

    def __init__(self, timeouts: Timeouts) -> None:
        # aiohttp's defaults would queue at 100 connections, stop every answer after five minutes, inflate bodies that
        # must pass as they are, and keep one cookie jar for all clients.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS, enable_cleanup_closed=False),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect, sock_read=timeouts.idle),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def send(
        self, base_url: str, method: str, path_and_query: str, headers: Iterable[tuple[str, str]], body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and give the answer once its head has come; leaving early aborts it at the engine.

        Raises:
            EngineError: no answer came; ``CONNECT_FAILED`` is the only failure after which nothing was sent.
        """
        try:
            response = await self._session.request(
                method,
                URL(base_url + path_and_query, encoded=True),
                headers=list(headers),
                data=body or None,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineError(UpstreamFailure.CONNECT_FAILED) from error
        except TimeoutError as error:
            raise EngineError(UpstreamFailure.TIMED_OUT) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(UpstreamFailure.CUT_BEFORE_ANSWER) from error
        try:
            yield response
        finally:
            # Whatever has not been read is not wanted. A connection whose answer is complete went back to the pool
            # by itself; closing any other one is what makes vLLM abort the generation.
            response.close()


async def read_chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Give the body in the pieces in which it arrives.

    Raises:
        EngineError: the body ended too early, or the engine fell silent.
    """
    try:
        async for data in response.content.iter_any():
            yield data
    except TimeoutError as error:
        raise EngineError(UpstreamFailure.TIMED_OUT) from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineError(UpstreamFailure.CUT_MID_STREAM) from error


async def read_whole(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole body, of which we know that it is short.

    Raises:
        EngineError: as from ``read_chunks``.
    """
    return b"".join([data async for data in read_chunks(response)])
