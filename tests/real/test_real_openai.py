"""The openai client, unmodified, through the proxy to a real vLLM."""

import asyncio
import json
from typing import Any

import pytest
from live_proxy import LiveProxy, live_proxy, until
from real_engine import RealEngine

openai = pytest.importorskip("openai")
MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
LENGTH = {"max_tokens": 8, "extra_body": {"ignore_eos": True}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["c", "f"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


async def collect(stream: Any) -> list[Any]:
    return [item async for item in stream]


class TestChat:
    async def test_whole(self, openai_client: Any) -> None:
        answer = await openai_client.chat.completions.create(model="tiny", messages=MESSAGES, **LENGTH)
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 8

    async def test_stream(self, openai_client: Any, proxy: LiveProxy) -> None:
        stream = await openai_client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **LENGTH)
        chunks = await collect(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].choices, "usage that the client did not ask for does not reach it"
        await proxy.idle()
        assert proxy.outcomes() == {"completed": 1}

    async def test_stream_with_usage(self, openai_client: Any) -> None:
        stream = await openai_client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **LENGTH
        )
        chunks = await collect(stream)
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 8

    async def test_synchronous(self, openai_sync: Any) -> None:
        def talk() -> tuple[Any, list[Any]]:
            create = openai_sync.chat.completions.create
            whole = create(model="tiny", messages=MESSAGES, **LENGTH)
            return whole, list(create(model="tiny", messages=MESSAGES, stream=True, **LENGTH))

        whole, chunks = await asyncio.to_thread(talk)
        assert whole.usage.completion_tokens == 8
        assert chunks[-1].choices[0].finish_reason == "length"

    async def test_several_answers_and_log_probabilities(self, openai_client: Any) -> None:
        answer = await openai_client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=3, logprobs=True, top_logprobs=2, **LENGTH
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len(answer.choices[0].logprobs.content) == 8
        stream = await openai_client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=2, stream=True, logprobs=True, **LENGTH
        )
        assert {chunk.choices[0].index for chunk in await collect(stream) if chunk.choices} == {0, 1}

    async def test_tools_are_offered(self, openai_client: Any) -> None:
        """Weights of chance call none; that the engine takes them, and what it then says, passes."""
        asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": "auto"}
        answer = await openai_client.chat.completions.create(**asked, **LENGTH)
        assert answer.choices[0].finish_reason in ("length", "tool_calls")
        stream = await openai_client.chat.completions.create(stream=True, **asked, **LENGTH)
        reasons = [chunk.choices[0].finish_reason for chunk in await collect(stream) if chunk.choices]
        assert reasons[-1] in ("length", "tool_calls")

    async def test_a_shape_that_is_asked_for(self, openai_client: Any) -> None:
        schema = WEATHER["function"]["parameters"]  # type: ignore[index]
        answer = await openai_client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=64,
            response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": schema}},
        )
        assert json.loads(answer.choices[0].message.content)["unit"] in ("c", "f")


class TestCompletions:
    async def test_whole_and_stream(self, openai_client: Any) -> None:
        whole = await openai_client.completions.create(model="tiny", prompt="def f(", **LENGTH)
        assert whole.usage.completion_tokens == 8
        stream = await openai_client.completions.create(model="tiny", prompt="def f(", stream=True, **LENGTH)
        assert "".join(chunk.choices[0].text for chunk in await collect(stream) if chunk.choices)

    async def test_lists_of_prompts_and_of_token_ids(self, openai_client: Any) -> None:
        whole = await openai_client.completions.create(model="tiny", prompt=["a", "b"], n=2, **LENGTH)
        assert len(whole.choices) == 4
        ids = await openai_client.completions.create(model="tiny", prompt=[[5, 6, 7], [8]], **LENGTH)
        assert (len(ids.choices), ids.usage.prompt_tokens) == (2, 4)

    async def test_synchronous(self, openai_sync: Any) -> None:
        create = openai_sync.completions.create
        chunks = await asyncio.to_thread(lambda: list(create(model="tiny", prompt="a", stream=True, **LENGTH)))
        assert chunks[-1].choices[0].finish_reason == "length"


class TestResponses:
    async def test_whole_and_stream(self, openai_client: Any, proxy: LiveProxy) -> None:
        whole = await openai_client.responses.create(model="tiny", input="Tell me of the sea.", max_output_tokens=8)
        assert whole.output_text
        assert whole.usage.output_tokens <= 8
        stream = await openai_client.responses.create(
            model="tiny", input="Tell me of the sea.", max_output_tokens=8, stream=True
        )
        events = await collect(stream)
        assert events[0].type == "response.created"
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert any(event.type == "response.output_text.delta" for event in events)
        await proxy.idle()
        assert proxy.outcomes() == {"completed": 2}
        assert sum(proxy.samples("gen_ai_server_time_to_first_token_seconds_count").values()) == 1

    async def test_synchronous(self, openai_sync: Any) -> None:
        def talk() -> str:
            with openai_sync.responses.stream(model="tiny", input="The sea", max_output_tokens=8) as stream:
                list(stream)
                return str(stream.get_final_response().output_text)

        assert await asyncio.to_thread(talk)


async def test_models(openai_client: Any) -> None:
    assert [model.id async for model in openai_client.models.list()] == ["tiny"]


async def test_a_model_by_another_name(engine: RealEngine) -> None:
    async with (
        live_proxy(engine.url, aliases={"gpt-4o": "tiny"}) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none") as client,
    ):
        assert [model.id async for model in client.models.list()] == ["tiny", "gpt-4o"]
        answer = await client.chat.completions.create(model="gpt-4o", messages=MESSAGES, **LENGTH)
        assert answer.model == "tiny"


class TestErrors:
    async def test_each_has_the_client_s_own_type(self, openai_client: Any) -> None:
        create = openai_client.chat.completions.create
        with pytest.raises(openai.NotFoundError):
            await create(model="nobody", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError):
            await create(model="tiny", messages=MESSAGES, temperature=-5)
        with pytest.raises(openai.BadRequestError):
            await create(model="tiny", messages=[{"role": "user", "content": "x " * 20_000}], max_tokens=5)
        with pytest.raises(openai.APIStatusError) as unserved:
            await openai_client.embeddings.create(model="tiny", input="the sea")
        assert unserved.value.status_code in (400, 404, 501)
        with pytest.raises(openai.PermissionDeniedError):
            await openai_client.post("/../sleep", cast_to=object, body={})

    async def test_a_full_queue_is_a_rate_limit(self, engine: RealEngine) -> None:
        async with (
            live_proxy(engine.url, max_num_seqs=1, max_queue_requests=0) as proxy,
            openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client,
        ):
            stream = await client.completions.create(
                model="tiny", prompt="a", stream=True, max_tokens=8000, extra_body={"ignore_eos": True}
            )
            await anext(aiter(stream))
            with pytest.raises(openai.RateLimitError) as refused:
                await client.completions.create(model="tiny", prompt="b", max_tokens=1)
            assert refused.value.response.headers["x-slai-reason"] == "queue_full"
            await stream.close()

    async def test_no_engine_is_a_server_error(self) -> None:
        async with (
            live_proxy("http://127.0.0.1:9") as proxy,
            openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client,
        ):
            with pytest.raises(openai.InternalServerError) as refused:
                await client.completions.create(model="tiny", prompt="b")
            assert refused.value.status_code == 503


class TestLeaving:
    async def test_a_client_that_stops_reading_stops_the_engine(
        self, openai_client: Any, proxy: LiveProxy, engine: RealEngine
    ) -> None:
        stream = await openai_client.completions.create(
            model="tiny", prompt="a", stream=True, max_tokens=8000, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await engine.runs(1)
        await stream.close()
        await engine.runs(0)
        await proxy.idle()
        assert proxy.outcomes() == {"client_gone": 1}

    async def test_so_does_its_own_timeout(self, openai_client: Any, proxy: LiveProxy, engine: RealEngine) -> None:
        hasty = openai_client.with_options(timeout=openai.Timeout(60, read=3))
        asking = hasty.completions.create(model="tiny", prompt="a", max_tokens=8000, extra_body={"ignore_eos": True})
        asked = asyncio.ensure_future(asking)
        await engine.runs(1)
        with pytest.raises(openai.APITimeoutError):
            await asked
        await engine.runs(0)
        await proxy.idle()
        assert proxy.outcomes() == {"client_gone": 1}
        assert [e.health.condition.value for e in proxy.scheduler.engines] == ["healthy"], "no fault of the engine"


async def test_many_at_once(openai_client: Any, proxy: LiveProxy) -> None:
    async def ask(number: int) -> int:
        stream = await openai_client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"{number} " * (10 + 20 * (number % 7))}],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=16,
            extra_body={"ignore_eos": True},
        )
        return int((await collect(stream))[-1].usage.completion_tokens)

    assert await asyncio.gather(*map(ask, range(60))) == [16] * 60
    await proxy.idle()
    assert proxy.outcomes() == {"completed": 60}
    await until(lambda: not proxy.left_over())
