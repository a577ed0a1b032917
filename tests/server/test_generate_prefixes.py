"""Prompts that begin alike, through the whole proxy: they go where their beginning is, as far as engines confirm it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from interpreted import interpreted
from live_proxy import CHAT, COMPLETIONS, LiveProxy, live_proxy, until
from scripted_engine import DONE, Call, ScriptedEngine, event, last, scripted_engine, token

SECRET = "my password is swordfish. "


def cache_config(enabled: bool) -> bytes:
    labels = f'block_size="16",num_gpu_blocks="4000",enable_prefix_caching="{enabled}"'
    return f"vllm:cache_config_info{{{labels}}} 1.0\n".encode()


def turn(topic: str, questions: int) -> bytes:
    """A chat of so many questions, all after the same long instructions about its topic."""
    messages = [{"role": "system", "content": f"About {topic}: " + SECRET * 100}]
    messages += [{"role": "user", "content": f"question {n}"} for n in range(questions)]
    return json.dumps({"model": "m", "messages": messages, "stream": True}).encode()


@asynccontextmanager
async def two_engines(*, caching: bool = True) -> AsyncIterator[tuple[LiveProxy, ScriptedEngine, ScriptedEngine]]:
    async with scripted_engine() as one, scripted_engine() as other:
        one.metrics = other.metrics = cache_config(caching)
        async with live_proxy(one, other) as proxy:
            yield proxy, one, other


def topics(engine: ScriptedEngine) -> list[str]:
    return [call.json()["messages"][0]["content"].split(":")[0] for call in engine.calls]


async def both_topics(proxy: LiveProxy, one: ScriptedEngine, other: ScriptedEngine) -> None:
    """Have each topic at an engine of its own: the second comes while the first is at work."""
    gate = asyncio.Event()

    async def wait(call: Call) -> None:
        await gate.wait()
        await call.stream(token(), last(), DONE)

    usual, one.script = one.script, wait
    first = asyncio.ensure_future(proxy.fetch(CHAT, turn("cats", 1)))
    await until(lambda: one.calls)
    await proxy.fetch(CHAT, turn("dogs", 1))
    gate.set()
    await first
    one.script = usual
    assert (topics(one), topics(other)) == (["About cats"], ["About dogs"])


async def test_a_conversation_stays_at_the_engine_that_has_it() -> None:
    async with two_engines() as (proxy, one, other):
        await both_topics(proxy, one, other)
        for questions in range(2, 6):
            assert (await proxy.fetch(CHAT, turn("dogs", questions)))[0] == 200
            assert (await proxy.fetch(CHAT, turn("cats", questions)))[0] == 200
        assert topics(one) == ["About cats"] * 5
        assert topics(other) == ["About dogs"] * 5
        held = proxy.samples("slai_engine_prefix_tokens")
        assert all(400 < held[engine.url,] < 700 for engine in (one, other))


async def test_engines_without_prefix_caching_are_taken_in_turn_as_ever() -> None:
    async with two_engines(caching=False) as (proxy, one, other):
        await both_topics(proxy, one, other)
        await proxy.fetch(CHAT, turn("dogs", 2))
        assert topics(one) == ["About cats", "About dogs"], "both are idle: the first"
        assert set(proxy.samples("slai_engine_prefix_tokens").values()) == {0}


@pytest.mark.parametrize(("cached", "expected"), [(0, 0.0), (690, 1.0), (None, 1.0)])
async def test_what_engines_find_cached_corrects_the_belief(cached: int | None, expected: float) -> None:
    async def tell(call: Call) -> None:
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached is not None else {}
        usage = {"prompt_tokens": 700, "completion_tokens": 1, **details}
        await call.stream(token(), last(), event({"choices": [], "usage": usage}) + DONE)

    async with two_engines() as (proxy, one, other):
        await both_topics(proxy, one, other)
        other.script = tell
        for _ in range(60):
            await proxy.fetch(CHAT, turn("dogs", 2))
        trust = proxy.samples("slai_engine_prefix_trust")
        assert trust[one.url,] == 1
        assert trust[other.url,] == pytest.approx(expected, abs=0.12)


async def test_a_whole_answer_corrects_too() -> None:
    async def tell(call: Call) -> None:
        usage = {"prompt_tokens": 700, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        await call.answer(json.dumps({"choices": [{"text": "a"}], "usage": usage}).encode())

    async with two_engines() as (proxy, one, other):
        one.script = other.script = tell
        body = json.dumps({"model": "m", "prompt": SECRET * 100}).encode()
        for _ in range(5):
            await proxy.fetch(COMPLETIONS, body)
        assert proxy.samples("slai_engine_prefix_trust")[one.url,] < 0.9


@interpreted
async def test_no_text_is_kept() -> None:
    async with two_engines() as (proxy, one, _):
        await proxy.fetch(CHAT, turn("cats", 1))
        index = proxy.scheduler.prefixes.index(one.url)
        assert len(index) > 3
        assert all(type(block) is int for block in index._blocks)
        assert "swordfish" not in repr(proxy.scheduler.prefixes.__dict__)
        assert "swordfish" not in proxy.exposition()
