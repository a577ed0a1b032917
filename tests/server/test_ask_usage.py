"""Counts of tokens that the client did not ask for, and does not get."""

from __future__ import annotations

import json

from live_proxy import CHAT, live_proxy
from scripted_engine import DONE, Call, last, scripted_engine, token, usage

STREAMED = b'{"model": "m", "prompt": "hello", "stream": true}'


async def reports_if_asked(call: Call) -> None:
    asked = json.loads(call.body).get("stream_options", {}).get("include_usage")
    await call.stream(b": ping\n\n", token("a"), last(), *([usage(7, 5)] if asked else []), DONE)


async def test_the_engine_is_asked_and_the_client_sees_nothing_of_it() -> None:
    async with scripted_engine(reports_if_asked) as engine, live_proxy(engine, ask_usage=True) as proxy:
        status, body = await proxy.fetch(body=STREAMED)
        assert (status, body) == (200, b": ping\n\n" + token("a") + last() + DONE)
        assert json.loads(engine.calls[0].body) == {**json.loads(STREAMED), "stream_options": {"include_usage": True}}
        assert proxy.samples("gen_ai_client_token_usage_sum") or proxy.outcomes() == {"completed": 1}


async def test_who_asks_gets_it() -> None:
    body = b'{"model": "m", "prompt": "hello", "stream": true, "stream_options": {"include_usage": true}}'
    async with scripted_engine(reports_if_asked) as engine, live_proxy(engine, ask_usage=True) as proxy:
        assert (await proxy.fetch(body=body))[1] == b": ping\n\n" + token("a") + last() + usage(7, 5) + DONE
        assert engine.calls[0].body == body


async def test_what_the_engine_counts_teaches_how_long_prompts_are() -> None:
    async with scripted_engine(reports_if_asked) as engine, live_proxy(engine, ask_usage=True) as proxy:
        for _ in range(3):
            await proxy.fetch(body=STREAMED)
        assert proxy.samples("slai_prompt_bytes_per_token")


async def test_without_the_setting_nothing_is_changed() -> None:
    async with scripted_engine(reports_if_asked) as engine, live_proxy(engine) as proxy:
        await proxy.fetch(body=STREAMED)
        assert engine.calls[0].body == STREAMED


async def test_a_report_cut_anywhere_and_a_stream_that_breaks_off_in_it() -> None:
    report = usage(7, 5)

    async with scripted_engine() as engine, live_proxy(engine, ask_usage=True) as proxy:
        for at in range(1, len(report), 7):
            engine.script = lambda call, at=at: call.stream(token("a"), report[:at], report[at:] + DONE)  # type: ignore[misc]
            assert (await proxy.fetch(CHAT, b'{"model":"m","messages":[],"stream":true}'))[1] == token("a") + DONE

        for at in (1, 20, len(report) - 2, len(report) - 1, len(report)):

            async def breaks_off(call: Call, at: int = at) -> None:
                await call.begin()
                await call.write(token("a") + report[:at])
                call.close()

            engine.script = breaks_off
            _, body = await proxy.fetch(body=STREAMED)
            # Half a report would be an event that cannot be read, and a whole one is not for this client.
            first, told = (part for part in body.split(b"\n\n") if part.strip())
            assert first + b"\n\n" == token("a")
            assert json.loads(told.strip().removeprefix(b"data: "))["error"]["code"] == "upstream_error"


async def test_a_stream_of_stated_length_becomes_one_in_chunks() -> None:
    whole = token("a") + usage(7, 5) + DONE
    async with scripted_engine() as engine, live_proxy(engine, ask_usage=True) as proxy:
        engine.script = lambda call: call.answer(whole, headers=("Content-Type: text/event-stream",))
        async with proxy.post(body=STREAMED) as response:
            assert "Content-Length" not in response.headers
            assert await response.read() == token("a") + DONE
