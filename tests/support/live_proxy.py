"""The real proxy on a port of its own, and clients to it."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine

from proxy.config import Settings
from proxy.core.scheduler import Scheduler
from proxy.server.access import Access
from proxy.server.app import PROXY, LimitsOf, create_app
from proxy.server.connections import CONNECTIONS, Connections, Site
from proxy.server.driver import Driver
from proxy.server.runner import Runner
from proxy.telemetry.tracing import Tracing
from proxy.upstream.probe import Prober

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
NO_PROBES = 600.0
"""Probe interval of tests that look at engines once, when the proxy starts."""


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait for a condition that no event tells of.

    Raises:
        TimeoutError: it does not hold within ``seconds``.
    """
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - looking again and again is what this function is for
            await asyncio.sleep(0.002)


@dataclass
class LiveProxy:
    """A proxy that serves, and a client session that adds nothing to what a test sends."""

    url: str
    app: web.Application
    client: aiohttp.ClientSession

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def driver(self) -> Driver:
        return self.app[PROXY].driver

    @property
    def scheduler(self) -> Scheduler:
        return self.driver.scheduler

    @property
    def prober(self) -> Prober:
        return self.app[PROXY].prober

    @property
    def app_access(self) -> Access:
        return self.app[PROXY].access

    @property
    def connections(self) -> Connections:
        return self.app[CONNECTIONS]

    @property
    def upstream_connections(self) -> int:
        """Connections to engines that a request holds."""
        return self.app[PROXY].client.busy

    def post(self, path: str = COMPLETIONS, body: bytes | None = None, **more: Any) -> Any:
        """Send a generation request: the bytes of ``body``, or else a small streamed one."""
        headers = {"Content-Type": "application/json"} | more.pop("headers", {})
        data = b'{"model": "m", "prompt": "hello", "stream": true}' if body is None else body
        return self.client.post(path, data=data, headers=headers, **more)

    async def fetch(self, path: str = COMPLETIONS, body: bytes | None = None, **more: Any) -> tuple[int, bytes]:
        """``post`` and read the answer whole."""
        async with self.post(path, body, **more) as response:
            return response.status, await response.read()

    def exposition(self) -> str:
        return self.app[PROXY].metrics.exposition().decode()

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Samples of a metric by the values of their labels, in the order of the labels' names."""
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.exposition())
            for sample in family.samples
            if sample.name == name
        }

    def outcomes(self) -> dict[str, int]:
        """How many requests ended in which way, of all classes; ways without any are left out."""
        found: dict[str, int] = {}
        for (_, outcome), value in self.samples("slai_requests_total").items():
            if value:
                found[outcome] = found.get(outcome, 0) + int(value)
        return found

    def reasons(self) -> dict[str, int]:
        return {reason: int(value) for (reason,), value in self.samples("slai_failures_total").items()}

    def left_over(self) -> dict[str, int]:
        """What is held for requests; empty when none is there."""
        scheduler = self.scheduler
        held = {
            "waiting": scheduler.waiting,
            "waiting bytes": scheduler.waiting_bytes,
            "waiting tokens": scheduler.waiting_tokens,
            "queues": len(scheduler._ledger.backlog._queues),
            "entries": len(scheduler._ledger.entries),
            "dispatched": scheduler.dispatched,
            "backlog": sum(e.backlog for e in scheduler.engines),
            "kv tokens": sum(e.kv_tokens for e in scheduler.engines),
            "tickets": len(self.driver._tickets),
            "upstream connections": self.upstream_connections,
        }
        return {what: count for what, count in held.items() if count}

    async def idle(self, seconds: float = 5.0) -> None:
        """Wait until nothing is held for any request."""
        try:
            await until(lambda: not self.left_over(), seconds)
        except TimeoutError:
            raise AssertionError(f"left over: {self.left_over()}") from None


@asynccontextmanager
async def live_proxy(
    *engines: ScriptedEngine | str, tracing: Tracing | None = None, limits: LimitsOf | None = None, **settings: Any
) -> AsyncIterator[LiveProxy]:
    """Serve in front of ``engines``; at the end nothing may be held for any request."""
    urls = tuple(engine if isinstance(engine, str) else engine.url for engine in engines)
    configured = Settings(engines=urls, **{"probe_interval_seconds": NO_PROBES, **settings})
    async with serving(create_app(configured, limits=limits, tracing=tracing)) as proxy:
        yield proxy


@asynccontextmanager
async def serving(app: web.Application, tls: ssl.SSLContext | None = None) -> AsyncIterator[LiveProxy]:
    """Serve an application of ``create_app``, as ``live_proxy`` does."""
    runner = Runner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await Site(runner, app[CONNECTIONS], "127.0.0.1", 0, tls=tls).start()
        url = f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(
            url,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(total=20),
        ) as client:
            proxy = LiveProxy(url, app, client)
            yield proxy
        await proxy.idle()
        await until(lambda: not proxy.connections)
    finally:
        await runner.cleanup()


async def exchange(proxy: LiveProxy, request: bytes) -> bytes:
    """Send raw bytes and read until the proxy closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.write(request)
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


def raw_post(body: bytes, *headers: str, path: str = COMPLETIONS) -> bytes:
    """A request as a client puts it on the wire, which closes the connection after its answer."""
    lines = (f"POST {path} HTTP/1.1", "Host: proxy", *headers, f"Content-Length: {len(body)}", "Connection: close")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body
