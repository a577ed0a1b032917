"""Some hundred requests, a third of them broken off at random moments, while an engine dies and comes back.

At the end nothing may be left of any of them: in no map of the proxy, in no counter, as no task, on no connection.
"""

import asyncio
import json
import random
from collections import Counter

import aiohttp
from invariants import check_scheduler
from live_proxy import CHAT, COMPLETIONS, LiveProxy, live_proxy, until
from scripted_engine import DONE, Call, ScriptedEngine, scripted_engine, token

from proxy.sim.engine import EngineConfig, SimulatedEngine
from proxy.sim.http import SERVER, create_app, serve, stop_engines
from proxy.sim.profiles import PROFILES

REQUESTS = 400
BURST = 60
"""Requests that come at once: more than the slots and the queue hold, however fast the machine is."""
SECONDS = 5.0
"""Time over which the others come: slowly enough for a slow machine, or one that measures coverage, to serve them."""
ENGINE = EngineConfig(PROFILES["h100"], token_budget=512, max_num_seqs=8)
SPEED = 4.0


async def steps(call: Call) -> None:
    """One token each 8 ms, until the client has left."""
    body = call.json()
    if body["stream"]:
        await call.begin()
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
        await call.answer(json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}).encode())


async def ask(proxy: LiveProxy, rng: random.Random) -> str:
    """Send one request of random shape; return how it went as the client sees it."""
    stream, chat = rng.random() < 0.7, rng.random() < 0.5
    prompt = "x" * (4 * rng.randint(1, 1500))
    content = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body = json.dumps({"model": "m", "stream": stream, "max_tokens": rng.randint(1, 60), **content}).encode()
    leave_after = rng.choice([0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.5)]) if rng.random() < 1 / 3 else None
    leave_after_reads = rng.randint(0, 5) if rng.random() < 0.1 else None
    try:
        async with asyncio.timeout(leave_after), proxy.post(CHAT if chat else COMPLETIONS, body) as response:
            data, reads = b"", 0
            async for piece in response.content.iter_any():
                data += piece
                reads += 1
                if reads == leave_after_reads:
                    return "left"
    except TimeoutError:
        return "left"
    except aiohttp.ClientError:
        return "cut"
    if response.status != 200:
        return str(response.status)
    if stream:
        return "done" if data.endswith(b"data: [DONE]\n\n") else "error event" if b'"error"' in data else "incomplete"
    return "done" if json.loads(data)["usage"] else "incomplete"


async def test_churn() -> None:
    rng = random.Random(7)
    before = asyncio.all_tasks()
    # Without a prefix cache: all prompts begin alike, and would go where they are cached.
    steady = await serve(create_app(SimulatedEngine(ENGINE), model="m", speed=SPEED))
    went: Counter[str] = Counter()

    async def client(proxy: LiveProxy, number: int, seed: int) -> None:
        own = random.Random(seed)
        if number >= BURST:
            await asyncio.sleep(own.uniform(0, SECONDS))  # its arrival, not a wait for something
        went[await ask(proxy, own)] += 1

    async def die_and_return(engine: ScriptedEngine) -> None:
        for _ in range(2):
            await asyncio.sleep(SECONDS / 5)
            await engine.stop()
            await asyncio.sleep(SECONDS / 5)
            await engine.start()

    async with scripted_engine(steps) as mortal:
        async with live_proxy(
            steady.url, mortal, probe_interval_seconds=0.1, max_num_seqs=8, max_queue_requests=20
        ) as proxy:
            async with asyncio.TaskGroup() as group:
                group.create_task(die_and_return(mortal))
                for number in range(REQUESTS):
                    group.create_task(client(proxy, number, rng.getrandbits(32)), name=f"client {number}")
            await proxy.idle(3)
            check_scheduler(proxy.scheduler, proxy.driver.now())
            assert sum(went.values()) == REQUESTS
            assert went["done"] > REQUESTS / 3
            assert went["left"] > REQUESTS / 5
            assert went["429"] > 0 < went["error event"] + went["cut"] + went["502"], "all of it was put to the test"
            assert went["incomplete"] == 0, "a cut that nobody told of"
            outcomes = proxy.outcomes()
            # Requests that were broken off before their head was sent never came to the proxy.
            assert REQUESTS - went["left"] <= sum(outcomes.values()) <= REQUESTS
            assert went["done"] <= outcomes["completed"] <= went["done"] + went["left"]
            assert outcomes.get("rejected", 0) >= went["429"] + went["503"]
            server = steady.runner.app[SERVER]
            await until(lambda: server.engine.running + server.engine.waiting == 0, 1)
            assert not server._sequences
            assert not [task for task in asyncio.all_tasks() if "generate" in repr(task.get_coro())]
            # What is left of all this works as on the first day.
            body = b'{"model": "m", "prompt": "x", "stream": false, "max_tokens": 2}'
            assert (await proxy.fetch(body=body))[0] == 200
        await until(lambda: mortal.connections == 0, 1)
    await stop_engines([steady])
    await until(lambda: asyncio.all_tasks() <= before)
