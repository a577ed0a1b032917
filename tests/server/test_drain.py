"""Shutting down: what waits is sent away, what runs may end, and nothing new begins."""

import asyncio
import json

import aiohttp
import pytest
from live_proxy import live_proxy, until
from scripted_engine import Call, scripted_engine, token

from proxy.server.app import PROXY
from proxy.server.drain import Signals, drain


async def test_draining() -> None:
    finish = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin()
        await call.write(token("before"))
        await finish.wait()
        await call.write(token("after"))
        await call.end()

    async with (
        scripted_engine(script) as engine,
        live_proxy(engine, max_num_seqs=1) as proxy,
        asyncio.TaskGroup() as group,
    ):
        running = group.create_task(proxy.fetch())
        await until(lambda: proxy.scheduler.engines[0].decodes)
        waiting = [proxy.post() for _ in range(3)]
        answers = [group.create_task(post.__aenter__()) for post in waiting]
        await until(lambda: proxy.scheduler.waiting == 3)

        proxy.app[PROXY].start_drain()
        for answer in [await task for task in answers] + [await proxy.post()]:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.headers["x-should-retry"] == "true"
            assert json.loads(await answer.read())["error"]["type"] == "service_unavailable_error"
        async with proxy.client.get("/readyz") as response:
            assert response.status == 503
            assert (await response.json())["draining"] is True
        async with proxy.client.get("/livez") as response:
            assert response.status == 200

        assert not running.done()
        finish.set()
        assert await running == (200, token("before") + token("after"))
        assert proxy.outcomes() == {"completed": 1, "rejected": 4}
        assert proxy.reasons() == {"draining": 4}
        assert len(engine.calls) == 1


async def test_what_an_engine_turns_away_during_the_drain_is_not_queued_again() -> None:
    drained = asyncio.Event()

    async def script(call: Call) -> None:
        await drained.wait()
        await call.answer(b"", status="503 Service Unavailable")

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        request = asyncio.ensure_future(proxy.fetch())
        await until(lambda: engine.calls)
        proxy.app[PROXY].start_drain()
        drained.set()
        status, body = await request
        assert status == 503
        assert json.loads(body)["error"]["code"] == "server_is_overloaded"
        assert proxy.reasons() == {"draining": 1}


async def test_a_drain_may_begin_twice() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        for _ in range(2):
            proxy.app[PROXY].start_drain()
        assert (await proxy.fetch())[0] == 503


async def test_what_passes_by_the_queue_may_end_as_streams_may() -> None:
    finish = asyncio.Event()

    async def script(call: Call) -> None:
        await finish.wait()
        await call.answer(b"{}")

    async def stop_listening() -> None:
        asyncio.get_running_loop().call_soon(finish.set)

    async with scripted_engine(script) as engine, live_proxy(engine, drain_grace_seconds=0) as proxy:
        passing = asyncio.ensure_future(proxy.fetch("/v1/embeddings"))
        await until(lambda: engine.calls)
        await drain(proxy.app[PROXY], Signals(), stop_listening)
        assert await passing == (200, b"{}")


async def test_what_passes_by_the_queue_for_too_long_is_cut() -> None:
    async def script(call: Call) -> None:
        await call.gone.wait()

    async def stop_listening() -> None:
        pass

    async with (
        scripted_engine(script) as engine,
        live_proxy(engine, drain_grace_seconds=0, drain_seconds=0.1) as proxy,
    ):
        passing = asyncio.ensure_future(proxy.fetch("/v1/embeddings"))
        await until(lambda: engine.calls)
        await asyncio.wait_for(drain(proxy.app[PROXY], Signals(), stop_listening), 3)
        with pytest.raises(aiohttp.ClientError):
            await passing
