"""What a release takes from the client to an engine that has nothing to do."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from redis_server import RedisServer

from fleet.cost.wire import Connection, InstantEngine
from fleet.world import Replica, unite

if TYPE_CHECKING:
    from collections.abc import Sequence

_PAUSE_SECONDS = 0.01
"""Between two requests: what the one leaves to be done is not the next one's affair."""
_WAYS = ("no proxy", "alone", "leader", "follower")


async def measure(rounds: int, requests: int, flags: Sequence[str] = ()) -> str:
    """Send one request at a time each way in turn: ``requests`` each way, ``rounds`` times."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server, engine = RedisServer(directory), InstantEngine()
        await server.start()
        stack.push_async_callback(server.kill)
        await engine.start()
        stack.push_async_callback(engine.stop)
        replicas = [
            Replica(name, [engine.url], redis, tuple(flags))
            for name, redis in (("alone", ""), ("one", server.url), ("two", server.url))
        ]
        for replica in replicas:
            stack.push_async_callback(replica.end)
            await replica.start(directory / f"{replica.name}.log")
        alone, *fleet = replicas
        leader, follower = await unite(fleet)
        urls = (engine.url, alone.url, leader.url, follower.url)
        ways = [await Connection.open(url) for url in urls]
        for way in ways:
            stack.callback(way.close)
        order = Random(1)
        taken = np.empty((rounds, requests, len(ways), 2))
        for number in range(-requests // 4, rounds * requests):  # at first to warm up
            for which in order.sample(range(len(ways)), len(ways)):
                await asyncio.sleep(_PAUSE_SECONDS)
                sent_at = perf_counter()
                first_at = await ways[which].ask()
                taken[max(number, 0) // requests, number % requests, which] = (
                    engine.asked_at - sent_at,
                    first_at - sent_at,
                )
        return _table(taken * 1e6)


def _table(taken: np.ndarray) -> str:
    p50, p99 = np.quantile(taken, (0.5, 0.99), axis=1)  # each: rounds, ways, to the engine or to the first token
    lines = [f"{'us, median (range) of rounds':<30}{'to the engine p50':>26}{'p99':>26}{'TTFT p50':>26}{'p99':>26}"]
    for which, way in enumerate(_WAYS):
        cells = [_spread(q[:, which, what]) for what in (0, 1) for q in (p50, p99)]
        lines.append(f"{way:<30}" + "".join(f"{cell:>26}" for cell in cells))
    for which, way in list(enumerate(_WAYS))[2:]:
        cells = [_spread(q[:, which, what] - q[:, 1, what]) for what in (0, 1) for q in (p50, p99)]
        lines.append(f"{way + ' - alone':<30}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def _spread(found: np.ndarray) -> str:
    return f"{np.median(found):.0f} ({found.min():.0f} to {found.max():.0f})"
