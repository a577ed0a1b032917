"""The Responses and the Messages API are scheduled and measured like the others; several answers in one stream."""

import asyncio
import json
from typing import Any

import pytest
from live_proxy import live_proxy, until
from scripted_engine import DONE, Call, last, scripted_engine, usage

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def named(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


STREAMS = {
    RESPONSES: [
        named("response.created", response={"usage": None}),
        named("response.output_item.added", item={}),
        named("response.reasoning_text.delta", delta="hm"),
        named("response.output_text.delta", delta="a"),
        named("response.output_text.done", text="a"),
        named("response.completed", response={"usage": {"input_tokens": 30, "output_tokens": 2}}),
    ],
    MESSAGES: [
        named("message_start", message={"usage": {"input_tokens": 30, "output_tokens": 0}}),
        named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": "b"}),
        named("content_block_stop", index=0),
        named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2}),
        named("message_stop"),
    ],
}
BODIES = {
    RESPONSES: b'{"model": "m", "input": "hello", "stream": true}',
    MESSAGES: b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}], "stream": true}',
}
apis = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])


@apis
async def test_a_stream_passes_untouched_and_is_measured(path: str) -> None:
    async def script(call: Call) -> None:
        await call.stream(*STREAMS[path])

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        status, answer = await proxy.fetch(path, BODIES[path])
        assert (status, answer) == (200, b"".join(STREAMS[path]))
        assert engine.calls[0].body == BODIES[path]
        assert proxy.outcomes() == {"completed": 1}
        tokens = proxy.samples("slai_tokens_total")
        assert (tokens["relaxed", "input"], tokens["relaxed", "output"]) == (30, 2)
        assert sum(proxy.samples("gen_ai_server_time_to_first_token_seconds_count").values()) == 1


@apis
async def test_the_first_token_is_its_first_delta_not_its_first_event(path: str) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin()
        for number, piece in enumerate(STREAMS[path]):
            if number == 2:
                await go.wait()
            await call.write(piece)
        await call.end()

    async with (
        scripted_engine(script) as engine,
        live_proxy(engine) as proxy,
        proxy.post(path, BODIES[path]) as response,
    ):
        await response.content.readexactly(len(STREAMS[path][0] + STREAMS[path][1]))
        assert [e.decodes for e in proxy.scheduler.engines] == [0]
        assert proxy.scheduler.dispatched == 1
        go.set()
        await response.read()


@apis
async def test_they_wait_in_the_queue_like_all_others(path: str) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin()
        await call.write(STREAMS[path][0])
        await go.wait()
        for piece in STREAMS[path][1:]:
            await call.write(piece)
        await call.end()

    async with scripted_engine(script) as engine, live_proxy(engine, max_num_seqs=1) as proxy:
        asked = [asyncio.ensure_future(proxy.fetch(path, BODIES[path])) for _ in range(3)]
        await until(lambda: proxy.scheduler.waiting == 2 and engine.calls)
        assert len(engine.calls) == 1
        go.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3


@apis
async def test_a_cut_ends_in_one_error_event_of_the_api_s_own(path: str) -> None:
    async def script(call: Call) -> None:
        await call.begin()
        for piece in STREAMS[path][:4]:
            await call.write(piece)
        call.close()

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        _, answer = await proxy.fetch(path, BODIES[path])
        sent = b"".join(STREAMS[path][:4])
        assert answer.startswith(sent)
        rest = answer.removeprefix(sent)
        assert rest.startswith(b"event: error\ndata: ")
        assert json.loads(rest.split(b"data: ")[1])["type"] == "error"
        assert proxy.outcomes() == {"engine_failed": 1}


async def test_refusals_have_the_shape_that_the_api_s_clients_know() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        for path, bad in ((RESPONSES, b"[]"), (MESSAGES, b"[]"), (MESSAGES, BODIES[MESSAGES].replace(b'"m"', b'"x"'))):
            status, answer = await proxy.fetch(path, bad)
            told = json.loads(answer)
            assert status in (400, 404)
            if path == MESSAGES:
                assert told["type"] == "error"
                assert told["error"]["type"] in ("invalid_request_error", "not_found_error")
            else:
                assert "code" in told["error"]


async def test_count_tokens_and_the_like_pass_the_queue() -> None:
    async def script(call: Call) -> None:
        await call.answer(b'{"input_tokens": 5}')

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        assert await proxy.fetch("/v1/messages/count_tokens", BODIES[MESSAGES]) == (200, b'{"input_tokens": 5}')
        assert proxy.outcomes() == {}


async def test_several_answers_in_one_stream_are_one_token_each_per_step() -> None:
    def choice(index: int) -> bytes:
        return b"data: " + json.dumps({"choices": [{"index": index, "text": "x"}]}).encode() + b"\n\n"

    async def script(call: Call) -> None:
        await call.begin()
        for _ in range(4):
            for index in range(3):
                await call.write(choice(index))
        await call.write(last() + usage(5, 12) + DONE)
        await call.end()

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        seen: list[int] = []
        on_tokens = proxy.driver.on_tokens

        def spy(request_id: str, chunks: int, now: float) -> None:
            seen.append(chunks)
            on_tokens(request_id, chunks, now)

        proxy.driver.on_tokens = spy  # type: ignore[method-assign]
        await proxy.fetch(body=b'{"model": "m", "prompt": "a", "n": 3, "stream": true}')
        assert sum(seen) == 4, "four steps"
        assert proxy.samples("slai_tokens_total")["relaxed", "output"] == 12


async def test_each_answer_takes_a_slot_of_the_engine() -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin()
        await go.wait()
        await call.write(last() + DONE)
        await call.end()

    async with scripted_engine(script) as engine, live_proxy(engine, max_num_seqs=4) as proxy:
        body = b'{"model": "m", "prompt": ["a", "b"], "n": 2, "stream": true}'
        asked = [asyncio.ensure_future(proxy.fetch(body=body))]
        await until(lambda: engine.calls)
        asked.append(asyncio.ensure_future(proxy.fetch()))
        await until(lambda: proxy.scheduler.waiting == 1)
        assert len(engine.calls) == 1
        go.set()
        await asyncio.gather(*asked)
        assert [e.siblings for e in proxy.scheduler.engines] == [0]


async def test_a_refusal_after_comments_is_an_event_that_the_api_s_clients_know() -> None:
    async def silent(call: Call) -> None:
        await call.gone.wait()

    async with (
        scripted_engine(silent) as engine,
        live_proxy(engine, max_num_seqs=1, queue_timeout_seconds=0.2, queue_comment_seconds=0.05) as proxy,
    ):
        busy = asyncio.ensure_future(proxy.fetch())
        await until(lambda: engine.calls)
        _, answer = await proxy.fetch(MESSAGES, BODIES[MESSAGES])
        assert answer.startswith(b": waiting")
        event = answer.rpartition(b": waiting\n\n")[2]
        assert event.startswith(b"event: error\ndata: {")
        assert json.loads(event.partition(b"data: ")[2])["error"]["type"] == "rate_limit_error"
        busy.cancel()


class TestAliases:
    BODY = b'{"messages": [{"content": "model"}],  "model": "fast", "x": 1e400}'

    async def test_a_model_by_another_name(self) -> None:
        async with (
            scripted_engine(None, "m") as engine,
            live_proxy(engine, aliases={"fast": "m", "lost": "x"}) as proxy,
        ):
            for path in ("/v1/chat/completions", "/v1/embeddings"):
                assert (await proxy.fetch(path, self.BODY))[0] == 200
                assert engine.calls[-1].body == self.BODY.replace(b'"fast"', b'"m"'), "nothing else has changed"
            async with proxy.client.get("/v1/models") as response:
                entries = (await response.json())["data"]
            assert [(entry["id"], entry.get("root")) for entry in entries] == [("m", None), ("fast", "m")]
            assert (await proxy.fetch(body=b'{"model": "lost", "prompt": "a"}'))[0] == 404
