"""Simulated engines in one process, whose tokens tell when they left: ``python -m bench.stepserver --engines 20``.

Each has a port and steps of its own; the steps of all are spread evenly over the time of one. At each step every stream
of that engine gets a token, in a write of its own.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from time import perf_counter_ns

import uvloop

from loadgen.nullserver import Stream, as_chunk
from proxy.server.connections import raise_file_limit

MARK = b"@"
DIGITS = 19
"""A token's text is the mark and these many digits: nanoseconds of the clock that all processes share."""

_STEPS_MOST_LATE = 2
_EVENT = (
    b'data: {"id":"chatcmpl-null","object":"chat.completion.chunk","created":1,"model":"null","choices":[{"index":0,'
    b'"delta":{"content":" %b"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_BEFORE, _, _AFTER = as_chunk(_EVENT % (MARK + b"#" * DIGITS)).partition(b"#" * DIGITS)


class _Stream(Stream):
    """A connection, and the answer under way on it, whose tokens tell when they left."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport.set_write_buffer_limits(high=0)  # uvloop then writes at once, and not after all of a step

    def _token(self) -> bytes:
        return _BEFORE + b"%019d" % perf_counter_ns() + _AFTER


async def serve(engines: int, rate: float) -> None:
    """Serve on 127.0.0.1 until the process is ended; the addresses are told on standard output."""
    raise_file_limit()
    loop = asyncio.get_running_loop()
    seconds, began, addresses = 1 / rate, loop.time(), []

    def step(streams: set[Stream], due: float) -> None:
        for stream in list(streams):
            stream.step()
        # Steps that are late for good are left out, and not made up for by a burst.
        due = max(due + seconds, loop.time() - _STEPS_MOST_LATE * seconds)
        loop.call_at(due, step, streams, due)

    for number in range(engines):
        streams: set[Stream] = set()
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
