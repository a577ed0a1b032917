"""Prompt lengths through the whole proxy: engines that report usage teach, and the next estimate knows."""

import json
from typing import Any

from live_proxy import CHAT, LiveProxy, live_proxy
from scripted_engine import DONE, Call, last, scripted_engine, token, usage

TOKENS_PER_BYTE = 0.5


async def stream_with_usage(call: Call) -> None:
    tokens = int(TOKENS_PER_BYTE * len(call.json()["prompt"]))
    await call.stream(token(), last(), usage(tokens, 1) + DONE)


async def whole(call: Call) -> None:
    tokens = int(TOKENS_PER_BYTE * sum(len(m["content"]) for m in call.json()["messages"]))
    told = {"prompt_tokens": tokens, "completion_tokens": 1}
    await call.answer(json.dumps({"choices": [{"message": {"content": "a"}}], "usage": told}).encode())


async def silent(call: Call) -> None:
    await call.stream(token(), last(), DONE)


async def failing(call: Call) -> None:
    await call.answer(b'{"error": {"message": "no"}, "usage": {"prompt_tokens": 500}}', status="400 Bad Request")


def bytes_per_token(proxy: LiveProxy) -> dict[tuple[str, ...], float]:
    return proxy.samples("slai_prompt_bytes_per_token")


def completion(characters: int, **more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "x" * characters, "stream": True, **more}).encode()


async def test_streams_with_usage_teach_and_the_core_gets_the_better_estimate() -> None:
    async with scripted_engine(stream_with_usage) as engine, live_proxy(engine) as proxy:
        assert bytes_per_token(proxy) == {}
        for number in range(20):
            assert (await proxy.fetch(body=completion(1000 + 10 * number)))[0] == 200
        found = bytes_per_token(proxy)
        assert 1.9 < found["m", "ascii"] < 2.2
        assert found["m", "other"] == 4
        assert 0 < proxy.samples("slai_prompt_estimate_error")["m",] < 0.2

        waiting: list[int] = []

        async def look(call: Call) -> None:
            waiting.append(proxy.scheduler.engines[0].kv_tokens)
            await silent(call)

        engine.script = look
        await proxy.fetch(body=completion(1000))
        assert 470 < waiting[0] < 530
        await proxy.fetch(body=completion(0, prompt=[7] * 321))
        assert waiting[1] == 321, "token ids are counted"


async def test_whole_answers_teach() -> None:
    async with scripted_engine(whole) as engine, live_proxy(engine) as proxy:
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 2000}]}
        for _ in range(20):
            await proxy.fetch(CHAT, json.dumps(body).encode())
        assert 1.9 < bytes_per_token(proxy)["m", "ascii"] < 2.2


async def test_without_usage_or_success_nothing_is_learnt() -> None:
    for script in (silent, failing):
        async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
            await proxy.fetch(body=completion(1000))
            await proxy.fetch(body=completion(1000, stream=False))
            assert bytes_per_token(proxy) == {}


async def test_models_that_no_engine_lists_make_no_series() -> None:
    async with scripted_engine(stream_with_usage) as engine:
        engine.routes["GET /v1/models"] = lambda call: call.answer(b"", status="404 Not Found")
        async with live_proxy(engine) as proxy:
            for number in range(10):
                await proxy.fetch(body=completion(1000, model=f"m{number}"))
            assert bytes_per_token(proxy) == {}
