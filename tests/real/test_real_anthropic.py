"""The anthropic client, unmodified, through the proxy to a real vLLM."""

import asyncio
from typing import Any

import pytest
from live_proxy import LiveProxy, live_proxy
from real_engine import RealEngine

anthropic = pytest.importorskip("anthropic")
ASKED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Tell me of the sea."}],
    "system": "You are a sailor.",
}
LONG = ASKED | {"max_tokens": 8000, "extra_body": {"temperature": 0}}
"""Takes seconds at least. vLLM's messages know no ``ignore_eos``: what is drawn ends in 4,000 tokens or so."""
WEATHER = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"unit": {"type": "string", "enum": ["c", "f"]}},
        "required": ["unit"],
        "additionalProperties": False,
    },
}


async def test_whole(anthropic_client: Any) -> None:
    message = await anthropic_client.messages.create(**ASKED)
    assert message.content[0].text
    assert message.usage.output_tokens <= 8


async def test_stream_of_events(anthropic_client: Any, proxy: LiveProxy) -> None:
    stream = await anthropic_client.messages.create(stream=True, **ASKED)
    kinds = [event.type async for event in stream]
    assert kinds[0] == "message_start"
    assert "content_block_delta" in kinds
    assert kinds[-1] == "message_stop"
    await proxy.idle()
    assert proxy.outcomes() == {"completed": 1}
    assert proxy.samples("slai_tokens_total")["relaxed", "output"] <= 8
    assert sum(proxy.samples("gen_ai_server_time_to_first_token_seconds_count").values()) == 1


async def test_stream_helper(anthropic_client: Any) -> None:
    async with anthropic_client.messages.stream(**ASKED) as stream:
        text = "".join([part async for part in stream.text_stream])
        message = await stream.get_final_message()
    assert message.content[0].text == text != ""


async def test_synchronous(anthropic_sync: Any) -> None:
    def talk() -> tuple[Any, str]:
        whole = anthropic_sync.messages.create(**ASKED)
        with anthropic_sync.messages.stream(**ASKED) as stream:
            return whole, "".join(stream.text_stream)

    whole, text = await asyncio.to_thread(talk)
    assert whole.content[0].text
    assert text


async def test_tools_are_offered(anthropic_client: Any) -> None:
    """Weights of chance call none; that the engine takes them, and what it then says, passes."""
    asked = ASKED | {"tools": [WEATHER], "tool_choice": {"type": "auto"}}
    message = await anthropic_client.messages.create(**asked)
    assert message.stop_reason in ("max_tokens", "end_turn", "tool_use")
    async with anthropic_client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert streamed.usage.input_tokens + (streamed.usage.cache_read_input_tokens or 0) == (
        message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    )


async def test_count_tokens(anthropic_client: Any) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    counted = await anthropic_client.messages.count_tokens(**asked)
    message = await anthropic_client.messages.create(**ASKED)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_errors_have_the_client_s_own_types(anthropic_client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await anthropic_client.messages.create(**ASKED | {"model": "nobody"})
    with pytest.raises(anthropic.BadRequestError):
        await anthropic_client.messages.create(**ASKED | {"extra_body": {"temperature": -5}})


async def test_a_full_queue_is_a_rate_limit_and_no_engine_an_overload(engine: RealEngine) -> None:
    async with (
        live_proxy(engine.url, max_num_seqs=1, max_queue_requests=0) as proxy,
        anthropic.AsyncAnthropic(base_url=proxy.url, api_key="none", max_retries=0) as client,
    ):
        stream = await client.messages.create(stream=True, **LONG)
        await anext(aiter(stream))
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(**ASKED)
        await stream.close()
    async with (
        live_proxy("http://127.0.0.1:9") as proxy,
        anthropic.AsyncAnthropic(base_url=proxy.url, api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(**ASKED)
        assert refused.value.status_code == 503


async def test_a_client_that_leaves_stops_the_engine(
    anthropic_client: Any, proxy: LiveProxy, engine: RealEngine
) -> None:
    stream = await anthropic_client.messages.create(stream=True, **LONG)
    await anext(aiter(stream))
    await engine.runs(1)
    await stream.close()
    await engine.runs(0)
    await proxy.idle()
    assert proxy.outcomes() == {"client_gone": 1}
