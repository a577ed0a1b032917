"""An engine that does on the wire exactly what a test's script says, well-formed or not."""

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]\n\n"
JSON = ("Content-Type: application/json",)
SSE = ("Content-Type: text/event-stream; charset=utf-8",)


@dataclass(eq=False)
class Call:
    """One request as the engine got it, and the means to answer it byte by byte."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    """Names and values as they came, in their order."""
    body: bytes
    writer: asyncio.StreamWriter
    gone: asyncio.Event
    """Set when the other side has closed the connection."""
    chunked: bool = field(default=False, init=False)

    def header(self, name: str) -> list[str]:
        return [value for found, value in self.headers if found.lower() == name.lower()]

    def json(self) -> Any:
        return json.loads(self.body)

    async def send(self, data: bytes) -> None:
        """Put ``data`` on the wire as it is."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes = b"{}", *, status: str = "200 OK", headers: Iterable[str] = JSON) -> None:
        """Send a whole answer."""
        await self.send(head(status, *headers, f"Content-Length: {len(body)}") + body)

    async def begin(self, *headers: str, status: str = "200 OK") -> None:
        """Send the head of a stream of server-sent events in the chunked coding."""
        self.chunked = True
        await self.send(head(status, *(headers or SSE), "Transfer-Encoding: chunked"))

    async def write(self, data: bytes) -> None:
        """Send a piece of the stream, as one chunk."""
        await self.send(chunk(data))

    async def end(self) -> None:
        """End the stream as the chunked coding does."""
        await self.send(b"0\r\n\r\n")

    async def stream(self, *pieces: bytes) -> None:
        """Send a whole stream, one chunk for each piece."""
        await self.begin()
        for piece in pieces:
            await self.write(piece)
        await self.end()

    def close(self) -> None:
        """Close the connection in an orderly way (FIN)."""
        self.writer.close()

    def reset(self) -> None:
        """Break the connection (RST), as a process that dies does with data unread."""
        reset(self.writer)


Script = Callable[[Call], Awaitable[None]]


def head(status: str, *headers: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "", "")).encode("latin-1")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token(text: str = "a", **more: Any) -> bytes:
    return event({"object": "text_completion", "choices": [{"index": 0, "text": text}], **more})


def delta(**fields: Any) -> bytes:
    return event({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": fields}]})


def last(reason: str = "stop") -> bytes:
    return event({"object": "text_completion", "choices": [{"index": 0, "text": "", "finish_reason": reason}]})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})


def reset(writer: asyncio.StreamWriter) -> None:
    found = writer.get_extra_info("socket")
    if found is not None:
        with suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def two_tokens(call: Call) -> None:
    """The default script: a short stream, or the whole answer where none was asked for."""
    if b'"stream": true' in call.body:
        await call.stream(token("a"), token("b"), last(), DONE)
    else:
        choices = [{"index": 0, "text": "ab", "finish_reason": "stop"}]
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        await call.answer(json.dumps({"choices": choices, "usage": usage}).encode())


class ScriptedEngine:
    """Answers probes by itself and everything else by ``script``; a script's error fails the test at the end."""

    def __init__(self, *models: str) -> None:
        self.script: Script = two_tokens
        self.calls: list[Call] = []
        """Everything but probes, in the order of arrival."""
        self.probes: Counter[str] = Counter()
        self.models = list(models or ("m",))
        self.metrics = b""
        self.routes: dict[str, Script] = {
            "GET /health": lambda call: call.answer(b""),
            "GET /v1/models": self._answer_models,
            "GET /metrics": lambda call: call.answer(self.metrics, headers=("Content-Type: text/plain",)),
        }
        self.port = 0
        self._server: asyncio.Server | None = None
        self._scripts: set[asyncio.Future[None]] = set()
        self._connections: set[asyncio.StreamWriter] = set()
        self._errors: list[BaseException] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def start(self) -> None:
        """Listen, on the same port as before if it has been stopped."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Break all connections and refuse new ones, as an engine that was killed does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in tuple(self._connections):
            reset(writer)
        for script in tuple(self._scripts):
            script.cancel()
        while self._scripts or self._connections:  # noqa: ASYNC110 - some turns of the loop, and no time
            await asyncio.sleep(0)
        if self._errors:
            raise self._errors[0]

    async def _answer_models(self, call: Call) -> None:
        entries = [{"id": model, "object": "model", "owned_by": "test"} for model in self.models]
        await call.answer(json.dumps({"object": "list", "data": entries}).encode())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # accepted just before the stop
            reset(writer)
            return
        self._connections.add(writer)
        gone = asyncio.Event()
        try:
            while True:
                call = await _read(reader, writer, gone)
                name = f"{call.method} {call.target}"
                if name in self.routes:
                    self.probes[name] += 1
                else:
                    self.calls.append(call)
                script = asyncio.ensure_future(self._run(self.routes.get(name, self.script), call))
                self._scripts.add(script)
                script.add_done_callback(self._scripts.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            gone.set()
            writer.close()
            self._connections.discard(writer)

    async def _run(self, script: Script, call: Call) -> None:
        try:
            await script(call)
        except ConnectionError:
            pass  # the proxy has left, which is for the test to judge
        except Exception as error:  # noqa: BLE001 - whatever it is, the test has failed
            self._errors.append(error)
            call.reset()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gone: asyncio.Event) -> Call:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:-2])]
    fields = {name.lower(): value for name, value in headers}
    body = b""
    if "chunked" in fields.get("transfer-encoding", ""):
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    else:
        body = await reader.readexactly(int(fields.get("content-length", 0)))
    return Call(method, target, headers, body, writer, gone)


@asynccontextmanager
async def scripted_engine(script: Script | None = None, *models: str) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(*models)
    if script is not None:
        engine.script = script
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
