"""A server without a model, to measure the client by: ``python -m loadgen.nullserver``.

Every stream that is open gets one token per step, as from an engine, and each token is a write of its own, as that is
what a client has to bear. Nothing is done for it that could be left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
from typing import cast

_STEP_MOST_LATE = 2

_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: keep-alive\r\n\r\n"
)
_EVENT = (
    b'data: {"id":"cmpl-null","object":"text_completion","created":1,"model":"null","choices":[{"index":0,'
    b'"text":" token","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}],"usage":null}\n\n'
)
_USAGE = (
    b'data: {"id":"cmpl-null","object":"text_completion","created":1,"model":"null","choices":[],"usage":'
    b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
)
_MODELS = json.dumps({"object": "list", "data": [{"id": "null", "object": "model"}]}).encode()

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_tokens": *(\d+)')


def as_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_TOKEN = as_chunk(_EVENT)


class Stream(asyncio.Protocol):
    """A connection, and the answer under way on it."""

    def __init__(self, streams: set[Stream]) -> None:
        self._streams = streams
        self._received = bytearray()
        self._prompt = self._left = self._asked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._streams.discard(self)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while (end := received.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(received, 0, end)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(received) < whole:
                return
            request = bytes(received[:whole])
            del received[:whole]
            self._answer(request, end + 4)

    def _answer(self, request: bytes, body: int) -> None:
        if request.startswith(b"GET"):
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_MODELS)
            self._transport.write(head + _MODELS)
            return
        wanted = _MAX_TOKENS.search(request, body)
        self._asked = self._left = int(wanted[1]) if wanted else 1
        ids = request.find(b'"prompt":[', body)
        self._prompt = 1 + request.count(b",", ids, request.find(b"]", ids)) if ids > 0 else 1
        self._transport.write(_HEAD)
        self._streams.add(self)

    def step(self) -> None:
        """Send the next token."""
        self._left -= 1
        if self._left > 0:
            self._transport.write(self._token())
            return
        self._streams.discard(self)
        usage = _USAGE % (self._prompt, self._prompt + self._asked, self._asked)
        self._transport.write(self._token() + as_chunk(usage) + b"0\r\n\r\n")

    def _token(self) -> bytes:
        return _TOKEN


async def serve(port: int, step_seconds: float) -> None:
    """Serve on 127.0.0.1 until a signal comes; the address is told on standard output."""
    loop = asyncio.get_running_loop()
    streams: set[Stream] = set()
    server = await loop.create_server(lambda: Stream(streams), "127.0.0.1", port, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)  # noqa: T201 - for whoever started it
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    due = loop.time()
    while not stop.is_set():
        for stream in list(streams):
            stream.step()
        # Steps that are late for good are left out, and not made up for by a burst.
        due = max(due + step_seconds, loop.time() - _STEP_MOST_LATE * step_seconds)
        await asyncio.sleep(max(0.0, due - loop.time()) if streams or step_seconds else 0.001)
    server.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.nullserver", description="A server without a model.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step", type=float, default=0.02, help="seconds from token to token; 0: as fast as it can")
    args = parser.parse_args()
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        asyncio.run(serve(args.port, args.step))
    else:
        with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
            runner.run(serve(args.port, args.step))


if __name__ == "__main__":
    main()
