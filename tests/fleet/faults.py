"""What clients of a fleet see when something fails, how long it takes to recover, and what is left afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from time import monotonic
from typing import TYPE_CHECKING

import aiohttp
import redis.asyncio as aioredis
from bench.overhead import PATIENT
from redis_server import RedisServer

from fleet.link import Link
from fleet.world import CountingEngine, Replica, Seen, ask, unite, until

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = 2
GAP_SECONDS = 1.0
RAMP_SECONDS = 8.0
"""In which all clients begin to ask: none of them is to be a burst, which is another fault."""
AFTER_SECONDS = 10.0
"""For which all clients go on asking when the fault is over."""


@dataclass(frozen=True)
class Size:
    """How much is under way when it fails: of each replica."""

    replicas: int = 3
    running: int = 200
    waiting: int = 200
    tokens: int = 20

    @property
    def slots(self) -> int:
        """Of each engine."""
        return self.replicas * self.running // ENGINES


@dataclass
class Failure:
    """When it failed."""

    began: float
    ended: float
    hit: str = ""
    """The replica that it befell; empty: all."""


@dataclass
class Outcome:
    """What came of one fault."""

    fault: str
    hit: str = ""
    seen: dict[str, Seen] = field(default_factory=dict)
    """By replica."""
    pauses: dict[str, float] = field(default_factory=dict)
    """The longest time without a release, from the fault until the clients stopped asking: by replica, and of all."""
    united_seconds: float | None = None
    """From the end of the fault until one replica led and all others that live followed."""
    most_at_an_engine: int = 0
    slots: int = 0
    left: dict[str, float] = field(default_factory=dict)
    """What replicas still count when all is over, and where they have counted other than their clients."""
    roles: dict[str, str] = field(default_factory=dict)
    """Who decides then."""
    load_average: float = 0.0

    @property
    def most_allowed(self) -> float:
        """Of each engine: while replicas decide alone, what one had before, and all others' parts."""
        parts = len(self.seen)
        return self.slots if self.fault in COUNTED else self.slots * (2 - 1 / parts) + parts

    @property
    def good(self) -> bool:
        """Whether all is as it should be."""
        dead = self.hit if self.fault.startswith("kill-") else ""
        return (
            self.most_at_an_engine <= self.most_allowed
            and not self.left
            and self.united_seconds is not None
            and all(seen.outcomes.keys() <= {"completed"} for name, seen in self.seen.items() if name != dead)
        )


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
            flags = ("--max-num-seqs", str(self.size.slots), "--token-budget", "99968", *PATIENT)
            replica = Replica(f"replica-{number}", [e.url for e in self.engines], link.url, flags)
            stack.push_async_callback(replica.end)
            await replica.start(self.directory / f"{replica.name}.log")
            self.replicas.append(replica)

    async def leader(self) -> int:
        """The number of the replica that leads, as soon as all others follow it."""
        return self.replicas.index((await unite(self.replicas))[0])

    def active(self) -> int:
        return sum(engine.active for engine in self.engines)


async def nothing(_: World) -> Failure:
    """Nothing fails: for comparison."""
    return Failure(monotonic(), monotonic())


async def kill_follower(world: World) -> Failure:
    """SIGKILL a replica that does not lead."""
    return await _kill(world, (await world.leader() + 1) % world.size.replicas)


async def kill_leader(world: World) -> Failure:
    """SIGKILL the replica that leads."""
    return await _kill(world, await world.leader())


async def _kill(world: World, number: int) -> Failure:
    replica = world.replicas[number]
    await replica.end()
    return Failure(monotonic(), monotonic(), replica.name)


async def stop_follower(world: World) -> Failure:
    """SIGSTOP a replica that does not lead, for 30 s."""
    return await _stop(world, (await world.leader() + 1) % world.size.replicas)


async def stop_leader(world: World) -> Failure:
    """SIGSTOP the replica that leads, for 30 s."""
    return await _stop(world, await world.leader())


async def _stop(world: World, number: int) -> Failure:
    replica, began = world.replicas[number], monotonic()
    replica.send_signal(signal.SIGSTOP)
    await asyncio.sleep(30)
    replica.send_signal(signal.SIGCONT)
    return Failure(began, monotonic(), replica.name)


async def restart_redis(world: World) -> Failure:
    """SIGKILL the server, start it 10 s later, with nothing in it."""
    began = monotonic()
    await world.server.kill()
    await asyncio.sleep(10)
    await world.server.start()
    return Failure(began, monotonic())


async def flush(world: World) -> Failure:
    """FLUSHALL."""
    async with aioredis.Redis.from_url(world.server.url) as direct:
        await direct.flushall()
    return Failure(monotonic(), monotonic())


async def slow_redis(world: World) -> Failure:
    """Every byte to and from the server takes 2 s, for 10 s."""
    began = monotonic()
    for link in world.links:
        link.delay_seconds = 2.0
    await asyncio.sleep(10)
    for link in world.links:
        link.delay_seconds = 0.0
    return Failure(began, monotonic())


async def full_redis(world: World) -> Failure:
    """The server has no memory left for writes, for 10 s."""
    began = monotonic()
    async with aioredis.Redis.from_url(world.server.url) as direct:
        await direct.config_set("maxmemory", 1)
        await asyncio.sleep(10)
        await direct.config_set("maxmemory", 0)
    return Failure(began, monotonic())


async def cut_leader(world: World) -> Failure:
    """The network swallows all between the server and the replica that leads, for 10 s."""
    return await _cut(world, await world.leader())


async def cut_follower(world: World) -> Failure:
    """The network swallows all between the server and another replica, for 10 s."""
    return await _cut(world, (await world.leader() + 1) % world.size.replicas)


async def _cut(world: World, number: int) -> Failure:
    began = monotonic()
    world.links[number].cut()
    await asyncio.sleep(10)
    world.links[number].mend()
    return Failure(began, monotonic(), world.replicas[number].name)


COUNTED = ("nothing", "kill-follower", "kill-leader", "flush")
"""Faults in which one who decides knows of all that runs: limits hold."""
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
    """Bring everything up, let it fail at full load, which goes on, and look what is left when all clients are done."""
    async with AsyncExitStack() as stack:
        world = World(directory, size)
        await world.start(stack)
        await unite(world.replicas)
        outcome = Outcome(name, slots=size.slots)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=150)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        lengths, enough = Random(1), asyncio.Event()

        async def keep_asking(replica: Replica, seen: Seen, number: int) -> None:
            # Of different lengths, so that slots become free, and prompts are due, all the time.
            prompt, completed = f"{replica.name} {number:04} " * 20, True
            await asyncio.sleep(RAMP_SECONDS * number / (size.running + size.waiting))
            while completed and not enough.is_set():
                completed = await ask(
                    replica, client, seen, lengths.randint(size.tokens // 2, size.tokens * 3 // 2), prompt
                )

        async with asyncio.TaskGroup() as group:
            for replica in world.replicas:
                seen = outcome.seen[replica.name] = Seen()
                for number in range(size.running + size.waiting):
                    group.create_task(keep_asking(replica, seen, number))
            await asyncio.sleep(RAMP_SECONDS)
            if await until(lambda: world.active() >= size.slots * ENGINES, 60) is None:
                raise TimeoutError(
                    f"{world.active()} of {size.slots * ENGINES} requests run: too many for this machine"
                )
            await asyncio.sleep(GAP_SECONDS * size.tokens / 2)
            failure = await FAULTS[name](world)
            with suppress(TimeoutError):
                await unite(world.replicas)
                outcome.united_seconds = monotonic() - failure.ended
            await asyncio.sleep(max(0.0, failure.ended + AFTER_SECONDS - monotonic()))
            stopped_at = monotonic()
            enough.set()
        outcome.hit, outcome.load_average = failure.hit, os.getloadavg()[0]
        outcome.most_at_an_engine = max(engine.most for engine in world.engines)
        started = sorted(start for engine in world.engines for start in engine.started)
        for whose in ("", *outcome.seen):
            times = [at for at, name in started if failure.began < at < stopped_at and whose in {"", name}]
            outcome.pauses[whose or "all"] = _longest_gap([failure.began, *times, stopped_at])
        await _look(world, outcome)
        return outcome


def _longest_gap(times: list[float]) -> float:
    return max(later - earlier for earlier, later in pairwise(times))


async def _look(world: World, outcome: Outcome) -> None:
    """Note what replicas count when nobody asks any more."""
    await asyncio.sleep(3)
    for replica in world.replicas:
        outcome.roles[replica.name] = await replica.role() if replica.lives else "dead"
        if not replica.lives:
            continue
        for metric in ("slai_queue_requests", "slai_engine_requests", "slai_engine_kv_tokens", "slai_streams"):
            outcome.left[f"{replica.name} {metric}"] = sum((await replica.samples(metric)).values())
        counted, seen = await replica.samples("slai_requests_total"), outcome.seen[replica.name].outcomes
        completed = sum(count for labels, count in counted.items() if "completed" in labels)
        outcome.left[f"{replica.name} completed"] = completed - seen.get("completed", 0)
        outcome.left[f"{replica.name} ended"] = sum(counted.values()) - sum(seen.values())
    outcome.left = {what: count for what, count in outcome.left.items() if count}
