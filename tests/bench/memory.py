"""What the proxy holds for each stream that is open and for each request that waits, as the system sees it.

One number at a time says little, as an allocator takes memory in large pieces; so there are four numbers of streams,
and the slope of a line through what the process holds at each.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.load import Load
from bench.overhead import PATIENT
from loadgen.children import running
from proxy.server.connections import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

_PARTS = 4
_SETTLE_SECONDS = 1.0
_FOREVER = 1_000_000
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes."""

    per_stream: float
    per_waiting: float
    idle: int
    """Of the whole process, before anybody has come."""

    def __str__(self) -> str:
        return (
            f"idle process {self.idle / 1e6:.1f} MB; each idle stream {self.per_stream / 1e3:.1f} kB, "
            f"each waiting request {self.per_waiting / 1e3:.1f} kB"
        )


async def measure(most: int) -> Held:
    """Measure with up to ``most`` streams, and then with as many requests that wait."""
    raise_file_limit()
    per_stream, idle = await _slope(most, ["--max-num-seqs", str(2 * most), "--token-budget", "1000000"])
    per_waiting, _ = await _slope(most, ["--max-num-seqs", "1", "--max-queue-requests", str(2 * most)])
    return Held(per_stream, per_waiting, idle)


async def _slope(most: int, more: Sequence[str]) -> tuple[float, int]:
    waits = "--max-queue-requests" in more
    async with AsyncExitStack() as stack:
        # A token now and then: streams begin, and are idle.
        server = running("server", ["loadgen.nullserver", "--step", "3"], address=r"(http://\S+)")
        upstream = await stack.enter_async_context(server)
        serve = ["proxy", "serve", "--engines", upstream.address, "--port", "0", *PATIENT, *more]
        proxy = await stack.enter_async_context(running("proxy", serve, address=r"listens on (http://\S+)"))
        load = Load(proxy.address, requests=_FOREVER, tokens=_FOREVER)
        stack.callback(load.close)
        pid, counts, held = proxy.process.pid, [], []
        idle = resident_bytes(pid)
        for part in range(1, _PARTS + 1):
            await load.open(most // _PARTS)
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while not waits and load.first < load.begun:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.1)
            await asyncio.sleep(_SETTLE_SECONDS)
            counts.append(part * (most // _PARTS))
            held.append(resident_bytes(pid))
        return float(np.polyfit(counts, held, 1)[0]), idle


def resident_bytes(pid: int) -> int:
    """Memory of a process that is not shared with others' files."""
    shared, resident = 2, 1
    figures = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return (int(figures[resident]) - int(figures[shared])) * os.sysconf("SC_PAGE_SIZE")
