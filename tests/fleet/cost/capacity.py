"""How many letters a second one Redis carries, and what it takes the proxy to send and read one."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from redis_server import RedisServer

from fleet.cost.flood import LEADER, POOL, letter
from fleet.cost.traffic import Meter
from loadgen.children import running
from proxy.store.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleet.cost.traffic import Taken

_COUNTED = {"sign of life": "beats", "release": "letters of the leader"}
_KINDS = ("arrival", "release", "end", "tokens", "sign of life")
_OF_A_REQUEST = ("arrival", "release", "end")


async def measure(processes: int, connections: int, rounds: int, seconds: float) -> str:
    """Send as many commands of each kind as Redis takes, ``rounds`` times in turn; then by the proxy's own client."""
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in _KINDS}
    sent: dict[str, list[tuple[float, float]]] = {kind: [] for kind in ("arrival", "release")}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(rounds):
            for kind, results in found.items():
                results.append(await _flood(Path(scratch), kind, processes, connections, seconds))
            for kind, costs in sent.items():
                costs.append(await _send(Path(scratch), kind, seconds))
    lines = [f"{'median (range)':<44}{'a second':>28}{'us of CPU each':>24}{'busy':>8}{'bytes':>8}"]
    for kind, results in found.items():
        rates, costs_us, busy = zip(*results, strict=True)
        size = "" if kind == "sign of life" else f"{len(letter(kind, 1_764_500_000_123_456))}"
        name = f"Redis: {kind}" + (" of 64 streams" if kind == "tokens" else "")
        lines.append(f"{name:<44}{_spread(rates):>28}{_spread(costs_us, 1):>24}{median(busy):>8.0%}{size:>8}")
    each = [sum(found[kind][n][1] for kind in _OF_A_REQUEST) for n in range(rounds)]
    carried = _spread([1e6 / cost for cost in each])
    lines.append(f"{'Redis: a request at a follower, without tokens':<44}{carried:>26}{_spread(each, 1):>24}")
    for kind, costs in sent.items():
        rates, costs_us = zip(*costs, strict=True)
        lines.append(f"{f'the proxy sends and reads: {kind}':<44}{_spread(rates):>28}{_spread(costs_us, 1):>24}")
    return "\n".join(lines)


async def _flood(
    directory: Path, kind: str, processes: int, connections: int, seconds: float
) -> tuple[float, float, float]:
    """Return commands a second, Redis's CPU for each in us, and the share of the time for which it was busy."""
    async with AsyncExitStack() as stack:
        server, epoch = await _start(stack, directory, kind)
        for number in range(processes):
            arguments = ["fleet.cost.flood", str(server.port), kind, str(epoch), "--number", str(number)]
            arguments += ["--connections", str(connections)]
            await stack.enter_async_context(running("flood", arguments, address="(floods)"))
        meter = Meter(server, {})
        stack.push_async_callback(meter.close)
        taken = await _take(meter, seconds)
        count, cpu_us = taken.counts[_COUNTED.get(kind, "letters to the leader")], taken.counts["CPU of Redis"]
        return count / taken.seconds, cpu_us / count, cpu_us / 1e6 / taken.seconds


async def _send(directory: Path, kind: str, seconds: float) -> tuple[float, float]:
    """Return letters a second, one after the other, and the sender's CPU for each in us; it reads them, too."""
    async with AsyncExitStack() as stack:
        server, epoch = await _start(stack, directory, kind)
        arguments = ["fleet.cost.flood", str(server.port), kind, str(epoch), "--store"]
        child = await stack.enter_async_context(running("sender", arguments, address="(sends)"))
        meter = Meter(server, {"the sender": child.process.pid})
        stack.push_async_callback(meter.close)
        taken = await _take(meter, seconds)
        count = taken.counts[_COUNTED.get(kind, "letters to the leader")]
        return count / taken.seconds, taken.counts["CPU of the sender"] / count


async def _start(stack: AsyncExitStack, directory: Path, kind: str) -> tuple[RedisServer, int]:
    server = RedisServer(directory)
    await server.start()
    stack.push_async_callback(server.kill)
    if kind == "sign of life":
        return server, 0  # one of those that flood leads
    store = RedisStore.from_url(server.url, POOL)
    standing = await store.beat(LEADER, 3600.0)
    await store.close()
    return server, standing.epoch


async def _take(meter: Meter, seconds: float) -> Taken:
    await asyncio.sleep(0.3)
    await meter.begin()
    await asyncio.sleep(seconds)
    return await meter.end()


def _spread(found: Sequence[float], digits: int = 0) -> str:
    return f"{median(found):,.{digits}f} ({min(found):,.{digits}f} to {max(found):,.{digits}f})"
