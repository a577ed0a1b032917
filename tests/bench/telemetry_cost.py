"""What telemetry costs the proxy, in its processor's time per token and per request.

    PYTHONPATH=tests:tests/support python -m bench.telemetry_cost [--rounds 5] [--streams 32] [--tokens 200]

Proxies that differ in nothing but what they tell stand side by side in front of one engine, which writes one token at
a time; rounds of load go to them in turn, and the ratios are taken within each round, so that whatever else the
machine does is in both. Processor time is that of the whole process, the threads that export included.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}", "x-slo-class": "strict"}
TOKEN = b'data: {"id":"c","object":"text_completion","model":"m","choices":[{"index":0,"text":" a"}]}\n\n'
LAST = b'data: {"id":"c","model":"m","choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
INTERVAL_SECONDS = 15.0
"""Between two scrapes, as Prometheus is often set, and between two times that metrics are sent."""
FLUSH_SECONDS = 1.0
"""After which spans are sent, instead of 5, so that a load is paid for when it ends."""
SHORT_ROUNDS, LONG_ROUNDS = 20, 4
OPENMETRICS = {"Accept": "application/openmetrics-text"}


@dataclass(frozen=True)
class Variant:
    """A proxy: how it is told from the others, and its flags."""

    name: str
    otel: bool
    debug: bool
    scraped: bool


VARIANTS = (
    Variant("everything", otel=True, debug=True, scraped=True),
    Variant("OpenTelemetry off", otel=False, debug=True, scraped=True),
    Variant("no scrapes, no debug port", otel=False, debug=False, scraped=False),
)


@dataclass
class Running:
    """A proxy that runs."""

    variant: Variant
    pid: int
    url: str
    costs: list[tuple[float, float]] = field(default_factory=list)
    """Microseconds for a token, and for a whole request beside its tokens; by rounds."""

    def cpu_seconds(self) -> float:
        """By nanoseconds of all threads; the clock of ``stat`` ticks a hundred times a second only."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text(encoding="ascii").split()[0]) for thread in threads) / 1e9


class Engine:
    """Answers every request with as many tokens as it asks for, one every ``seconds``, each by itself."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.healthy)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/{signal:traces|metrics}", self.take)
        return app

    async def healthy(self, _: web.Request) -> web.Response:
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 8192}]})

    async def take(self, request: web.Request) -> web.Response:
        """Be the collector, too."""
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        tokens = int((await request.json())["max_tokens"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(tokens):
            await response.write(TOKEN)
            await asyncio.sleep(self._seconds)
        await response.write(LAST)
        await response.write_eof()
        return response


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[str]:
    runner = web.AppRunner(engine.app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def proxy(variant: Variant, engine: str, config: Path) -> AsyncIterator[Running]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    if variant.otel:
        environment |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": engine,
            "OTEL_METRIC_EXPORT_INTERVAL": f"{INTERVAL_SECONDS * 1e3:.0f}",
            "OTEL_BSP_SCHEDULE_DELAY": f"{FLUSH_SECONDS * 1e3:.0f}",
        }
    flags = ["--engines", engine, "--port", "0", "--config", str(config), "--log-level", "warning"]
    flags += ["--probe-interval-seconds", "3600"]  # on a busy machine an answer may come too late
    if variant.debug:
        flags += ["--debug-port", "0"]
    command = (sys.executable, "-m", "proxy", "serve", *flags)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environment)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            greeting = (await process.stderr.readuntil(b"and schedules")).decode()
        url = greeting.split("listens on ")[1].split()[0]
        running = asyncio.ensure_future(process.stderr.read())  # or it would wait for somebody to read it
        yield Running(variant, process.pid, url)
        running.cancel()
    finally:
        process.terminate()
        await process.wait()


async def load(client: aiohttp.ClientSession, url: str, streams: int, tokens: int, rounds: int) -> None:
    """``streams`` at a time, each ``rounds`` requests one after the other."""
    body: dict[str, Any] = {"model": "m", "prompt": "Hello there", "stream": True, "max_tokens": tokens}

    async def one() -> None:
        for _ in range(rounds):
            async with client.post(f"{url}/v1/completions", json=body, headers=HEADERS) as answer:
                assert answer.status == 200, await answer.text()
                async for _ in answer.content.iter_any():
                    pass

    await asyncio.gather(*(one() for _ in range(streams)))


async def scrape(client: aiohttp.ClientSession, url: str) -> None:
    while True:
        async with client.get(f"{url}/metrics", headers=OPENMETRICS) as answer:
            await answer.read()
        await asyncio.sleep(INTERVAL_SECONDS)


async def spent(client: aiohttp.ClientSession, on: Running, streams: int, tokens: int, rounds: int) -> float:
    """Processor seconds for one load."""
    began = on.cpu_seconds()
    scraping = asyncio.ensure_future(scrape(client, on.url)) if on.variant.scraped else None
    await load(client, on.url, streams, tokens, rounds)
    if scraping is not None:
        scraping.cancel()
    if on.variant.otel:
        await asyncio.sleep(FLUSH_SECONDS + 0.5)
    return on.cpu_seconds() - began


async def measure(client: aiohttp.ClientSession, on: Running, streams: int, tokens: int) -> tuple[float, float]:
    """Microseconds for a token and for a request, from long streams and from short ones."""
    long = await spent(client, on, streams, tokens, LONG_ROUNDS) / (streams * LONG_ROUNDS)
    short = await spent(client, on, streams, 2, SHORT_ROUNDS) / (streams * SHORT_ROUNDS)
    token = (long - short) / (tokens - 2)
    return token * 1e6, (short - 2 * token) * 1e6


def tell(proxies: list[Running], tokens: int) -> None:
    """Print the table."""
    print(f"{'':28}{'us per token':>22}{'us per request':>24}{f'us per token of {tokens}, all in':>30}")
    for on in proxies:
        per_token, per_request = zip(*on.costs, strict=True)
        whole = [token + request / tokens for token, request in on.costs]
        cells = (f"{statistics.median(c):7.1f} ({min(c):.1f}..{max(c):.1f})" for c in (per_token, per_request, whole))
        print(f"{on.variant.name:28}" + "".join(f"{cell:>24}" for cell in cells))
    first, second = proxies[0].costs, proxies[1].costs
    ratios = [(a + b / tokens) / (c + d / tokens) for (a, b), (c, d) in zip(first, second, strict=True)]
    rounded = " ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"everything / OpenTelemetry off, by rounds: {rounded}; median {statistics.median(ratios):.3f}")


async def main(config: Path, rounds: int, streams: int, tokens: int, seconds: float) -> None:
    """Measure, and print a table."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(Engine(seconds)))
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        proxies = [await stack.enter_async_context(proxy(variant, engine, config)) for variant in VARIANTS]
        for on in proxies:
            await load(client, on.url, streams, tokens, 1)  # warms up
        for number in range(rounds):
            order = proxies if number % 2 == 0 else proxies[::-1]
            for on in order:
                on.costs.append(await measure(client, on, streams, tokens))
        tell(proxies, tokens)
    pace = f"{streams} streams, a token of each every {seconds * 1e3:g} ms"
    print(f"{rounds} rounds in turn, {pace}; load of the machine {os.getloadavg()[0]:.1f}")


def run() -> None:
    """Read the flags, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="of a long stream")
    parser.add_argument("--seconds", type=float, default=0.02, help="between two tokens of a stream")
    given = parser.parse_args()
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "slai.yml")
        config.write_text(f"tenants: {{acme: {{key_sha256: [{digest}]}}}}\n", encoding="utf-8")
        asyncio.run(main(config, given.rounds, given.streams, given.tokens, given.seconds))


if __name__ == "__main__":
    run()
