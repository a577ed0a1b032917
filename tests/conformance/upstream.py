"""The engines behind the proxy under test: each case scripts what they do with its own requests, byte by byte.

A request is known by the token ``case-...`` of its case, wherever in its head or body it stands, so cases run side by
side through one proxy. What the proxy asks on its own account (models, health, metrics) is answered as vLLM would.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from scripted_engine import Call, head, reset

TOKEN = re.compile(rb"case-[0-9a-f]{12}")
_PLAIN = ("Content-Type: text/plain",)


@dataclass(eq=False)
class Line:
    """A connection of the proxy's to an engine."""

    number: int
    requests: int = 0
    """Requests that have come on it, of any case."""


@dataclass(eq=False)
class Seen(Call):
    """A request as an engine got it."""

    raw_head: bytes = b""
    engine: int = 0
    """Which of the engines got it."""
    line: Line = field(default_factory=lambda: Line(0))
    """What it came on."""
    reader: asyncio.StreamReader | None = None
    """Where the body is still to be read from, of a case that reads it itself."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the script is through."""


Script = Callable[[Seen], Awaitable[None]]


@dataclass(eq=False)
class Scripts:
    """What one case wants done with its requests."""

    script: Script
    early: bool = False
    """Whether the script takes over at the head, the body unread."""
    seen: list[Seen] = field(default_factory=list)
    arrived: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    errors: list[BaseException] = field(default_factory=list)


class Upstream:
    """One engine; ``cases`` is shared by all of them."""

    def __init__(self, number: int, cases: dict[bytes, Scripts], model: str, port: int = 0) -> None:
        self.number = number
        self.port = port
        self.model = model
        self.strangers: list[str] = []
        """Requests that belong to no case, but for the known questions of proxies."""
        self._cases = cases
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Future[None]] = set()
        self._connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; on the same port as before, if there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End as a process that is killed: connections break, and new ones are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in tuple(self._writers):
            reset(writer)
        for task in tuple(self._tasks):
            task.cancel()
        for _ in range(1000):  # some turns of the loop, and no time
            if not self._writers and not self._tasks:
                break
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # accepted just before the stop
            reset(writer)
            return
        self._connections += 1
        line = Line(self._connections)
        self._writers.add(writer)
        gone = asyncio.Event()
        try:
            while True:
                raw = await reader.readuntil(b"\r\n\r\n")
                call = _parse(raw, writer, gone)
                call.engine, call.line, call.reader = self.number, line, reader
                line.requests += 1
                found = TOKEN.search(raw)
                case = self._cases.get(found[0]) if found else None
                if case is not None and case.early:
                    await self._run(case, call)
                    continue
                await read_body(call)
                if case is None and (found := TOKEN.search(call.body)):
                    case = self._cases.get(found[0])
                if case is None:
                    await self._answer_others(call)
                    continue
                if case.early:
                    case.errors.append(RuntimeError("the request's headers did not reach the engine"))
                    call.reset()
                    continue
                # Beside the reading, which is how the end of the connection is noticed.
                task = asyncio.ensure_future(self._run(case, call))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
            pass
        finally:
            gone.set()
            writer.close()
            self._writers.discard(writer)

    async def _run(self, case: Scripts, call: Seen) -> None:
        case.seen.append(call)
        case.arrived.release()
        try:
            await case.script(call)
        except ConnectionError:
            pass  # the proxy has left, which is for the case to judge
        except Exception as error:  # noqa: BLE001 - whatever it is, the case has failed
            case.errors.append(error)
            call.reset()
        finally:
            call.finished.set()

    async def _answer_others(self, call: Seen) -> None:
        path = urlsplit(call.target).path
        with suppress(ConnectionError):
            if path in ("/health", "/ping", "/health_generate", "/liveness", "/readiness", "/v1/health"):
                await call.answer(b"", headers=_PLAIN)
            elif path == "/v1/models":
                entry = {"id": self.model, "object": "model", "owned_by": "vllm", "max_model_len": 1_000_000}
                await call.answer(json.dumps({"object": "list", "data": [entry]}).encode())
            elif path == "/metrics":
                await call.answer(b"", headers=_PLAIN)
            elif path == "/version":
                await call.answer(b'{"version": "0.32.0"}')
            elif path in ("/get_server_info", "/server_info", "/get_model_info", "/model_info"):
                info = {"model_path": self.model, "served_model_name": self.model, "is_generation": True}
                await call.answer(json.dumps(info).encode())
            else:
                self.strangers.append(f"{call.method} {call.target}")
                await call.answer(b'{"error": {"message": "no such path"}}', status="404 Not Found")


async def read_body(call: Seen) -> None:
    """Read a request's body as its framing says."""
    reader = call.reader
    assert reader is not None
    fields = {name.lower(): value for name, value in call.headers}
    if fields.get("expect", "").lower() == "100-continue":
        await call.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" in fields.get("transfer-encoding", "").lower():
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
        call.body = b"".join(parts)
    else:
        call.body = await reader.readexactly(int(fields.get("content-length", 0)))


def _parse(raw: bytes, writer: asyncio.StreamWriter, gone: asyncio.Event) -> Seen:
    lines = raw.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:-2])]
    return Seen(method, target, headers, b"", writer, gone, raw_head=raw)


__all__ = ["Script", "Scripts", "Seen", "Upstream", "head", "read_body"]
