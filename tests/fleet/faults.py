"""What clients of a fleet see when something fails, how long it takes to recover, and what is left afterwards."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import TYPE_CHECKING

import aiohttp
import redis.asyncio as aioredis
from redis_server import RedisServer

from fleet.link import Link
from fleet.world import CountingEngine, Replica, Seen, ask, until

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = 2
GAP_SECONDS = 0.2


@dataclass(frozen=True)
class Size:
    """How much is under way when it fails: of each replica."""

    replicas: int = 3
    running: int = 200
    waiting: int = 200
    tokens: int = 40

    @property
    def slots(self) -> int:
        """Of each engine."""
        return self.replicas * self.running // ENGINES


@dataclass
class Outcome:
    """What came of one fault."""

    fault: str
    seen: dict[str, Seen] = field(default_factory=dict)
    recovered_seconds: float | None = None
    """From the fault (or its end, where it lasts) to the next prompt at an engine that was released after it."""
    most_at_an_engine: int = 0
    slots: int = 0
    left: dict[str, float] = field(default_factory=dict)
    """What replicas still count when all is over."""
    roles: dict[str, str] = field(default_factory=dict)
    """Who decides then."""
    seconds: float = 0.0

    @property
    def most_allowed(self) -> float:
        """Of each engine, while replicas decide alone: what one had before, and all others' parts."""
        parts = len(self.seen)
        return self.slots * (2 - 1 / parts) + parts if self.fault != "nothing" else self.slots


class World:
    """Engines, a Redis server, replicas with a link of their own to it, and clients at each of them."""

    def __init__(self, directory: Path, size: Size) -> None:
        self.size = size
        self.directory = directory
        self.server = RedisServer(directory)
        self.engines = [CountingEngine(GAP_SECONDS) for _ in range(ENGINES)]
        self.links: list[Link] = []
        self.replicas: list[Replica] = []

    async def start(self, stack: AsyncExitStack) -> None:
        await self.server.start()
        stack.push_async_callback(self.server.kill)
        for engine in self.engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        for number in range(self.size.replicas):
            link = Link(self.server.port)
            await link.start()
            stack.push_async_callback(link.stop)
            self.links.append(link)
            flags = ("--max-num-seqs", str(self.size.slots), "--token-budget", "100000", "--log-level", "info")
            replica = Replica(f"replica-{number}", [e.url for e in self.engines], link.url, flags)
            stack.push_async_callback(replica.end)
            await replica.start(self.directory / f"{replica.name}.log")
            self.replicas.append(replica)

    async def leader(self) -> int:
        """The number of the replica that leads; waits until there is one."""
        async with asyncio.timeout(30):
            while True:
                for number, replica in enumerate(self.replicas):
                    with suppress(aiohttp.ClientError):
                        if (await replica.samples("slai_fleet_role")).get(("leader",)):
                            return number
                await asyncio.sleep(0.1)

    def active(self) -> int:
        return sum(engine.active for engine in self.engines)

    def started(self) -> int:
        return sum(len(engine.started) for engine in self.engines)


async def kill_follower(world: World) -> float:
    """SIGKILL a replica that does not lead."""
    number = (await world.leader() + 1) % world.size.replicas
    world.replicas[number].send_signal(signal.SIGKILL)
    return monotonic()


async def kill_leader(world: World) -> float:
    """SIGKILL the replica that leads."""
    world.replicas[await world.leader()].send_signal(signal.SIGKILL)
    return monotonic()


async def stop_follower(world: World) -> float:
    """SIGSTOP a replica that does not lead, for 30 s."""
    return await _stop(world, (await world.leader() + 1) % world.size.replicas)


async def stop_leader(world: World) -> float:
    """SIGSTOP the replica that leads, for 30 s."""
    return await _stop(world, await world.leader())


async def _stop(world: World, number: int) -> float:
    began = monotonic()
    world.replicas[number].send_signal(signal.SIGSTOP)
    await asyncio.sleep(30)
    world.replicas[number].send_signal(signal.SIGCONT)
    return began  # the others go on at once


async def restart_redis(world: World) -> float:
    """SIGKILL the server, start it 10 s later, with nothing in it."""
    began = monotonic()
    await world.server.kill()
    await asyncio.sleep(10)
    await world.server.start()
    return began


async def flush(world: World) -> float:
    """FLUSHALL."""
    async with aioredis.Redis.from_url(world.server.url) as direct:
        await direct.flushall()
    return monotonic()


async def slow_redis(world: World) -> float:
    """Every byte to and from the server takes 2 s, for 10 s."""
    began = monotonic()
    for link in world.links:
        link.delay_seconds = 2.0
    await asyncio.sleep(10)
    for link in world.links:
        link.delay_seconds = 0.0
    return began


async def full_redis(world: World) -> float:
    """The server has no memory left for writes, for 10 s."""
    began = monotonic()
    async with aioredis.Redis.from_url(world.server.url) as direct:
        await direct.config_set("maxmemory", 1)
        await asyncio.sleep(10)
        await direct.config_set("maxmemory", 0)
    return began


async def cut_leader(world: World) -> float:
    """The network swallows all between the server and the replica that leads, for 10 s."""
    return await _cut(world, await world.leader())


async def cut_follower(world: World) -> float:
    """The network swallows all between the server and another replica, for 10 s."""
    return await _cut(world, (await world.leader() + 1) % world.size.replicas)


async def _cut(world: World, number: int) -> float:
    began = monotonic()
    world.links[number].cut()
    await asyncio.sleep(10)
    world.links[number].mend()
    return began


async def nothing(_: World) -> float:
    """Nothing fails: for comparison."""
    return monotonic()


FAULTS = {
    fault.__name__.replace("_", "-"): fault
    for fault in (
        nothing,
        kill_follower,
        kill_leader,
        stop_follower,
        stop_leader,
        restart_redis,
        flush,
        slow_redis,
        full_redis,
        cut_leader,
        cut_follower,
    )
}


async def try_fault(name: str, directory: Path, size: Size) -> Outcome:
    """Bring everything up, let it fail at full load, and look until all clients are done."""
    async with AsyncExitStack() as stack:
        world = World(directory, size)
        await world.start(stack)
        await world.leader()
        outcome = Outcome(name, slots=size.slots)
        began = monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=150)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        lengths = Random(1)
        async with asyncio.TaskGroup() as group:
            for replica in world.replicas:
                seen = outcome.seen[replica.name] = Seen()
                for number in range(size.running + size.waiting):
                    prompt = f"{replica.name} {number} " * 20
                    # Of different lengths, so that slots become free, and prompts are due, all the time.
                    tokens = lengths.randint(size.tokens // 4, size.tokens * 7 // 4)
                    group.create_task(ask(replica, client, seen, tokens, prompt))
            await until(lambda: world.active() >= size.slots * ENGINES, 60)
            await asyncio.sleep(GAP_SECONDS * size.tokens / 2)
            failed_at = await FAULTS[name](world)
        outcome.seconds = monotonic() - began
        after = [t for engine in world.engines for t in engine.started if t > failed_at]
        outcome.recovered_seconds = _longest_gap(sorted(after), failed_at)
        outcome.most_at_an_engine = max(engine.most for engine in world.engines)
        await _settle(world)
        for replica in world.replicas:
            if replica.process is None or replica.process.returncode is not None:
                outcome.roles[replica.name] = "dead"
                continue
            roles = await replica.samples("slai_fleet_role")
            outcome.roles[replica.name] = next((role for (role,), value in roles.items() if value), "?")
            for metric in ("slai_queue_requests", "slai_engine_requests", "slai_engine_kv_tokens", "slai_streams"):
                outcome.left[f"{replica.name} {metric}"] = sum((await replica.samples(metric)).values())
        outcome.left = {what: count for what, count in outcome.left.items() if count}
        return outcome


def _longest_gap(times: list[float], since: float) -> float | None:
    """The longest time without a prompt at any engine, from the fault to the last prompt."""
    if not times:
        return None
    return max(later - earlier for earlier, later in zip([since, *times], times, strict=False))


async def _settle(world: World) -> None:
    """Wait until there is one leader again, or for long enough."""
    with suppress(TimeoutError):
        await world.leader()
    await asyncio.sleep(3)
