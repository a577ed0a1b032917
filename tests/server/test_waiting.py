"""Comments to clients whose requests wait for a stream."""

from __future__ import annotations

import asyncio
import json

from live_proxy import live_proxy, until
from scripted_engine import DONE, JSON, Call, last, scripted_engine, token

from proxy.server.app import PROXY
from proxy.server.waiting import as_event

STREAMED = b'{"model": "m", "prompt": "hello", "stream": true}'
COMMENT = b": waiting\n\n"


class Engine:
    """Works on one request until it is told to go on."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def script(self, call: Call) -> None:
        await self.go.wait()
        await call.stream(token("a"), last(), DONE)


async def test_a_client_that_waits_is_told_and_then_gets_its_stream() -> None:
    work = Engine()
    async with (
        scripted_engine(work.script) as engine,
        live_proxy(engine, max_num_seqs=1, queue_comment_seconds=0.01) as proxy,
    ):
        first = asyncio.ensure_future(proxy.fetch())
        await until(lambda: engine.calls)
        async with proxy.post(headers={"X-Request-Id": "r1"}) as second:
            assert second.status == 200
            assert second.headers["Content-Type"].startswith("text/event-stream")
            assert second.headers["X-Request-Id"] == "r1"
            assert (await second.content.readany()).startswith(COMMENT)
            work.go.set()
            body = await second.read()
        assert body.replace(COMMENT, b"") == token("a") + last() + DONE
        assert await first == (200, token("a") + last() + DONE), "who does not wait is told nothing"
        assert proxy.outcomes() == {"completed": 2}


async def test_a_refusal_is_then_an_event() -> None:
    work = Engine()
    async with (
        scripted_engine(work.script) as engine,
        live_proxy(engine, max_num_seqs=1, queue_comment_seconds=0.01) as proxy,
    ):
        first = asyncio.ensure_future(proxy.fetch())
        await until(lambda: engine.calls)
        async with proxy.post() as second:
            await second.content.readany()
            proxy.app[PROXY].start_drain()
            body = (await second.read()).replace(COMMENT, b"")
        assert body.endswith(b"\n\n")
        assert json.loads(body.removeprefix(b"data: "))["error"]["code"] == "server_is_overloaded"
        work.go.set()
        await first
        assert proxy.outcomes() == {"completed": 1, "rejected": 1}


async def test_an_engines_error_is_then_an_event_with_its_own_body() -> None:
    work = Engine()
    async with (
        scripted_engine(work.script) as engine,
        live_proxy(engine, max_num_seqs=1, queue_comment_seconds=0.01) as proxy,
    ):
        first = asyncio.ensure_future(proxy.fetch())
        await until(lambda: engine.calls)
        async with proxy.post() as second:
            await second.content.readany()
            engine.script = lambda call: call.answer(b'{"error":\n{"x": 1e400}}', status="400 Bad", headers=JSON)
            work.go.set()
            body = (await second.read()).replace(COMMENT, b"")
        assert body == b'data: {"error":\ndata: {"x": 1e400}}\n\n'
        await first
        assert proxy.outcomes() == {"completed": 1, "engine_error": 1}


async def test_an_engine_that_fails_is_then_an_event_too() -> None:
    work = Engine()
    async with (
        scripted_engine(work.script) as engine,
        live_proxy(engine, max_num_seqs=1, queue_comment_seconds=0.01) as proxy,
    ):
        first = asyncio.ensure_future(proxy.fetch())
        await until(lambda: engine.calls)
        async with proxy.post() as second:
            await second.content.readany()

            async def dies(call: Call) -> None:
                call.reset()

            engine.script = dies
            work.go.set()
            body = (await second.read()).replace(COMMENT, b"")
        assert json.loads(body.removeprefix(b"data: "))["error"]["code"] == "upstream_error"
        await first
        assert proxy.outcomes() == {"completed": 1, "engine_failed": 1}


async def test_a_client_that_leaves_meanwhile_and_one_that_wants_no_stream() -> None:
    work = Engine()
    async with (
        scripted_engine(work.script) as engine,
        live_proxy(engine, max_num_seqs=1, queue_comment_seconds=0.01) as proxy,
    ):
        first = asyncio.ensure_future(proxy.fetch())
        await until(lambda: engine.calls)
        async with proxy.post() as second:
            await second.content.readany()
        await until(lambda: proxy.scheduler.waiting == 0)
        whole = asyncio.ensure_future(proxy.fetch(body=b'{"model": "m", "prompt": "x"}'))
        await until(lambda: proxy.scheduler.waiting == 1)
        await asyncio.sleep(0.03)  # time for comments, had it asked for a stream
        engine.script = lambda call: call.answer(b"{}")
        work.go.set()
        assert await whole == (200, b"{}")
        await first
        assert proxy.outcomes() == {"completed": 2, "client_gone": 1}


def test_any_answer_is_one_event() -> None:
    assert as_event(b"") == b"data: \n\n"
    assert as_event(b"a\r\nb\rc\n") == b"data: a\ndata: b\ndata: c\n\n"
