"""The debug endpoints: what they say of live requests, and who gets to see it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from live_proxy import LiveProxy, live_proxy, until
from scripted_engine import DONE, Call, ScriptedEngine, last, scripted_engine, token

from proxy.keys import KeySettings
from proxy.server.app import PROXY
from proxy.server.debug import HOST, create_debug_app


@asynccontextmanager
async def debugged(proxy: LiveProxy, key: str = "") -> AsyncIterator[aiohttp.ClientSession]:
    """The debug endpoints of ``proxy``, and a client to them."""
    parts = proxy.app[PROXY]
    assert parts.chronicle is not None
    runner = web.AppRunner(create_debug_app(parts), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession(f"http://{HOST}:{runner.addresses[0][1]}", headers=headers) as client:
            yield client
    finally:
        await runner.cleanup()


async def get(client: aiohttp.ClientSession, path: str, status: int = 200) -> Any:
    async with client.get(path) as response:
        assert response.status == status
        assert response.content_type == "application/json"
        return await response.json()


class Held:
    """A script that streams a token and then waits for ``go``."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await call.begin()
        await call.write(token())
        await self.go.wait()
        await call.write(token() + last() + DONE)
        await call.end()


@asynccontextmanager
async def two_requests() -> AsyncIterator[tuple[LiveProxy, aiohttp.ClientSession, Held, ScriptedEngine]]:
    """A proxy with one request that streams and another that waits, by the ids ``first`` and ``second``."""
    script = Held()
    async with (
        scripted_engine(script) as engine,
        live_proxy(engine, debug_port=0, max_num_seqs=1) as proxy,
        debugged(proxy) as client,
    ):
        first = asyncio.ensure_future(proxy.fetch(headers={"x-request-id": "first"}))
        await until(lambda: any(e.decodes for e in proxy.scheduler.engines))
        second = asyncio.ensure_future(proxy.fetch(headers={"x-request-id": "second"}))
        await until(lambda: proxy.scheduler.waiting)
        yield proxy, client, script, engine
        script.go.set()
        assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]


async def test_the_life_of_a_request_from_the_queue_to_its_end() -> None:
    async with two_requests() as (proxy, client, script, engine):
        told = await get(client, "/debug/requests/second")
        assert (told["request_id"], told["client_id"], told["stage"]) == ("1", "second", "waiting")
        assert told["waits"]["waits_for"] == {engine.url: ["slots: 1 requests of at most 1"]}
        assert told["waits"]["ahead"] == 0
        running = await get(client, "/debug/requests/first")
        assert (running["stage"], running["tokens"], running["engine"]) == ("streaming", 1, engine.url)
        assert "waits" not in running
        script.go.set()
        await proxy.idle()
        told = await get(client, "/debug/requests/1")
        assert (told["stage"], told["outcome"], told["tokens"]) == ("ended", "completed", 2)
        assert told["moments"][-1]["cause"] == f"the end of request 0, on {engine.url}"
        assert list(told["stage_seconds"]) == ["body", "queue", "first_token", "stream"]
        assert sum(told["stage_seconds"].values()) == pytest.approx(told["age_seconds"], abs=1e-5)
        assert told["missed"] == []
        later = await get(client, "/debug/requests/1")
        assert later["age_seconds"] == told["age_seconds"]
        assert later["ended_seconds_ago"] >= told["ended_seconds_ago"] > 0
        assert "waits" not in told


async def test_the_state() -> None:
    async with two_requests() as (_, client, _, engine):
        told = await get(client, "/debug/state")
        assert (told["waiting"], told["dispatched"], told["draining"]) == (1, 1, False)
        assert [e["id"] for e in told["engines"]] == [engine.url]
        assert told["queues"][0]["head"]["request_id"] == "1"
        assert told["config"]["max_wait_seconds"] == 60


async def test_neither_prompts_nor_keys_are_shown() -> None:
    async with scripted_engine() as engine, live_proxy(engine, debug_port=0) as proxy, debugged(proxy) as client:
        body = b'{"model": "m", "prompt": "SECRET-PROMPT", "stream": true, "user": "SECRET-USER"}'
        headers = {"Authorization": "Bearer SECRET-KEY", "x-request-id": "a"}
        assert (await proxy.fetch(body=body, headers=headers))[0] == 200
        for path in ("/debug/state", "/debug/requests/a"):
            async with client.get(path) as response:
                assert "SECRET" not in await response.text()


async def test_an_unknown_request() -> None:
    async with scripted_engine() as engine, live_proxy(engine, debug_port=0) as proxy, debugged(proxy) as client:
        assert "no such request" in (await get(client, "/debug/requests/x", 404))["error"]


@pytest.mark.parametrize("path", ["/", "/debug", "/debug/", "/debug/requests", "/debug/requests/"])
async def test_who_does_not_know_the_way_is_told(path: str) -> None:
    async with scripted_engine() as engine, live_proxy(engine, debug_port=0) as proxy, debugged(proxy) as client:
        state, requests, *_ = await get(client, path)
        assert (await get(client, state))["waiting"] == 0
        assert requests.endswith("/debug/requests/ID")
        await proxy.fetch(headers={"x-request-id": "a"})
        assert (await get(client, requests.replace("ID", "a")))["client_id"] == "a"


async def test_missed_deadlines_are_named_while_the_request_goes_on_and_later() -> None:
    classes = {"strict": {"ttft_seconds": 1e-6, "tbt_seconds": 1e-6}}
    script = Held()
    async with (
        scripted_engine(script) as engine,
        live_proxy(engine, debug_port=0, classes=classes, default_class="strict") as proxy,
        debugged(proxy) as client,
    ):
        running = asyncio.ensure_future(proxy.fetch(headers={"x-request-id": "a"}))
        await until(lambda: any(e.decodes for e in proxy.scheduler.engines))
        assert (await get(client, "/debug/requests/a"))["missed"] == ["ttft"]
        script.go.set()
        assert (await running)[0] == 200
        await proxy.idle()
        assert (await get(client, "/debug/requests/a"))["missed"] == ["ttft", "tbt"]


async def test_a_request_that_was_refused_before_it_could_wait() -> None:
    async with scripted_engine() as engine, live_proxy(engine, debug_port=0) as proxy, debugged(proxy) as client:
        assert (await proxy.fetch(body=b"no json", headers={"x-request-id": "bad"}))[0] == 400
        told = await get(client, "/debug/requests/bad")
        assert (told["stage"], told["outcome"], told["reason"]) == ("ended", "rejected", "bad_request")


async def test_clients_of_the_proxy_do_not_see_it() -> None:
    """On their port the paths are the engine's, as all others are."""
    async with scripted_engine() as engine, live_proxy(engine, debug_port=0) as proxy:
        await proxy.fetch(headers={"x-request-id": "a"})
        async with proxy.client.get("/debug/requests/a") as response:
            assert b"moments" not in await response.read()
        assert [call.target for call in engine.calls][1:] == ["/debug/requests/a"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:7", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("evil.example:127", 403),
        ("localhost.evil.example", 403),
        ("[", 403),
    ],
)
async def test_pages_of_others_cannot_read_it_through_a_browser(host: str, status: int) -> None:
    """A name of theirs that leads to this machine is still theirs."""
    async with (
        scripted_engine() as engine,
        live_proxy(engine, debug_port=0) as proxy,
        debugged(proxy) as client,
        client.get("/debug/state", headers={"Host": host}) as response,
    ):
        assert response.status == status


async def test_without_the_setting_nothing_is_kept() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        await proxy.fetch()
        assert proxy.app[PROXY].chronicle is None


@pytest.mark.parametrize(
    ("listens", "called", "status"),
    [
        ("0.0.0.0", "10.0.0.7:8009", 200),
        ("::", "[fd00::7]:8009", 200),
        ("0.0.0.0", "proxy.example:8009", 403),
        ("0.0.0.0", "", 403),
        ("localhost", "10.0.0.7", 403),
        ("127.0.0.2", "10.0.0.7", 403),
    ],
)
async def test_where_others_reach_it_an_address_is_as_good_as_a_local_name(
    listens: str, called: str, status: int
) -> None:
    async with (
        scripted_engine() as engine,
        live_proxy(engine, debug_port=0, debug_host=listens) as proxy,
        debugged(proxy) as client,
        client.get("/debug/state", headers={"Host": called}) as response,
    ):
        assert response.status == status


async def test_with_a_key_it_is_needed_and_the_name_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("the-key\n")
    async with (
        scripted_engine() as engine,
        live_proxy(engine, debug_port=0, debug_key_file=tmp_path / "key") as proxy,
        debugged(proxy) as stranger,
        debugged(proxy, "wrong") as other,
        debugged(proxy, "the-key") as operator,
    ):
        for path in ("/debug/state", "/debug/config", "/metrics", "/openapi.json", "/", "/none"):
            assert "is needed" in (await get(stranger, path, 401))["error"]
            assert "is needed" in (await get(other, path, 401))["error"]
        async with operator.get("/debug/state", headers={"Host": "proxy.example"}) as response:
            assert response.status == 200
        for path in ("/livez", "/readyz"):
            await get(stranger, path)


async def test_the_settings_in_force_are_shown_without_what_is_secret(tmp_path: Path) -> None:
    digest = "0" * 60 + "5ec7"
    settings: dict[str, Any] = {
        "keys": {"k": KeySettings(sha256=digest, tenant="acme")},
        "tenants": {"acme": {"key_sha256": ["1" * 60 + "5ec7"]}},
        "debug_port": 0,
    }
    async with scripted_engine() as engine, live_proxy(engine, **settings) as proxy, debugged(proxy) as client:
        told = await get(client, "/debug/config")
        assert "5ec7" not in str(told)
        assert told["settings"]["keys"]["k"]["tenant"] == "acme"
        assert told["settings"]["tenants"]["acme"]["key_sha256"] == 1
        assert told["settings"]["engines"] == [engine.url]
        assert told["reloads"] is None


async def test_metrics_and_readiness_are_there_too() -> None:
    async with scripted_engine() as engine, live_proxy(engine, debug_port=0) as proxy, debugged(proxy) as client:
        async with client.get("/metrics") as response:
            assert "slai_connections" in await response.text()
        assert await get(client, "/readyz") == {"ready": True, "draining": False}
        proxy.app[PROXY].start_drain()
        assert await get(client, "/readyz", 503) == {"ready": False, "draining": True}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_nothing_can_be_changed(method: str) -> None:
    async with (
        scripted_engine() as engine,
        live_proxy(engine, debug_port=0) as proxy,
        debugged(proxy) as client,
        client.request(method, "/debug/state") as response,
    ):
        assert response.status == 405
        assert response.headers["Allow"] == "GET,HEAD"
        assert (await response.json())["error"]
