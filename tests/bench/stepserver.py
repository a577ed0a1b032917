"""Simulated engines in one process, whose tokens tell when they left: ``python -m bench.stepserver --engines 20``.

Each has a port and steps of its own; the steps of all are spread evenly over the time of one. At each step every stream
of that engine gets a token, in a write of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from functools import partial
from time import perf_counter_ns
from typing import cast

import uvloop

from proxy.server.connections import raise_file_limit

MARK = b"@"
DIGITS = 19
"""A token's text is the mark and these many digits: nanoseconds of the clock that all processes share."""

_STEPS_MOST_LATE = 2
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: keep-alive\r\n\r\n"
)
_EVENT = (
    b'data: {"id":"chatcmpl-null","object":"chat.completion.chunk","created":1,"model":"null","choices":[{"index":0,'
    b'"delta":{"content":" %b"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_USAGE = (
    b'data: {"id":"chatcmpl-null","object":"chat.completion.chunk","created":1,"model":"null","choices":[],"usage":'
    b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n'
)
_DONE = b"data: [DONE]\n\n"
_MODELS = b'{"object":"list","data":[{"id":"null","object":"model"}]}'
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_tokens": *(\d+)')
_PROMPT_TOKENS = 120


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_BEFORE, _, _AFTER = _chunk(_EVENT % (MARK + b"#" * DIGITS)).partition(b"#" * DIGITS)


class _Stream(asyncio.Protocol):
    """A connection, and the answer under way on it."""

    def __init__(self, streams: set[_Stream]) -> None:
        self._streams = streams
        self._received = bytearray()
        self._asked = self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=0)  # uvloop then writes at once, and not after all of a step

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
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        if request.startswith(b"GET"):
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_MODELS)
            self._transport.write(head + _MODELS)
            return
        wanted = _MAX_TOKENS.search(request)
        self._asked = self._left = int(wanted[1]) if wanted else 1
        self._transport.write(_HEAD)
        self._streams.add(self)

    def step(self) -> None:
        """Send the next token."""
        self._transport.write(_BEFORE + b"%019d" % perf_counter_ns() + _AFTER)
        self._left -= 1
        if not self._left:
            self._streams.discard(self)
            usage = _USAGE % (_PROMPT_TOKENS, _PROMPT_TOKENS + self._asked, self._asked)
            self._transport.write(_chunk(usage) + _chunk(_DONE) + b"0\r\n\r\n")


async def serve(engines: int, rate: float) -> None:
    """Serve on 127.0.0.1 until the process is ended; the addresses are told on standard output."""
    raise_file_limit()
    loop = asyncio.get_running_loop()
    seconds, began, addresses = 1 / rate, loop.time(), []

    def step(streams: set[_Stream], due: float) -> None:
        for stream in list(streams):
            stream.step()
        # Steps that are late for good are left out, and not made up for by a burst.
        due = max(due + seconds, loop.time() - _STEPS_MOST_LATE * seconds)
        loop.call_at(due, step, streams, due)

    for number in range(engines):
        streams: set[_Stream] = set()
        server = await loop.create_server(partial(_Stream, streams), "127.0.0.1", 0, backlog=4096)
        addresses.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        step(streams, began + number / engines * seconds)
    print(",".join(addresses), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.stepserver", description=__doc__)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rate", type=float, default=20.0, help="steps, and so tokens of each stream, in a second")
    args = parser.parse_args()
    uvloop.run(serve(args.engines, args.rate))


if __name__ == "__main__":
    main()
