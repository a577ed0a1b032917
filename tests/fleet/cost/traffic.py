"""Commands and bytes at Redis, and everybody's CPU, for each request and token."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import redis.asyncio as aioredis
from bench.overhead import PATIENT, process_cpu_seconds
from redis_server import RedisServer

from fleet.cost.wire import Connection
from fleet.world import Replica, unite
from loadgen.children import running

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STEP_SECONDS = 0.02
FEW, MANY = 1, 51
"""Tokens of a request: the difference of the two is what further tokens cost."""


@dataclass(frozen=True)
class Taken:
    """What there was in some time."""

    seconds: float
    counts: Mapping[str, float]

    def beyond(self, idle: Taken) -> dict[str, float]:
        """What would not have been there had nothing happened."""
        return {what: count - idle.counts[what] / idle.seconds * self.seconds for what, count in self.counts.items()}


class Meter:
    """Reads what Redis has counted, and what processes have used."""

    def __init__(self, server: RedisServer, pids: Mapping[str, int]) -> None:
        self._client = aioredis.Redis.from_url(server.url)
        self._pids = {"Redis": server.pid, **pids}
        self._before: dict[str, float] = {}
        self._began = 0.0

    async def begin(self) -> None:
        self._before, self._began = await self._read(), monotonic()

    async def end(self) -> Taken:
        now = await self._read()
        return Taken(monotonic() - self._began, {what: count - self._before[what] for what, count in now.items()})

    async def close(self) -> None:
        await self._client.aclose()

    async def _read(self) -> dict[str, float]:
        calls = await self._client.info("commandstats")

        def called(command: str) -> int:
            found: dict[str, Any] = calls.get(f"cmdstat_{command}", {})
            return int(found.get("calls", 0))

        # A sign of life is a function with one ZADD, a letter of the leader one with one PUBLISH.
        beats = called("zadd")
        leaders = called("evalsha") + called("eval") - beats
        stats = await self._client.info("stats")
        return {
            "beats": beats,
            "letters of the leader": leaders,
            "letters to the leader": called("publish") - leaders,
            "bytes in": stats["total_net_input_bytes"],
            "bytes out": stats["total_net_output_bytes"],
            **{f"CPU of {name}": process_cpu_seconds(pid) * 1e6 for name, pid in self._pids.items()},
        }


@dataclass(frozen=True)
class Costs:
    """Of what happens at one replica at one rate, beyond what there is when nobody asks."""

    where: str
    rate: float
    request: Mapping[str, float]
    """Of one token."""
    token: Mapping[str, float]
    """Each further one."""


@dataclass(frozen=True)
class Traffic:
    """What was found."""

    replicas: int
    idle: Mapping[str, float]
    """A second in which nobody asks."""
    costs: Sequence[Costs]

    def __str__(self) -> str:
        lines = [f"{'CPU in us':<44}" + "".join(f"{what:>22}" for what in self.idle)]
        lines.append(_row(f"a second of {self.replicas} idle replicas", self.idle))
        for of in self.costs:
            lines.append(_row(f"{of.rate:g}/s at {of.where}: a request of one token", of.request))
            lines.append(_row(f"each further token ({of.rate * MANY:g}/s)", of.token))
        return "\n".join(lines)


def _row(name: str, counts: Mapping[str, float]) -> str:
    return f"{name:<44}" + "".join(f"{count:>22.3f}" for count in counts.values())


async def measure(rates: Sequence[float], seconds: float) -> Traffic:
    """Send requests of few and of many tokens at each rate, all to the leader, then all to a follower."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = RedisServer(directory)
        await server.start()
        stack.push_async_callback(server.kill)
        arguments = ["loadgen.nullserver", "--step", str(STEP_SECONDS)]
        engine = await stack.enter_async_context(running("engine", arguments, address=r"(http://\S+)"))
        replicas = [Replica(name, [engine.address], server.url, PATIENT) for name in ("one", "two")]
        for replica in replicas:
            stack.push_async_callback(replica.end)
            await replica.start(directory / f"{replica.name}.log")
        leader, follower = await unite(replicas)
        meter = Meter(server, {"the leader": leader.pid, "a follower": follower.pid})
        stack.push_async_callback(meter.close)

        async def take(replica: Replica, rate: float, tokens: int) -> dict[str, float]:
            await asyncio.sleep(1.0)  # what the one before has left
            await meter.begin()
            asked = await _load(replica.url, rate, tokens, seconds)
            taken = await meter.end()
            return {what: count / asked for what, count in taken.beyond(idle).items()}

        for replica in (leader, follower):  # to warm up
            await _load(replica.url, 20, FEW, min(2.0, seconds))
        await meter.begin()
        await asyncio.sleep(seconds)
        idle = await meter.end()
        costs = []
        for where, replica in (("the leader", leader), ("a follower", follower)):
            for rate in rates:
                few, many = await take(replica, rate, FEW), await take(replica, rate, MANY)
                token = {what: (many[what] - few[what]) / (MANY - FEW) for what in few}
                costs.append(Costs(where, rate, few, token))
        a_second = {what: count / idle.seconds for what, count in idle.counts.items()}
        return Traffic(len(replicas), a_second, costs)


async def _load(url: str, rate: float, tokens: int, seconds: float) -> int:
    """Ask at regular times, however long answers take, and return how many requests that were."""
    idle: list[Connection] = []
    made: list[Connection] = []

    async def ask() -> None:
        if idle:
            connection = idle.pop()
        else:
            connection = await Connection.open(url)
            made.append(connection)
        await connection.ask(tokens)
        idle.append(connection)

    began, number = monotonic(), 0
    async with asyncio.TaskGroup() as group:
        while number < rate * seconds:
            number += 1
            group.create_task(ask())
            await asyncio.sleep(max(0.0, began + number / rate - monotonic()))
    for connection in made:
        connection.close()
    return number
