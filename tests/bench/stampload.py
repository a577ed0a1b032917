"""The client's end of very many streams: how long each token took since it left ``bench.stepserver``."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import perf_counter_ns
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from bench.load import request
from bench.stepserver import DIGITS, MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BIN_NANOSECONDS, BINS = 10_000, 500_000
_LONGEST_HEAD = 16_384
_LAST_CHUNK = b"0\r\n\r\n"
_END = b"data: [DONE]\n\n\r\n" + _LAST_CHUNK


class StampedLoad:
    """Streams that each ask for so many tokens, and are read to their end."""

    def __init__(self, urls: Sequence[str], streams: int, tokens: int) -> None:
        self.urls, self.streams, self.asked = urls, streams, tokens
        self.tokens = self.begun = self.over = self.errors = 0
        self.why = ""
        self.bins = [0] * (BINS + 1)
        """Tokens, by how long they took in units of ``BIN_NANOSECONDS``; the last is for all that took longer."""
        self._made: list[asyncio.Transport] = []
        self._changed = asyncio.Event()

    async def open(self, seconds: float, patience_seconds: float) -> None:
        """Begin the streams, evenly over so many seconds, and wait for the first token of each.

        Raises:
            RuntimeError: they do not all come in time.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(self.streams):
            url = self.urls[number % len(self.urls)]
            host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
            await asyncio.sleep(max(0.0, began + number * seconds / self.streams - loop.time()))
            transport, client = await loop.create_connection(lambda: _Client(self), host, port)
            self._made.append(transport)
            client.send(request(url, self.asked, f"Question {number}: "))
        await self._until(lambda: self.begun + self.errors >= self.streams, began + patience_seconds - loop.time())
        if self.begun < self.streams:
            why = f": {self.why}" if self.why else ""
            raise RuntimeError(f"{self.begun} have begun in {patience_seconds:.0f} s, {self.errors} errors{why}")

    def begin(self) -> list[int]:
        """Count anew, from here on."""
        self.bins = [0] * (BINS + 1)
        return self.bins

    async def finish(self, patience_seconds: float) -> None:
        """Wait for all ends, and count as errors those that do not come."""
        await self._until(lambda: self.over + self.errors >= self.streams, patience_seconds)
        if late := self.streams - self.over - self.errors:
            self.fail(f"{late} have not ended", late)

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()

    def note(self) -> None:
        """Something has changed."""
        self._changed.set()

    def fail(self, why: str, streams: int = 1) -> None:
        """Count an error."""
        self.errors += streams
        self.why = self.why or why
        self._changed.set()

    def close(self) -> None:
        for transport in self._made:
            transport.abort()


class _Client(asyncio.Protocol):
    """One stream. What is done for a token is as little as can be."""

    def __init__(self, load: StampedLoad) -> None:
        self._load = load
        self._tokens = self._last = 0
        self._rest = b""
        """Of what was read last, what may be a part of something."""
        self._begun = self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        now, load = perf_counter_ns(), self._load
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not self._begun and not self._begin(data):
            return
        bins, at, end = load.bins, data.find(MARK), 0
        while at >= 0:
            end = at + 1 + DIGITS
            if end > len(data):
                self._rest = data[at:]
                break
            left_at = int(data[at + 1 : end])
            bins[min((now - left_at) // BIN_NANOSECONDS, BINS)] += 1
            load.tokens += 1
            self._tokens += 1
            if left_at < self._last:
                self._fail("tokens in another order")
            self._last = left_at
            at = data.find(MARK, end)
        if self._tokens >= load.asked and not self._rest:
            self._end(data[end:])

    def _begin(self, data: bytes) -> bool:
        """Whether tokens have begun to come."""
        if MARK in data:
            self._begun = True
            self._load.begun += 1
            self._load.note()
            if data.startswith(b"HTTP/1.1 200 "):
                return True
        elif len(data) < _LONGEST_HEAD and data.startswith(b"HTTP/1.1 200 "[: len(data)]):
            self._rest = data
            return False
        self._fail(data[:300].decode(errors="replace"))
        return False

    def _end(self, data: bytes) -> None:
        if not data.endswith(_LAST_CHUNK):
            self._rest = data[-len(_END) :]
        elif not data.endswith(_END) or self._tokens != self._load.asked:
            self._fail("an end that is none")
        elif not self._over:
            self._over = True
            self._load.over += 1
            self._load.note()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"a connection has ended ({error})")

    def _fail(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._load.fail(why)
