"""Engines that are removed while they serve: nothing new, streams go on, and what takes too long is told the truth."""

import asyncio
import socket
from contextlib import ExitStack, closing

import pytest
from live_proxy import LiveProxy, live_proxy, until
from scripted_engine import DONE, Call, last, scripted_engine, token

from proxy.core.events import EngineDown, EngineRemoved, EngineUp
from proxy.core.limits import EngineLimits

REMOVED = b"the engine was taken out of service before its answer was complete"


def engines(proxy: LiveProxy) -> list[str]:
    return [engine.id for engine in proxy.scheduler.engines]


async def test_streams_finish_at_a_removed_engine_and_then_it_is_gone_with_its_series() -> None:
    more = asyncio.Event()

    async def slow(call: Call) -> None:
        await call.begin()
        await call.write(token("a"))
        await more.wait()
        for piece in (token("b"), last(), DONE):
            await call.write(piece)
        await call.end()

    async with scripted_engine(slow) as old, scripted_engine() as new, live_proxy(old) as proxy:
        async with proxy.post() as response:
            await response.content.readany()
            proxy.prober.add(new.url)
            await until(lambda: len(engines(proxy)) == 2)
            proxy.prober.remove(old.url, 30.0)
            assert (await proxy.fetch())[0] == 200
            assert (len(old.calls), len(new.calls)) == (1, 1)
            assert engines(proxy) == [old.url, new.url]
            assert proxy.samples("slai_engine_leaving") == {(old.url,): 1, (new.url,): 0}
            more.set()
            assert (await response.read()).endswith(DONE)
        await until(lambda: engines(proxy) == [new.url])
        assert old.url not in proxy.exposition(), "no series is left of it"
        assert proxy.outcomes() == {"completed": 2}


@pytest.mark.parametrize("begun", [True, False])
async def test_what_is_not_over_at_the_limit_is_cut_and_told_so(begun: bool) -> None:
    async def silent(call: Call) -> None:
        if begun:
            await call.begin()
            await call.write(token("a"))
        await call.gone.wait()

    async with scripted_engine(silent) as engine, live_proxy(engine) as proxy:
        asked = asyncio.ensure_future(proxy.fetch())
        await until(lambda: engine.calls and (not begun or any(e.decodes for e in proxy.scheduler.engines)))
        proxy.prober.remove(engine.url, 0.05)
        status, body = await asyncio.wait_for(asked, 5)
        assert status == (200 if begun else 502)
        assert body.count(REMOVED) == 1
        assert not body.endswith(DONE)
        await until(engine.calls[0].gone.is_set)
        assert engines(proxy) == []
        assert proxy.outcomes() == {"engine_failed": 1}
        assert proxy.reasons() == {"engine_removed": 1}
        assert (await proxy.fetch())[0] == 503


async def test_a_request_cut_before_its_engine_had_it_goes_to_another() -> None:
    """A host that is gone takes as long as the connect timeout to be found out, and may be cut meanwhile."""
    with closing(socket.socket()) as dead, ExitStack() as fillers:
        dead.bind(("127.0.0.1", 0))
        dead.listen(0)
        url = f"http://127.0.0.1:{dead.getsockname()[1]}"
        async with scripted_engine() as engine, live_proxy(engine, connect_timeout_seconds=0.3) as proxy:
            for _ in range(3):  # from now on nobody else can connect
                filler = fillers.enter_context(closing(socket.socket()))
                filler.setblocking(False)
                filler.connect_ex(dead.getsockname())
            proxy.driver.feed(EngineDown(engine.url))
            proxy.driver.feed(EngineUp(url, EngineLimits(), frozenset({"m"})))
            asked = asyncio.ensure_future(proxy.fetch())
            await until(lambda: proxy.scheduler.dispatched)
            proxy.driver.feed(EngineUp(engine.url, EngineLimits(), frozenset({"m"})))
            proxy.driver.feed(EngineRemoved(url, 0.05))
            assert await asked == (200, token("a") + token("b") + last() + DONE)
            assert engines(proxy) == [engine.url]
