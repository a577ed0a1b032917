"""A real engine that dies under load and comes back."""

import asyncio
from typing import Any

import pytest
from live_proxy import LiveProxy, until
from real_engine import RealEngine

openai = pytest.importorskip("openai")


@pytest.mark.timeout(1000)
async def test_an_engine_dies_under_load_and_comes_back(
    openai_client: Any, proxy: LiveProxy, engine: RealEngine
) -> None:
    async def ask(tokens: int) -> str:
        try:
            stream = await openai_client.completions.create(
                model="tiny", prompt="a", stream=True, max_tokens=tokens, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                pass
        except openai.APIError as error:
            return type(error).__name__
        return "ok"

    asked = [asyncio.ensure_future(ask(8000)) for _ in range(20)]
    await until(lambda: sum(e.decodes for e in proxy.scheduler.engines) == 20, 60)
    await asyncio.to_thread(engine.kill)
    told = await asyncio.wait_for(asyncio.gather(*asked), 20)
    assert told == ["APIError"] * 20, "each stream ends in an error, and none in silence"
    await until(lambda: not any(e.up for e in proxy.scheduler.engines), 10)
    with pytest.raises(openai.InternalServerError):
        await openai_client.completions.create(model="tiny", prompt="a", max_tokens=1)
    await asyncio.to_thread(engine.start)
    await until(lambda: any(e.up for e in proxy.scheduler.engines), 20)
    assert await asyncio.gather(*(ask(8) for _ in range(10))) == ["ok"] * 10
    await proxy.idle()
    assert proxy.outcomes() == {"completed": 10, "engine_failed": 20, "rejected": 1}
