"""Engines that fail requests, as the proxy treats them: what counts, and who is spared."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from live_proxy import LiveProxy, live_proxy, until
from scripted_engine import Call, scripted_engine, token


async def die(call: Call) -> None:
    call.reset()


async def fail(call: Call) -> None:
    await call.answer(b'{"error": {"message": "CUDA error"}}', status="500 Internal Server Error")


async def cut(call: Call) -> None:
    await call.begin()
    await call.write(token("a"))
    call.reset()


async def refuse(call: Call) -> None:
    await call.answer(b'{"error": {"message": "too long"}}', status="400 Bad Request")


def conditions(proxy: LiveProxy) -> dict[str, str]:
    return {e.id: e.health.condition.value for e in proxy.scheduler.engines}


@pytest.mark.parametrize("script", [die, fail, cut])
async def test_an_engine_that_fails_requests_is_ejected(script: Callable[[Call], Awaitable[None]]) -> None:
    async with scripted_engine(script) as sick, scripted_engine() as well, live_proxy(sick, well) as proxy:
        for _ in range(20):
            async with proxy.post() as response:
                await response.content.read()
        assert conditions(proxy) == {sick.url: "ejected", well.url: "healthy"}
        assert len(sick.calls) == 5
        assert proxy.outcomes()["completed"] == 15
        assert proxy.samples("slai_engine_condition")["ejected", sick.url] == 1
        assert proxy.samples("slai_engine_ejections")[(sick.url,)] == 1


async def silent(call: Call) -> None:
    await call.gone.wait()


async def test_errors_of_the_client_s_own_are_no_failures_of_the_engine() -> None:
    async with scripted_engine(refuse) as one, scripted_engine(refuse) as other, live_proxy(one, other) as proxy:
        assert [(await proxy.fetch())[0] for _ in range(30)] == [400] * 30
        assert set(conditions(proxy).values()) == {"healthy"}


async def test_neither_is_a_client_that_leaves() -> None:
    async with scripted_engine(silent) as one, scripted_engine(silent) as other, live_proxy(one, other) as proxy:
        for number in range(1, 25):
            asked = asyncio.ensure_future(proxy.fetch())
            await until(lambda n=number: len(one.calls) + len(other.calls) == n)  # type: ignore[misc]
            asked.cancel()
            await asyncio.wait([asked])
            await proxy.idle()
        assert set(conditions(proxy).values()) == {"healthy"}
