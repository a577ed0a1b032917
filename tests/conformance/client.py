"""A client that sees every byte: it sends what a case says and keeps the answer as it came."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from scripted_engine import reset

_MOST_HEAD_BYTES = 1 << 20


@dataclass
class Answer:
    """One answer, its body freed of its framing but otherwise untouched."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    """As they came: order, spelling and repetition kept."""
    version: str = "HTTP/1.1"
    body: bytes = b""
    whole: bool = True
    """Whether the body ended as its framing says it would; false where the connection just ended."""
    interim: list[int] = field(default_factory=list)
    """Statuses of the 1xx answers before it."""

    def header(self, name: str) -> list[str]:
        return [value for found, value in self.headers if found.lower() == name.lower()]

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        """What stands between the blank lines of a stream whose lines end in LF."""
        return [part for part in self.body.split(b"\n\n") if part]

    @property
    def content_type(self) -> str:
        return (self.header("content-type") or [""])[0].partition(";")[0].strip().lower()


class Connection:
    """One connection to the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        return cls(*await asyncio.open_connection(host, port, limit=_MOST_HEAD_BYTES))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answer:
        """Read an answer's head, and any 1xx answers before it.

        Raises:
            EOFError: the connection ended first, or something else came.
        """
        interim: list[int] = []
        while True:
            try:
                raw = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise EOFError("the connection ended before an answer's head") from error
            first, *lines = raw[:-4].decode("latin-1").split("\r\n")
            version, _, rest = first.partition(" ")
            status, _, reason = rest.partition(" ")
            headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
            if not (version.startswith("HTTP/1.") and status.isascii() and status.isdigit()):
                raise EOFError(f"what came is no answer: {first[:60]!r}")
            if not 100 <= int(status) < 200 or status == "101":
                return Answer(int(status), reason, headers, version, interim=interim)
            interim.append(int(status))

    async def piece(self, answer: Answer) -> bytes:
        """Read one chunk of a chunked answer, or what has come of another; empty at its end."""
        if "chunked" in ",".join(answer.header("transfer-encoding")).lower():
            size = int((await self._line()).partition(b";")[0], 16)
            if size:
                data = (await self.reader.readexactly(size + 2))[:-2]
                answer.body += data
                return data
            while await self._line():
                pass  # trailers
            return b""
        lengths = answer.header("content-length")
        missing = int(lengths[0]) - len(answer.body) if lengths else None
        if missing == 0:
            return b""
        data = await self.reader.read(min(missing or 65536, 65536))
        if not data and missing is not None:
            raise asyncio.IncompleteReadError(b"", missing)
        answer.body += data
        return data

    async def until(self, answer: Answer, expected: bytes) -> None:
        """Read until the answer's body ends in ``expected``."""
        while not answer.body.endswith(expected):
            if not await self.piece(answer):
                raise EOFError(f"the answer ended before {expected!r}: {answer.body[-200:]!r}")

    async def rest(self, answer: Answer, *, method: str = "POST") -> Answer:
        """Read the rest of an answer's body."""
        if method == "HEAD" or answer.status in (204, 304):
            return answer
        try:
            while await self.piece(answer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            answer.whole = False
        return answer

    async def answer(self, *, method: str = "POST") -> Answer:
        return await self.rest(await self.head(), method=method)

    async def closed(self, seconds: float = 2.0) -> bool:
        """Whether the proxy closes the connection within that time, sending nothing more."""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(seconds):
                return not await self.reader.read(1)
            return False
        return self.reader.at_eof() or self.reader.exception() is not None

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        reset(self.writer)

    async def _line(self) -> bytes:
        line = await self.reader.readuntil(b"\n")
        return line.rstrip(b"\r\n")


def request(
    method: str, target: str, headers: list[str], body: bytes | None, *, host: str = "proxy", version: str = "HTTP/1.1"
) -> bytes:
    """Spell a request; a length is stated where there is a body and no header says how it is framed."""
    lines = [f"{method} {target} {version}", f"Host: {host}", *headers]
    framed = any(line.lower().startswith(("content-length:", "transfer-encoding:")) for line in headers)
    if body is not None and not framed:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + (body or b"")
