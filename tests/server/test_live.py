"""The live page: what it shows, to whom, and that it stays small."""

import asyncio
import hashlib
import json
import re
from typing import Any

import aiohttp
import pytest
from live_proxy import live_proxy, until
from scripted_engine import scripted_engine
from test_debug import Held, debugged

from proxy.server.app import PROXY
from proxy.server.files import DebugKey
from proxy.server.live import EVENTS_PATH, PAGE_PATH, view

STREAM = b'{"model": "m", "prompt": "secret canary", "stream": true, "max_tokens": 9}'


async def first_event(client: aiohttp.ClientSession) -> dict[str, Any]:
    async with client.get(EVENTS_PATH) as response:
        assert response.content_type == "text/event-stream"
        line = await response.content.readuntil(b"\n\n")
        found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
        return found


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    async with scripted_engine() as engine, live_proxy(engine, debug_port=0) as proxy, debugged(proxy) as client:
        async with client.get(PAGE_PATH) as response:
            page = await response.text()
            assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert not re.findall(r'(?:src|href)="(?!/)[^"]', page)
        assert "innerHTML" not in page, "what clients name must never become markup"


async def test_what_runs_and_what_waits_is_shown_without_a_prompt() -> None:
    script = Held()
    async with (
        scripted_engine(script) as engine,
        live_proxy(engine, debug_port=0, max_num_seqs=1) as proxy,
        debugged(proxy) as client,
    ):
        tasks = [asyncio.ensure_future(proxy.fetch(body=STREAM)) for _ in range(2)]
        await until(lambda: proxy.scheduler.waiting == 1 and engine.calls)
        await until(lambda: any(story.stage == "streaming" for story in chronicle(proxy).in_flight()))
        shown = await first_event(client)
        assert (shown["waiting"], shown["in_flight"], shown["ready"]) == (1, 1, True)
        ((running,), (waiting,)) = shown["streams"], shown["queue"]
        assert (running["class"], running["tokens"], running["engine"]) == ("relaxed", 1, engine.url)
        assert 0 < running["slack"] <= running["tbt"]
        assert waiting["waited"] > 0
        by_class = {shown["name"]: shown for shown in shown["classes"]}
        assert by_class["relaxed"]["waiting"] == 1
        assert by_class["relaxed"]["waited_longest"] >= waiting["waited"]
        assert (by_class["strict"]["waiting"], by_class["strict"]["waited_median"]) == (0, None)
        (beheld,) = shown["engines"]
        assert (beheld["condition"], beheld["requests"], beheld["slots"]) == ("healthy", 1, 1)
        assert "canary" not in json.dumps(shown)
        script.go.set()
        await asyncio.gather(*tasks)


async def test_a_refusal_is_shown_with_its_reason() -> None:
    async with live_proxy("http://127.0.0.1:9", debug_port=0) as proxy, debugged(proxy) as client:
        assert (await proxy.fetch(body=STREAM))[0] == 503
        (refused,) = (await first_event(client))["troubled"]
        assert (refused["outcome"], refused["reason"]) == ("rejected", "no_engine")


async def test_it_stays_small_however_long_the_queue_is() -> None:
    script = Held()
    async with (
        scripted_engine(script) as engine,
        live_proxy(engine, debug_port=0, max_num_seqs=1) as proxy,
    ):
        tasks = [asyncio.ensure_future(proxy.fetch(body=STREAM)) for _ in range(80)]
        await until(lambda: proxy.scheduler.waiting == 79)
        shown = view(proxy.app[PROXY], chronicle(proxy), proxy.driver.now())
        assert shown["waiting"] == 79
        assert len(shown["queue"]) == 40
        script.go.set()
        await asyncio.gather(*tasks)


async def test_who_leaves_is_not_written_to_any_more() -> None:
    async with scripted_engine() as engine, live_proxy(engine, debug_port=0) as proxy, debugged(proxy) as client:
        before = connections()
        for _ in range(3):
            await first_event(client)
        await until(lambda: connections() == before)


def connections() -> int:
    """Connections that some server here serves."""
    return sum("RequestHandler.start" in repr(task) for task in asyncio.all_tasks())


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_with_a_key_the_page_opens_and_its_data_do_not(key: str) -> None:
    async with scripted_engine() as engine, live_proxy(engine, debug_port=0) as proxy:
        proxy.app[PROXY].debug_key = DebugKey(hashlib.sha256(b"right").digest())
        async with debugged(proxy, key) as client:
            async with client.get(PAGE_PATH) as page:
                assert page.status == 200
            async with client.get(EVENTS_PATH) as events:
                assert events.status == 401


def chronicle(proxy: Any) -> Any:
    return proxy.app[PROXY].chronicle
