"""Engines that run our plugin: how the proxy learns of it, what it then sends, and where it shows that."""

import gzip
import json
from typing import Any

import pytest
from live_proxy import LiveProxy, live_proxy, until
from scripted_engine import ScriptedEngine, scripted_engine
from test_debug import debugged

from proxy.core.plugin import PluginPolicy
from proxy.server.app import PROXY
from proxy.server.live import view

CACHE = b'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="1000"} 1.0\n'
BODIES = {
    "/v1/completions": b'{"model": "m",  "prompt": "hello", "stream": true}',
    "/v1/chat/completions": b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}',
    "/v1/responses": b'{"model": "m", "input": "hello"}',
    "/v1/messages": b'{"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}',
}


def info(policy: str, value: str = "1.0", engine: int = 0) -> bytes:
    return f'slai_plugin_info{{engine="{engine}",policy="{policy}"}} {value}\n'.encode()


async def sent(proxy: LiveProxy, engine: ScriptedEngine, path: str, body: bytes, **headers: str) -> bytes:
    """What the engine gets of a body."""
    engine.calls.clear()
    await proxy.fetch(path, body, headers={name.replace("_", "-"): value for name, value in headers.items()})
    (call,) = engine.calls
    assert call.header("content-length") == [str(len(call.body))]
    return call.body


@pytest.mark.parametrize("path", list(BODIES))
async def test_each_request_takes_the_deadline_of_its_class_there(path: str) -> None:
    async with scripted_engine() as engine:
        engine.metrics = CACHE + info("deadline")
        async with live_proxy(engine) as proxy:
            for name, milliseconds in (("strict", 100), ("relaxed", 500)):
                body = await sent(proxy, engine, path, BODIES[path], x_slo_class=name)
                told = b'"vllm_xargs":{"slai_tbt_ms":%d},' % milliseconds
                assert body == b"{" + told + BODIES[path][1:]


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize(
    "metrics", [b"", CACHE, CACHE + info("rad"), CACHE + info("newer"), CACHE + info("slai", "0.0")]
)
async def test_any_other_engine_gets_the_bytes_that_came(path: str, metrics: bytes) -> None:
    async with scripted_engine() as engine:
        engine.metrics = metrics
        async with live_proxy(engine) as proxy:
            assert await sent(proxy, engine, path, BODIES[path], x_slo_class="strict") == BODIES[path]


async def test_a_client_may_tell_its_own_or_send_what_is_not_looked_into() -> None:
    async with scripted_engine() as engine:
        engine.metrics = info("slai")
        async with live_proxy(engine) as proxy:
            own = b'{"model": "m", "prompt": "x", "vllm_xargs": {"slai_tbt_ms": 50}}'
            assert await sent(proxy, engine, "/v1/completions", own) == own
            packed = gzip.compress(BODIES["/v1/completions"])
            assert await sent(proxy, engine, "/v1/completions", packed, content_encoding="gzip") == packed


async def test_nothing_is_told_where_nothing_is_promised() -> None:
    async with scripted_engine() as engine:
        engine.metrics = info("deadline")
        async with live_proxy(engine, classes={"any": {}}, default_class="any") as proxy:
            body = BODIES["/v1/completions"]
            assert await sent(proxy, engine, "/v1/completions", body) == body


async def test_past_the_queue_nothing_is_added() -> None:
    async with scripted_engine() as engine:
        engine.metrics = info("deadline")
        async with live_proxy(engine) as proxy:
            body = b'{"model": "m", "input": "hello"}'
            assert await sent(proxy, engine, "/v1/embeddings", body) == body


async def test_a_request_that_goes_on_to_another_engine_is_told_what_that_one_is() -> None:
    async def full(call: Any) -> None:
        await call.answer(b"{}", status="503 Service Unavailable")

    async with scripted_engine(full) as plugged, scripted_engine() as stock:
        plugged.metrics = info("deadline")
        async with live_proxy(plugged, stock) as proxy:
            body = BODIES["/v1/completions"]
            assert (await proxy.fetch(body=body))[0] == 200
            assert b"slai_tbt_ms" in plugged.calls[0].body
            assert stock.calls[0].body == body


async def test_it_is_shown_and_forgotten_when_the_engine_says_so() -> None:
    async with scripted_engine() as engine:
        engine.metrics = CACHE + info("deadline")
        async with (
            live_proxy(engine, debug_port=0, probe_interval_seconds=0.02) as proxy,
            debugged(proxy) as client,
        ):
            assert proxy.samples("slai_engine_plugin") == {(engine.url, "deadline"): 1}
            async with client.get("/debug/state") as response:
                assert (await response.json())["engines"][0]["plugin"] == "deadline"
            app = proxy.app[PROXY]
            assert app.chronicle is not None
            assert json.loads(json.dumps(view(app, app.chronicle, 1.0)))["engines"][0]["plugin"] == "deadline"
            engine.metrics = CACHE + info("deadline", "0.0")
            await until(lambda: proxy.scheduler.engines[0].plugin is None)
            assert proxy.samples("slai_engine_plugin") == {}
            engine.metrics = CACHE + info("slai")
            await until(lambda: proxy.scheduler.engines[0].plugin is PluginPolicy.SLAI)


async def test_an_engine_whose_metrics_fail_once_is_taken_for_what_it_was() -> None:
    async with scripted_engine() as engine:
        engine.metrics = CACHE + info("deadline")
        async with live_proxy(engine, probe_interval_seconds=0.02) as proxy:

            async def fails(call: Any) -> None:
                await call.answer(b"", status="500 Internal Server Error")

            engine.routes["GET /metrics"] = fails
            before = engine.probes["GET /metrics"]
            await until(lambda: engine.probes["GET /metrics"] > before + 2)
            assert proxy.scheduler.engines[0].plugin is PluginPolicy.DEADLINE
