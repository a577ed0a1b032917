"""Paths and methods that are not scheduled: they go to an engine as they came, and come back so."""

import asyncio
import json

import aiohttp
import pytest
from live_proxy import exchange, live_proxy, until
from scripted_engine import DONE, JSON, Call, event, head, scripted_engine


def raw(method: str, target: str, *headers: str, body: bytes = b"") -> bytes:
    length = (f"Content-Length: {len(body)}",) if body else ()
    lines = (f"{method} {target} HTTP/1.1", "Host: proxy", "Connection: close", *headers, *length)
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/version"),
        ("POST", "/tokenize"),
        ("POST", "/v1/embeddings?x=%20&&y"),
        ("POST", "/sleep?level=1"),
        ("PUT", "/v1/files/a%2Fb"),
        ("PATCH", "/x/..y"),
        ("DELETE", "/v1/models/m"),
        ("GET", "/v1/models/m"),
        ("POST", "/v1/models"),
        ("GET", "/v1/completions"),
        ("POST", "/v1/completions/"),
        ("OPTIONS", "/v1/chat/completions"),
        ("OPTIONS", "/metrics"),
        ("POST", "/health"),
        ("GET", "/"),
        ("GET", "//double//slash"),
        ("REPORT", "/any/method"),
    ],
)
async def test_any_path_and_method(method: str, target: str) -> None:
    async def script(call: Call) -> None:
        await call.answer(b"\x00answer\xff", status="218 This is fine", headers=("X-Engine: 1", "Content-Type: a/b"))

    body = b"\x00\x01 not json \xff" if method in ("POST", "PUT", "PATCH") else b""
    async with scripted_engine(script) as engine, live_proxy(engine, engine_administration=True) as proxy:
        answer = await exchange(proxy, raw(method, target, "X-Client: 1", "Content-Type: x/y", body=body))
        (call,) = engine.calls
        assert (call.method, call.target, call.body) == (method, target, body)
        assert call.header("x-client") == ["1"]
        assert call.header("content-type") == ["x/y"]
        assert call.header("user-agent") == call.header("accept") == call.header("accept-encoding") == []
        lines, _, content = answer.partition(b"\r\n\r\n")
        assert lines.startswith(b"HTTP/1.1 218 This is fine\r\n")
        assert b"X-Engine: 1" in lines
        assert b"Content-Type: a/b" in lines
        assert content == b"\x00answer\xff"
        assert proxy.outcomes() == {}, "it is no generation request"


@pytest.mark.parametrize("target", ["/v1%2Fcompletions", "/v1/chat%2fcompletions", "/v1/%63ompletions"])
async def test_a_generation_is_scheduled_however_its_path_is_written(target: str) -> None:
    """Engines take ``%2F`` for a slash."""
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        body = b'{"model": "m", "prompt": "a", "messages": []}'
        answer = await exchange(proxy, raw("POST", target, "Content-Type: application/json", body=body))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert engine.calls[0].target == target
        assert proxy.outcomes() == {"completed": 1}


async def test_head_tells_the_length_and_sends_nothing() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        engine.script = lambda call: call.send(head("200 OK", "Content-Length: 500", "Content-Type: a/b"))
        answer = await exchange(proxy, raw("HEAD", "/file?x=1"))
        assert (engine.calls[0].method, engine.calls[0].target) == ("HEAD", "/file?x=1")
        assert b"Content-Length: 500" in answer
        assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_answers_without_a_body(status: str) -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        engine.script = lambda call: call.send(head(status, "ETag: x"))
        answer = await exchange(proxy, raw("GET", "/file"))
        assert answer.startswith(f"HTTP/1.1 {status}\r\n".encode())
        assert b"\r\netag: x\r\n" in answer.lower()
        assert answer.endswith(b"\r\n\r\n")


async def test_redirects_are_not_followed() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        engine.script = lambda call: call.answer(b"", status="302 Found", headers=("Location: /elsewhere",))
        async with proxy.client.get("/old", allow_redirects=False) as response:
            assert response.status == 302
            assert response.headers["Location"] == "/elsewhere"
        assert len(engine.calls) == 1


async def test_a_multipart_body_passes_untouched() -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00\xff\r\n\x00\r\n--x--\r\n'
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        headers = {"Content-Type": "multipart/form-data; boundary=x", "Authorization": "Bearer k"}
        async with proxy.client.post("/v1/audio/transcriptions", data=body, headers=headers) as response:
            assert response.status == 200
        call = engine.calls[0]
        assert call.body == body
        assert call.header("content-type") == ["multipart/form-data; boundary=x"]
        assert call.header("authorization") == ["Bearer k"]


async def test_streams_of_other_apis_pass_event_by_event() -> None:
    """The next event is made only when the client has the last one."""
    received = asyncio.Semaphore(0)
    events = [event({"type": "response.output_text.delta", "delta": text}) for text in "abc"]

    async def script(call: Call) -> None:
        await call.begin()
        for piece in events:
            await call.write(piece)
            await received.acquire()
        await call.write(DONE)
        await call.end()

    async with (
        scripted_engine(script) as engine,
        live_proxy(engine) as proxy,
        proxy.client.post("/v1/responses", data=b"{}") as response,
        asyncio.timeout(5),
    ):
        for piece in events:
            assert await response.content.readany() == piece
            received.release()
        assert await response.read() == DONE


async def test_the_model_decides_on_the_engine() -> None:
    async with scripted_engine(None, "a") as one, scripted_engine(None, "b") as two, live_proxy(one, two) as proxy:
        for model in ("a", "b", "b", "nobody's", None):
            body = json.dumps({"model": model, "input": "x"} if model else {"input": "x"}).encode()
            async with proxy.post("/v1/embeddings", body) as response:
                assert response.status == 200
        assert [call.json().get("model") for call in two.calls] == ["b", "b"]
        assert [call.json().get("model") for call in one.calls] == ["a", "nobody's", None], (
            "it says itself that it is not"
        )


@pytest.mark.parametrize("body", [b"[" * 100_000, b"{bad", b'{"model": 7}', b"[]"])
async def test_a_body_that_we_do_not_understand_is_the_engines_affair(body: bytes) -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        engine.script = lambda call: call.answer(b'{"error": {}}', status="400 Bad Request")
        assert await proxy.fetch("/v1/embeddings", body) == (400, b'{"error": {}}')
        assert engine.calls[0].body == body


async def test_what_is_least_busy_gets_it() -> None:
    async def script(call: Call) -> None:
        if call.target == "/v1/completions":
            await call.gone.wait()
        await call.answer(b"{}")

    async with scripted_engine(script) as one, scripted_engine(script) as two, live_proxy(one, two) as proxy:
        busy = asyncio.ensure_future(proxy.fetch())
        await until(lambda: one.calls)
        async with proxy.client.get("/version") as response:
            assert response.status == 200
        assert len(two.calls) == 1
        busy.cancel()
        await asyncio.wait([busy])


class TestFaults:
    async def test_no_engine(self) -> None:
        async with scripted_engine() as engine:
            await engine.stop()
            async with live_proxy(engine) as proxy, proxy.client.get("/version") as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "no_engines"

    @pytest.mark.parametrize("how", ["refused", "cut", "silent"])
    async def test_no_answer(self, how: str) -> None:
        async def script(call: Call) -> None:
            if how == "silent":
                await call.gone.wait()
            call.close()

        async with scripted_engine(script) as engine, live_proxy(engine, idle_timeout_seconds=0.1) as proxy:
            if how == "refused":
                await engine.stop()
            async with proxy.client.get("/version") as response:
                assert response.status == (504 if how == "silent" else 502)
                error = (await response.json())["error"]
                assert set(error) == {"message", "type", "param", "code"}

    async def test_an_answer_that_breaks_off(self) -> None:
        async def script(call: Call) -> None:
            await call.send(head("200 OK", *JSON, "Content-Length: 100") + b"{")
            await asyncio.wait_for(received.wait(), 5)
            call.close()

        received = asyncio.Event()
        async with (
            scripted_engine(script) as engine,
            live_proxy(engine) as proxy,
            proxy.client.get("/file") as response,
        ):
            assert await response.content.readany() == b"{"
            received.set()
            with pytest.raises(aiohttp.ClientError):
                await response.read()

    @pytest.mark.parametrize("begun", [False, True])
    async def test_a_client_that_leaves(self, begun: bool) -> None:
        async def script(call: Call) -> None:
            if begun:
                await call.begin()
                await call.write(b"x")
            await call.gone.wait()

        async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
            task = asyncio.ensure_future(proxy.fetch("/v1/responses"))
            await until(lambda: engine.calls)
            task.cancel()
            await asyncio.wait([task])
            async with asyncio.timeout(1):
                await engine.calls[0].gone.wait()


@pytest.mark.parametrize(
    "target",
    [
        "/sleep?level=1",
        "//sleep",
        "/sleep/",
        "/%73leep",
        "/wake_up",
        "/pause",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/invocations",
        "/v1/load_lora_adapter",
    ],
)
async def test_paths_that_administer_an_engine_are_not_for_everybody(target: str) -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        answer = await exchange(proxy, raw("POST", target, body=b"{}"))
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"call the engine itself" in answer, "it says what to do"
        assert b"--engine-administration" in answer
        assert not engine.calls


async def test_what_passes_the_queue_counts_as_load_of_its_engine() -> None:
    go = asyncio.Event()

    async def slow(call: Call) -> None:
        await go.wait()
        await call.answer()

    async with scripted_engine(slow) as one, scripted_engine(slow) as other, live_proxy(one, other) as proxy:
        asked = [asyncio.ensure_future(proxy.fetch("/v1/embeddings", b'{"model": "m"}')) for _ in range(4)]
        await until(lambda: len(one.calls) + len(other.calls) == 4)
        assert (len(one.calls), len(other.calls)) == (2, 2)
        assert [e.passing for e in proxy.scheduler.engines] == [2, 2]
        go.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 4
        assert [e.passing for e in proxy.scheduler.engines] == [0, 0]
