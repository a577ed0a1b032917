"""The live page in a real Chromium: what people see of a proxy that works, has nothing to do, or is gone."""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from live_proxy import LiveProxy, live_proxy, until
from scripted_engine import scripted_engine
from test_debug import Held

from proxy.entries import ClassSettings
from proxy.server.app import PROXY
from proxy.server.debug import HOST, create_debug_app
from proxy.server.files import DebugKey
from proxy.server.live import PAGE_PATH

api = pytest.importorskip("playwright.async_api", reason="no Playwright here")
axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="no axe-core here")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)"),
]

BODY = b'{"model": "m", "prompt": "secret canary", "stream": true, "max_tokens": 9}'
LONG = "a-class-whose-name-is-rather-long"
CLASSES = {"strict": ClassSettings(tbt_seconds=0.1, ttft_seconds=1.0), LONG: ClassSettings(tbt_seconds=0.5)}
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
Page = Any


class DebugPort:
    """The debug port of a proxy, which can go away and come back."""

    def __init__(self, proxy: LiveProxy) -> None:
        self._proxy = proxy
        self._port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    async def open(self) -> None:
        self._runner = web.AppRunner(create_debug_app(self._proxy.app[PROXY]), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Any]:
    async with api.async_playwright() as playwright:
        made = await playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
        )
        yield made
        await made.close()


@asynccontextmanager
async def watched(
    browser: Any, proxy: LiveProxy, *, viewport: dict[str, int] = DESKTOP, **context: Any
) -> AsyncIterator[tuple[Page, DebugPort]]:
    """The page of a proxy. It asks nobody else, and nothing goes wrong in it."""
    port = DebugPort(proxy)
    await port.open()
    within = await browser.new_context(viewport=viewport, **context)
    try:
        page = await within.new_page()
        asked: list[str] = []
        wrong: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        await page.goto(port.url + PAGE_PATH)
        yield page, port
        assert not wrong
        assert asked
        assert not [url for url in asked if not url.startswith(port.url)]
    finally:
        await within.close()
        await port.close()


@asynccontextmanager
async def busy(requests: int = 30, **settings: Any) -> AsyncIterator[tuple[LiveProxy, Held]]:
    """A proxy with two streams, one in each class, whose other requests wait."""
    script = Held()
    async with (
        scripted_engine(script) as engine,
        live_proxy(
            engine,
            debug_port=0,
            max_num_seqs=2,
            classes=CLASSES,
            default_class=LONG,
            **settings,
        ) as proxy,
    ):
        headers = [{"x-slo-class": name} for name in CLASSES]
        tasks = [asyncio.ensure_future(proxy.fetch(body=BODY, headers=headers[n % 2])) for n in range(requests)]
        await until(
            lambda: proxy.scheduler.waiting == requests - 2 and sum(e.decodes for e in proxy.scheduler.engines) == 2
        )
        try:
            yield proxy, script
        finally:
            script.go.set()
            await asyncio.gather(*tasks)


async def cells(page: Page, region: str) -> list[list[str]]:
    """The rows of a table, without its head."""
    found: list[list[str]] = await page.locator(f"#{region} tbody").evaluate(
        "body => [...body.rows].map(row => [...row.cells].map(cell => cell.innerText))"
    )
    return found


async def becomes(page: Page, expression: str) -> None:
    """Wait until something holds in the page; Playwright's own way would need eval, which the page does not allow."""
    async with asyncio.timeout(10):
        while not await page.evaluate(expression):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.1)


async def violations(page: Page) -> list[str]:
    """What axe-core finds against the page."""
    found = await axe.Axe().run(page)
    return [f"{v['id']}: {[node['html'] for node in v['nodes']]}" for v in found.response["violations"]]


async def test_with_nothing_to_do_it_says_so(browser: Any) -> None:
    async with (
        scripted_engine() as engine,
        live_proxy(engine, debug_port=0) as proxy,
        watched(browser, proxy) as (page, _),
    ):
        await api.expect(page.locator("#state")).to_have_text("ready")
        for region, told in (
            ("queue", "Nobody waits."),
            ("streams", "Nothing runs."),
            ("troubled", "Every deadline was kept, and nobody was refused."),
        ):
            await api.expect(page.locator(f"#{region}")).to_have_text(told)
        await api.expect(page.locator("#gone")).to_be_hidden()
        assert len(await cells(page, "engines")) == 1


async def test_without_engines_it_says_that_too(browser: Any) -> None:
    async with live_proxy("http://127.0.0.1:9", debug_port=0) as proxy, watched(browser, proxy) as (page, _):
        await api.expect(page.locator("#state")).to_have_text("not ready")
        await api.expect(page.locator("#cards")).to_contain_text("0 of 1")
        assert (await proxy.fetch(body=BODY))[0] == 503
        await api.expect(page.locator("#troubled")).to_contain_text("no engine")


async def test_it_shows_what_waits_and_runs_and_follows(browser: Any) -> None:
    async with busy() as (proxy, script), watched(browser, proxy) as (page, _):
        await api.expect(page.locator("#waiting")).to_contain_text("28")
        by_class = {row[0]: row for row in await cells(page, "classes")}
        assert by_class["strict"][1] == by_class[LONG][1] == "14"
        assert len(await cells(page, "queue")) == 28
        assert {row[1] for row in await cells(page, "streams")} == {"strict", LONG}
        waited = await page.locator("#queue tbody tr").first.locator("td").nth(2).inner_text()
        await api.expect(page.locator("#queue tbody tr").first.locator("td").nth(2)).not_to_have_text(waited)
        assert "canary" not in await page.content()
        script.go.set()
        await api.expect(page.locator("#queue")).to_have_text("Nobody waits.")
        await api.expect(page.locator("#troubled tbody tr").first).to_contain_text("TTFT")


async def test_a_request_leads_to_its_life(browser: Any) -> None:
    async with busy(3) as (proxy, _), watched(browser, proxy) as (page, _):
        await page.locator("#queue a").first.click()
        await api.expect(page.locator("body")).to_contain_text('"stage": "waiting"')


async def test_when_the_proxy_is_gone_it_says_so_and_comes_back_by_itself(browser: Any) -> None:
    async with busy(5) as (proxy, _), watched(browser, proxy) as (page, port):
        await api.expect(page.locator("#state")).to_have_text("ready")
        await port.close()
        await api.expect(page.get_by_role("alert")).to_contain_text("does not answer")
        await api.expect(page.locator("#state")).to_have_text("no connection")
        assert len(await cells(page, "queue")) == 3, "what was known last is still there"
        await port.open()
        await api.expect(page.locator("#gone")).to_be_hidden()
        await api.expect(page.locator("#state")).to_have_text("ready")


async def test_a_proxy_that_has_gone_silent_is_noticed(browser: Any) -> None:
    async with scripted_engine() as engine, live_proxy(engine, debug_port=0) as proxy:
        port = DebugPort(proxy)
        await port.open()
        within = await browser.new_context()
        page = await within.new_page()
        await page.clock.install()
        await page.goto(port.url + PAGE_PATH)
        await api.expect(page.locator("#state")).to_have_text("ready")
        await page.route("**/debug/events", lambda _: None)  # what comes next never answers
        await port.close()
        await port.open()
        await page.clock.run_for(8000)
        await api.expect(page.get_by_role("alert")).to_contain_text("does not answer")
        await within.close()
        await port.close()


async def test_it_opens_with_the_key_of_the_debug_port_by_the_keyboard_alone(browser: Any) -> None:
    async with scripted_engine() as engine, live_proxy(engine, debug_port=0) as proxy:
        proxy.app[PROXY].debug_key = DebugKey(hashlib.sha256(b"right").digest())
        async with watched(browser, proxy) as (page, _):
            await api.expect(page.locator("#key")).to_be_focused()
            assert not await violations(page)
            await page.keyboard.type("wrong")
            await page.keyboard.press("Enter")
            await api.expect(page.locator("#state")).to_have_text("that is not the key")
            await page.locator("#key").fill("right")
            await page.keyboard.press("Enter")
            await api.expect(page.locator("#state")).to_have_text("ready")
            await api.expect(page.locator("#unlock")).to_be_hidden()


async def test_the_keyboard_reaches_everything_and_what_has_the_focus_keeps_it(browser: Any) -> None:
    async with busy(60) as (proxy, _), watched(browser, proxy) as (page, _):
        await api.expect(page.locator("#queue tbody tr")).to_have_count(40)
        await page.keyboard.press("Tab")
        await api.expect(page.locator("#pause")).to_be_focused()
        for region in ("classes", "engines", "queue"):
            await page.keyboard.press("Tab")
            await api.expect(page.locator(f"#{region}")).to_be_focused()
        assert await page.locator("#queue").evaluate("box => box.scrollHeight > box.clientHeight")
        await page.keyboard.press("End")
        await becomes(page, "document.getElementById('queue').scrollTop > 0")
        await page.keyboard.press("Tab")
        link, cell = page.locator("#queue a").first, page.locator("#queue tbody tr").first.locator("td").nth(2)
        await api.expect(link).to_be_focused()
        before = await cell.inner_text()
        await api.expect(cell).not_to_have_text(before)  # it has been updated meanwhile
        await api.expect(link).to_be_focused()


async def test_it_can_be_held_still(browser: Any) -> None:
    async with busy(5) as (proxy, _), watched(browser, proxy) as (page, _):
        cell = page.locator("#queue tbody tr").first.locator("td").nth(2)
        await api.expect(cell).to_contain_text("s")
        pause = page.get_by_role("button", name="Pause")
        await pause.press("Space")
        await api.expect(pause).to_have_attribute("aria-pressed", "true")
        before = await cell.inner_text()
        await becomes(page, f"past.length > {await page.evaluate('past.length')} + 1")  # the proxy goes on
        assert await cell.inner_text() == before
        await pause.press("Space")
        await api.expect(cell).not_to_have_text(before)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
async def test_axe_finds_nothing(browser: Any, scheme: str, viewport: dict[str, int]) -> None:
    async with (
        busy(tiles=True) as (proxy, script),
        watched(browser, proxy, viewport=viewport, color_scheme=scheme) as (page, port),
    ):
        await api.expect(page.locator("#streams tbody tr")).to_have_count(2)
        assert not await violations(page)
        script.go.set()
        await api.expect(page.locator("#troubled tbody tr").first).to_be_visible()
        assert not await violations(page)
        await port.close()
        await api.expect(page.get_by_role("alert")).to_be_visible()
        assert not await violations(page)


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
async def test_nothing_has_to_be_scrolled_sideways(browser: Any, width: int) -> None:
    wider = "box => box.scrollWidth > box.clientWidth"
    async with (
        busy(tiles=True) as (proxy, script),
        watched(browser, proxy, viewport={"width": width, "height": 800}) as (page, _),
    ):
        await api.expect(page.locator("#streams tbody tr")).to_have_count(2)
        script.go.set()
        await api.expect(page.locator("#troubled tbody tr").first).to_be_visible()
        assert not await page.locator("html").evaluate(wider)
        regions = await page.locator(".scroll").all()
        assert len(regions) == 5
        assert not [await r.get_attribute("id") for r in regions if await r.evaluate(wider)]


async def test_it_is_one_file_and_small() -> None:
    page = Path(__file__).parents[2] / "proxy/server/live.html"
    assert page.stat().st_size < 32 << 10
