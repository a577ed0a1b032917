"""Some hundred requests, two fifths of them broken off at random moments, while an engine dies and comes back.

At the end nothing may be left of any of them: in no map of the proxy, in no counter, as no task, on no connection.
What happens next is told by what has happened, never by the clock, so how fast the machine is makes no difference.
"""

import asyncio
import json
import random
from collections import Counter
from itertools import count

import aiohttp
from invariants import check_scheduler
from live_proxy import CHAT, COMPLETIONS, LiveProxy, live_proxy, until
from scripted_engine import DONE, Call, ScriptedEngine, scripted_engine, token

from proxy.sim.engine import EngineConfig
from proxy.sim.http import SERVER, start_engines, stop_engines
from proxy.sim.profiles import PROFILES

REQUESTS = 400
BURST = 60
"""Requests that come at once: more than the slots and the queue hold."""
CLIENTS = 24
"""Clients of all others, each of which asks again when it is through: as many as the steady engine's slots and the
queue hold while the other engine is dead.
"""
DEATHS = 2
HANG_SECONDS = 60.0
"""After which something will never happen."""
ENGINE = EngineConfig(PROFILES["h100"], token_budget=512, max_num_seqs=8)
SPEED = 4.0


async def ask(proxy: LiveProxy, rng: random.Random, number: int) -> str:
    """Send one request of random shape; return how it went as the client sees it."""
    stream, chat = rng.random() < 0.7, rng.random() < 0.5
    # A beginning of its own: where prompts begin alike, all go to the engine that has it cached.
    prompt = f"{number:5} " + "x" * (4 * rng.randint(1, 1500))
    content = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    leave_after_turns = rng.choice([1, rng.randint(2, 12), rng.randint(13, 400)]) if rng.random() < 1 / 3 else None
    leave_after_reads = rng.randint(1, 5) if rng.random() < 0.1 else None
    stays = leave_after_turns is leave_after_reads
    asked = {"model": "m", "stream": stream, "max_tokens": rng.randint(1, 60), "user": "stays" if stays else "leaves"}
    body = json.dumps({**asked, **content}).encode()
    asking = asyncio.ensure_future(answer(proxy, CHAT if chat else COMPLETIONS, body, leave_after_reads))
    if leave_after_turns is not None:
        for _ in range(leave_after_turns):  # of the loop, by which the request gets on
            await asyncio.sleep(0)
        asking.cancel()
    await asyncio.wait((asking,))
    return "left" if asking.cancelled() else await asking


async def answer(proxy: LiveProxy, path: str, body: bytes, leave_after_reads: int | None) -> str:
    """Send a request and read its answer, if to the end; return how it went."""
    stream = json.loads(body)["stream"]
    try:
        async with proxy.post(path, body) as response:
            data, reads = b"", 0
            async for piece in response.content.iter_any():
                data += piece
                reads += 1
                if reads == leave_after_reads:
                    return "left"
    except aiohttp.ClientError:
        return "cut"
    if response.status != 200:
        return str(response.status)
    if stream:
        return "done" if data.endswith(b"data: [DONE]\n\n") else "error event" if b'"error"' in data else "incomplete"
    return "done" if json.loads(data)["usage"] else "incomplete"


class Mortal:
    """What the engine does that dies: it holds all requests until one has been refused, then serves them."""

    def __init__(self) -> None:
        self.refused = asyncio.Event()
        self.serving = Counter[str]()
        """Requests that it has begun to answer, by whether their clients stay."""

    async def steps(self, call: Call) -> None:
        """One token each 8 ms, until the client has left."""
        body = call.json()
        await self.refused.wait()
        if body["stream"]:
            await call.begin()
        self.serving[body["user"]] += 1
        try:
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(0.008)
                if call.gone.is_set():
                    return
                if body["stream"]:
                    await call.write(token())
            if body["stream"]:
                await call.write(DONE)
                await call.end()
            else:
                used = {"completion_tokens": body["max_tokens"]}
                await call.answer(json.dumps({"choices": [], "usage": used}).encode())
        finally:
            self.serving[body["user"]] -= 1

    async def die_and_return(self, engine: ScriptedEngine, went: Counter[str]) -> None:
        """Die twice, each time with an answer on its way to somebody who stays; return when others have been served."""
        await until(self.refused.is_set, HANG_SECONDS)
        for _ in range(DEATHS):
            await self._served(went, went.total() + REQUESTS // 8)
            await until(lambda: self.serving["stays"], HANG_SECONDS)
            await engine.stop()
            await self._served(went, went.total() + REQUESTS // 8)
            await engine.start()

    @staticmethod
    async def _served(went: Counter[str], requests: int) -> None:
        await until(lambda: went.total() >= requests, HANG_SECONDS)


async def test_churn() -> None:
    rng = random.Random(7)
    before = asyncio.all_tasks()
    (steady,) = await start_engines([0], ENGINE, model="m", speed=SPEED)
    went: Counter[str] = Counter()
    numbers = count()
    mortality = Mortal()

    async def client(proxy: LiveProxy) -> None:
        went[await ask(proxy, random.Random(rng.getrandbits(32)), next(numbers))] += 1
        if went["429"]:
            mortality.refused.set()

    async def burst(proxy: LiveProxy, group: asyncio.TaskGroup) -> None:
        """Send many requests at once, and go on until the queue has been full."""
        begun = 0
        while begun < BURST or not mortality.refused.is_set():
            begun += 1
            group.create_task(client(proxy), name=f"client {begun} of the burst")
            await asyncio.sleep(0 if begun < BURST else 0.001)

    async def clients(proxy: LiveProxy, deaths: asyncio.Task[None]) -> None:
        while went.total() < REQUESTS or not deaths.done():
            await client(proxy)

    async with scripted_engine(mortality.steps) as mortal:
        async with live_proxy(
            steady.url, mortal, probe_interval_seconds=0.1, max_num_seqs=8, max_queue_requests=20
        ) as proxy:
            async with asyncio.TaskGroup() as group:
                await burst(proxy, group)
            async with asyncio.TaskGroup() as group:
                deaths = group.create_task(mortality.die_and_return(mortal, went))
                for number in range(CLIENTS):
                    group.create_task(clients(proxy, deaths), name=f"client {number}")
            requests = went.total()
            await proxy.idle(HANG_SECONDS)
            check_scheduler(proxy.scheduler, proxy.driver.now())
            assert requests == next(numbers) >= REQUESTS
            assert went["done"] > requests / 3
            assert went["left"] > requests / 5
            assert went["429"] > 0 < went["error event"] + went["cut"] + went["502"], "all of it was put to the test"
            assert went["incomplete"] == 0, "a cut that nobody told of"
            outcomes = proxy.outcomes()
            # Requests that were broken off before their head was sent never came to the proxy.
            assert requests - went["left"] <= sum(outcomes.values()) <= requests
            assert went["done"] <= outcomes["completed"] <= went["done"] + went["left"]
            assert outcomes.get("rejected", 0) >= went["429"] + went["503"]
            server = steady.runner.app[SERVER]
            await until(lambda: server.engine.running + server.engine.waiting == 0, HANG_SECONDS)
            assert not server._sequences
            assert not [task for task in asyncio.all_tasks() if "generate" in repr(task.get_coro())]
            # What is left of all this works as on the first day.
            body = b'{"model": "m", "prompt": "x", "stream": false, "max_tokens": 2}'
            assert (await proxy.fetch(body=body))[0] == 200
        await until(lambda: mortal.connections == 0, HANG_SECONDS)
    await stop_engines([steady])
    await until(lambda: asyncio.all_tasks() <= before)
