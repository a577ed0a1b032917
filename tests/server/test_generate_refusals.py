"""Requests that the proxy itself refuses: the status, the shape of the error, and that no engine sees them."""

import asyncio
import gzip
import json
from functools import partial
from typing import Any

import pytest
from live_proxy import CHAT, COMPLETIONS, LiveProxy, exchange, live_proxy, raw_post, until
from scripted_engine import Call, ScriptedEngine, chunk, scripted_engine, token

from proxy.core.limits import EngineLimits
from proxy.telemetry.logs import is_our_fault

STREAMED = b'{"model": "m", "prompt": "hello", "stream": true}'

NO_REQUESTS = (
    b"",
    b"{bad",
    b"[]",
    b'"x"',
    b"null",
    b"17",
    b"\xff\xfe",
    b'{"model": "m"',
    b'{"model": "m"} trailing',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"model": "m", "prompt": ' + b"[" * 100_000,
    b'{"model": "m", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": 3}',
    b'{"model": "m", "stream": "yes"}',
    b'{"model": "m", "max_tokens": "many"}',
    b'{"model": "m", "max_tokens": 1.5}',
    b'{"model": "m", "max_tokens": 1e400}',
    b'{"model": "m", "max_tokens": 1' + b"0" * 10_000 + b"}",
)


def error_of(body: bytes) -> Any:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def hold(call: Call) -> None:
    await call.begin()
    await call.write(token())
    await call.gone.wait()


async def test_bodies_that_are_no_requests() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        for body in NO_REQUESTS:
            for path in (COMPLETIONS, CHAT):
                async with proxy.post(path, body) as response:
                    assert response.status == 400, body[:40]
                    assert response.headers["Content-Type"] == "application/json"
                    error = error_of(await response.read())
                    assert error["type"] == "invalid_request_error"
                    assert 5 < len(error["message"]) < 300
        assert engine.calls == []
        assert proxy.outcomes() == {"rejected": 2 * len(NO_REQUESTS)}
        assert proxy.reasons() == {"bad_request": 2 * len(NO_REQUESTS)}


async def test_a_body_that_is_not_what_its_encoding_says(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        answer = await exchange(proxy, raw_post(b"garbage", "Content-Encoding: gzip"))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert error_of(answer.partition(b"\r\n\r\n")[2])["type"] == "invalid_request_error"
        assert engine.calls == []
        assert proxy.reasons() == {"bad_request": 1}
        await exchange(proxy, raw_post(b"garbage", "Content-Encoding: gzip", path="/v1/embeddings"))
        assert engine.calls[0].body == b"garbage", "what is not scheduled is the engine's affair"
    assert not [record for record in caplog.records if is_our_fault(record)]


async def test_a_compressed_body_that_cannot_be_looked_into() -> None:
    async with scripted_engine() as engine, live_proxy(engine, max_body_bytes=100_000) as proxy:
        answer = await exchange(proxy, raw_post(b"x", "Content-Encoding: zstd"))
        assert answer.startswith(b"HTTP/1.1 415 ")
        assert error_of(answer.partition(b"\r\n\r\n")[2])["code"] == "unsupported_content_encoding"
        bomb = gzip.compress(b'{"model": "' + b"m" * 1_000_000)
        answer = await exchange(proxy, raw_post(bomb, "Content-Encoding: gzip"))
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert engine.calls == []


async def test_the_field_at_fault_is_named() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        for body, param in ((b'{"model": 3}', "model"), (b'{"max_tokens": "x"}', "max_tokens"), (b"{}]", None)):
            assert error_of((await proxy.fetch(body=body))[1])["param"] == param


@pytest.mark.parametrize("name", ["nobody", "", "m ", "M", "x" * 100_000, "\\ud800", "\\u0000", "ünï"])
async def test_unknown_models(name: str) -> None:
    async with scripted_engine(None, "m", "n") as engine, live_proxy(engine) as proxy:
        status, answer = await proxy.fetch(body=b'{"model": "%b", "prompt": "x"}' % name.encode())
        if not name:
            assert status == 200, "no name at all: the engine decides"
            return
        assert status == 404
        error = error_of(answer)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert len(error["message"]) < 300
        assert engine.calls == []
        assert proxy.reasons() == {"unknown_model": 1}


async def test_each_model_goes_to_an_engine_that_serves_it() -> None:
    async with (
        scripted_engine(None, "a", "both") as one,
        scripted_engine(None, "b", "both") as two,
        live_proxy(one, two) as proxy,
    ):
        for model in "abab":
            await proxy.fetch(body=json.dumps({"model": model, "prompt": "x"}).encode())
        assert [call.json()["model"] for call in one.calls] == ["a", "a"]
        assert [call.json()["model"] for call in two.calls] == ["b", "b"]
        await proxy.fetch(body=b'{"model": "both", "prompt": "x"}')
        assert len(one.calls) + len(two.calls) == 5


async def test_a_model_whose_engine_is_down_exists_all_the_same() -> None:
    async with (
        scripted_engine(None, "a") as one,
        scripted_engine(None, "b") as two,
        live_proxy(one, two, probe_interval_seconds=0.02) as proxy,
    ):
        await one.stop()
        await until(lambda: not proxy.scheduler.engines[0].up)
        assert (await proxy.fetch(body=b'{"model": "a", "prompt": "x"}'))[0] == 503
        assert (await proxy.fetch(body=b'{"model": "b", "prompt": "x"}'))[0] == 200


class TestSize:
    async def test_three_megabytes_are_accepted(self) -> None:
        body = b'{"model": "m", "prompt": "' + b"x" * 3_000_000 + b'"}'
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            assert (await exchange(proxy, raw_post(body))).startswith(b"HTTP/1.1 200 OK\r\n")
            assert engine.calls[0].body == body

    @pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
    @pytest.mark.parametrize("chunked", [False, True])
    async def test_more_than_the_limit_is_too_much(self, path: str, chunked: bool) -> None:
        limit = 100_000
        async with scripted_engine() as engine, live_proxy(engine, max_body_bytes=limit) as proxy:
            fits = b'{"model": "m", "prompt": "' + b"x" * (limit - 28) + b'"}'
            assert len(fits) == limit
            assert (await proxy.fetch(path, fits))[0] == 200
            body = fits + b" "
            request = raw_post(body, path=path)
            if chunked:
                request = raw_post(b"", "Transfer-Encoding: chunked", path=path).replace(b"Content-Length: 0\r\n", b"")
                request += b"".join(chunk(body[n : n + 9000]) for n in range(0, len(body), 9000)) + b"0\r\n\r\n"
            answer = await exchange(proxy, request)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert error_of(answer.partition(b"\r\n\r\n")[2])["code"] == "request_too_large"
            assert len(engine.calls) == 1
            if path == COMPLETIONS:
                assert proxy.outcomes() == {"completed": 1, "rejected": 1}
                assert proxy.reasons() == {"body_too_large": 1}


class TestHeaders:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("x-slo-class", "platinum"),
            ("x-slo-class", ""),
            ("x-slo-tbt-ms", "soon"),
            ("x-slo-tbt-ms", "-1"),
            ("x-slo-ttft-ms", "0"),
            ("x-slo-ttft-ms", "nan"),
            ("x-slo-tpot-ms", "inf"),
        ],
    )
    async def test_deadlines_that_make_no_sense(self, name: str, value: str) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            status, body = await proxy.fetch(headers={name: value})
            assert status == 400
            assert error_of(body)["param"] == name
            assert engine.calls == []
            assert proxy.outcomes() == {"rejected": 1}

    async def test_a_class_is_the_label_of_its_requests(self) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            for name in ("strict", "relaxed", "strict"):
                await proxy.fetch(headers={"x-slo-class": name, "x-slo-tbt-ms": "123"})
            found = proxy.samples("slai_requests_total")
            assert found["strict", "completed"] == 2
            assert found["relaxed", "completed"] == 1


class TestQueue:
    async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(self) -> None:
        async with (
            scripted_engine(hold) as engine,
            live_proxy(engine, max_num_seqs=1, max_queue_requests=2) as proxy,
            asyncio.TaskGroup() as group,
        ):
            clients = [group.create_task(_until_cancelled(proxy)) for _ in range(3)]
            await until(lambda: proxy.scheduler.waiting == 2)
            async with proxy.post() as response:
                assert response.status == 429
                assert 1 <= int(response.headers["Retry-After"]) <= 60
                error = error_of(await response.read())
            assert (error["type"], error["code"]) == ("rate_limit_error", "slow_down")
            assert proxy.reasons() == {"queue_full": 1}
            for client in clients:
                client.cancel()

    async def test_a_full_queue_is_no_obstacle_to_who_need_not_wait(self) -> None:
        async with scripted_engine() as engine, live_proxy(engine, max_queue_requests=0, max_queue_bytes=0) as proxy:
            assert (await proxy.fetch())[0] == 200

    async def test_bytes_in_the_queue_are_limited_too(self) -> None:
        async with (
            scripted_engine(hold) as engine,
            live_proxy(engine, max_num_seqs=1, max_queue_bytes=2 * len(STREAMED)) as proxy,
            asyncio.TaskGroup() as group,
        ):
            clients = [group.create_task(_until_cancelled(proxy)) for _ in range(3)]
            await until(lambda: proxy.scheduler.waiting == 2)
            assert (await proxy.fetch())[0] == 429
            for client in clients:
                client.cancel()

    async def test_who_has_waited_too_long_is_refused(self) -> None:
        async with (
            scripted_engine(hold) as engine,
            live_proxy(engine, max_num_seqs=1, queue_timeout_seconds=0.2) as proxy,
            asyncio.TaskGroup() as group,
        ):
            client = group.create_task(_until_cancelled(proxy))
            await until(lambda: engine.calls)
            begun = asyncio.get_running_loop().time()
            status, body = await proxy.fetch()
            assert status == 429
            assert error_of(body)["code"] == "slow_down"
            assert asyncio.get_running_loop().time() - begun >= 0.199
            assert proxy.scheduler.waiting == 0
            assert proxy.reasons() == {"queue_timeout": 1}
            client.cancel()

    async def test_no_engine_at_all(self) -> None:
        async with scripted_engine() as engine:
            await engine.stop()
            async with live_proxy(engine) as proxy, proxy.post() as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert response.headers["x-should-retry"] == "true"
                assert error_of(await response.read())["code"] == "no_engines"

    async def test_short_prompts_go_first(self) -> None:
        release = asyncio.Event()

        async def script(call: Call) -> None:
            await release.wait()
            await call.answer(b"{}")

        bodies = [json.dumps({"model": "m", "prompt": "x" * size}).encode() for size in (10, 4000, 40, 400)]
        async with (
            scripted_engine(script) as engine,
            live_proxy(engine, max_num_seqs=1) as proxy,
            asyncio.TaskGroup() as group,
        ):
            for number, body in enumerate(bodies):
                group.create_task(proxy.fetch(body=body))
                await until(partial(_arrived, proxy, engine, number + 1))
            release.set()
        assert [len(call.body) for call in engine.calls] == [len(bodies[n]) for n in (0, 2, 3, 1)]


def _arrived(proxy: LiveProxy, engine: ScriptedEngine, requests: int) -> bool:
    return proxy.scheduler.waiting + len(engine.calls) == requests


async def _until_cancelled(proxy: LiveProxy) -> None:
    async with proxy.post() as response:
        await response.read()


async def test_the_size_of_the_kv_cache_that_an_engine_reports_limits_it() -> None:
    async with scripted_engine(hold) as engine:
        engine.metrics = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="40"} 1.0\n'
        async with live_proxy(engine, kv_watermark=0.0) as proxy, asyncio.TaskGroup() as group:
            assert proxy.scheduler.engines[0].limits == EngineLimits(2048, 256, 640)
            body = b'{"model": "m", "stream": true, "prompt": "' + b"x" * 1600 + b'"}'  # 400 tokens
            clients = [group.create_task(proxy.fetch(body=body)) for _ in range(2)]
            await until(lambda: proxy.scheduler.waiting == 1 and engine.calls)
            assert len(engine.calls) == 1
            for client in clients:
                client.cancel()
