"""Sending a client's request to an engine, and what can go wrong on the way."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yarl import URL

from proxy.upstream.connection import Connection, EngineAnswer, EngineError, Watch
from proxy.upstream.credentials import EngineTrust
from proxy.wire.errors import UpstreamFailure
from proxy.wire.keys import CREDENTIALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Cutter", "EngineAnswer", "EngineClient", "EngineError", "Timeouts"]

# vLLM closes idle connections after 5 s. A pooled connection is given up before that: of a request sent on one that the
# engine is just closing, it cannot always be told whether it was read.
_KEEP_ALIVE_SECONDS = 4.0
_SENDS_A_LENGTH = frozenset(("POST", "PUT", "PATCH"))


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. There is no limit on a whole answer: streams may last for hours."""

    connect: float
    idle: float
    """Longest silence of the engine, also before its first byte."""


class Cutter:
    """Ends an exchange with an engine from outside, at whatever point it is."""

    __slots__ = ("_end", "_is_cut")

    def __init__(self) -> None:
        self._is_cut = False
        self._end: Callable[[], None] | None = None

    def cut(self) -> None:
        """End the exchange as ``REMOVED``."""
        self._is_cut = True
        if self._end is not None:
            self._end()

    def ends_with(self, end: Callable[[], None]) -> None:
        """Say how the exchange ends as it stands now."""
        self._end = end
        if self._is_cut:
            end()

    def renew(self) -> None:
        """Forget the exchange that is over, cut or not, as another begins."""
        self._is_cut, self._end = False, None


@dataclass(slots=True)
class _Engine:
    """Where an engine is, and its idle connections, the one idle for longest first."""

    host: str
    port: int
    authority: str
    prefix: str
    secure: bool
    idle: deque[Connection] = field(default_factory=deque)


class EngineClient:
    """Connections to all engines; one per process."""

    def __init__(self, timeouts: Timeouts, trust: EngineTrust | None = None) -> None:
        self.timeouts = timeouts
        self._trust = trust or EngineTrust()
        self._engines: dict[str, _Engine] = {}
        self._loop = asyncio.get_running_loop()
        self._watch = Watch(self._loop)
        self.busy = 0
        """Connections being opened or used."""

    async def close(self) -> None:
        """Close the idle connections."""
        self._watch.close()
        for engine in self._engines.values():
            while engine.idle:
                engine.idle.pop().abort()
        await asyncio.sleep(0)  # the loop closes their sockets in its next turn

    def idle(self, base_url: str) -> int:
        """Connections to an engine that wait to be used again."""
        engine = self._engines.get(base_url)
        return 0 if engine is None else sum(not connection.closed for connection in engine.idle)

    def reconnect(self) -> None:
        """Open new connections from now on, as what is trusted has changed; those in use may end what they do."""
        for base_url in list(self._engines):
            self.forget(base_url)

    def forget(self, base_url: str) -> None:
        """Close the idle connections to an engine that is not to be used any more."""
        engine = self._engines.pop(base_url, None)
        while engine is not None and engine.idle:
            engine.idle.pop().abort()

    def send(
        self,
        base_url: str,
        method: str,
        path_and_query: str,
        headers: Iterable[tuple[str, str]],
        body: bytes,
        *,
        cutter: Cutter | None = None,
    ) -> _Exchange:
        """Send a request and, in ``async with``, give the answer once its head has come.

        Leaving early aborts it at the engine.

        Raises:
            EngineError: no answer came; ``CONNECT_FAILED`` is the only failure where it has provably not been read.
        """
        engine = self._engines.get(base_url) or self._add(base_url)
        if (key := self._trust.keys.of(base_url)) is not None:
            headers = _with_key(headers, key)
        request = _head(engine, method, path_and_query, headers, body)
        return _Exchange(self, base_url, engine, (method, request, body), cutter)

    async def ask(
        self, base_url: str, engine: _Engine, sent: tuple[str, bytes, bytes], cutter: Cutter | None
    ) -> EngineAnswer:
        """Send a request and wait for the head of its answer, on a new connection where an idle one has just ended."""
        while True:
            idle = self._idle(engine)
            connection = idle or await self._connect(engine)
            answer = connection.ask(*sent, self.timeouts.idle)
            if cutter is not None:
                cutter.ends_with(answer.cut)
            try:
                await answer.head()
            except EngineError as error:
                self.release(base_url, engine, answer)
                if idle is None or error.failure is not UpstreamFailure.CONNECT_FAILED:
                    raise
            except BaseException:
                self.release(base_url, engine, answer)
                raise
            else:
                return answer

    def release(self, base_url: str, engine: _Engine, answer: EngineAnswer) -> None:
        """Be done with an answer: the connection of a whole one is kept; any other is closed, which aborts it there."""
        if (reusable := answer.close()) is not None:
            if self._engines.get(base_url) is engine:
                engine.idle.append(reusable)
            else:  # forgotten meanwhile
                reusable.abort()

    def _add(self, base_url: str) -> _Engine:
        url = URL(base_url)
        assert url.raw_host is not None
        assert url.port is not None
        engine = _Engine(url.raw_host, url.port, url.raw_authority, url.raw_path.rstrip("/"), url.scheme == "https")
        self._engines[base_url] = engine
        return engine

    def _idle(self, engine: _Engine) -> Connection | None:
        """Take the connection that was used last, as the others may be closed the sooner the less they are used."""
        oldest = self._loop.time() - _KEEP_ALIVE_SECONDS
        while engine.idle and engine.idle[0].idle_since < oldest:
            engine.idle.popleft().abort()
        while engine.idle:
            connection = engine.idle.pop()
            if not connection.stale:
                return connection
            connection.abort()
        return None

    async def _connect(self, engine: _Engine) -> Connection:
        trust = self._trust
        if engine.secure and trust.tls is None:
            trust.tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self.timeouts.connect):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._watch), engine.host, engine.port, ssl=trust.tls if engine.secure else None
                )
        except OSError as error:  # a TimeoutError and an SSLError are such as well
            raise EngineError(UpstreamFailure.CONNECT_FAILED) from error
        return connection


_NOTHING = "", b"", b""


class _Exchange:
    """One request and its answer. By hand, as a generator for it would cost as much as the connection's look-up."""

    __slots__ = ("_answer", "_base_url", "_client", "_cutter", "_engine", "_sent")

    def __init__(
        self,
        client: EngineClient,
        base_url: str,
        engine: _Engine,
        sent: tuple[str, bytes, bytes],
        cutter: Cutter | None,
    ) -> None:
        self._client = client
        self._base_url = base_url
        self._engine = engine
        self._sent = sent
        self._cutter = cutter

    async def __aenter__(self) -> EngineAnswer:
        self._client.busy += 1
        try:
            self._answer = await self._client.ask(self._base_url, self._engine, self._sent, self._cutter)
        except BaseException:
            self._client.busy -= 1
            raise
        self._sent = _NOTHING  # a prompt is large, and its answer may last for long
        return self._answer

    async def __aexit__(self, *_: object) -> None:
        self._client.busy -= 1
        self._client.release(self._base_url, self._engine, self._answer)


def _with_key(headers: Iterable[tuple[str, str]], key: str) -> list[tuple[str, str]]:
    """Put our own key in the place of whatever a client has sent."""
    kept = [(name, value) for name, value in headers if name.lower() not in CREDENTIALS]
    return [*kept, ("Authorization", f"Bearer {key}")]


def _head(engine: _Engine, method: str, path_and_query: str, headers: Iterable[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"{method} {engine.prefix}{path_and_query} HTTP/1.1\r\nHost: {engine.authority}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if body or method in _SENDS_A_LENGTH:
        lines.append(f"Content-Length: {len(body)}")
    lines.append("\r\n")
    return "\r\n".join(lines).encode("utf-8", "surrogateescape")
