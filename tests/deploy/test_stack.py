"""What `docker compose up` starts, without Docker: proxy, two engines, load, and a real Prometheus with the rules."""

import asyncio
import importlib.util
import json
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no Prometheus here (Debian: apt install prometheus)"
    ),
]

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\b(?:slai[a-z_:0-9]*|gen_ai_[a-z0-9_]+|process_[a-z_]+)\b")
RULES = ROOT / "deploy/prometheus/rules.yml"


def names(expression: str) -> set[str]:
    """The series that an expression asks for."""
    return set(NAME.findall(re.sub(r'"[^"]*"', "", expression)))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    made = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield made
    finally:
        if made.returncode is None:
            made.terminate()
            try:
                async with asyncio.timeout(10):
                    await made.wait()
            except TimeoutError:
                made.kill()
                await made.wait()


async def answers(client: aiohttp.ClientSession, url: str, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while True:
            try:
                async with client.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


class Stack:
    def __init__(self, client: aiohttp.ClientSession, proxy: str, prometheus: str, *, fleet: bool) -> None:
        self.client, self.proxy, self.prometheus, self.fleet = client, proxy, prometheus, fleet

    def has(self, name: str) -> bool:
        """Whether there can be such a series: without a store there is no fleet."""
        return self.fleet or not name.startswith("slai_fleet_")

    async def ask(self, path: str, **parameters: str) -> Any:
        async with self.client.get(f"{self.prometheus}/api/v1/{path}", params=parameters) as response:
            found = await response.json()
            assert found["status"] == "success", found
            return found["data"]

    async def series(self, expression: str) -> list[Any]:
        data = await self.ask("query", query=expression.replace("$__rate_interval", "20s"))
        return list(data["result"])

    async def rules_are_evaluated(self) -> bool:
        groups = (await self.ask("rules"))["groups"]
        return all(rule["health"] == "ok" for group in groups for rule in group["rules"])

    async def load(self) -> None:
        """Until it is cancelled: streams of both classes, of a tenant and of nobody, with long prompts and short ones.

        Some have deadlines that nothing keeps, and some cannot be served.
        """

        async def requests(number: int) -> None:
            headers = {"x-slai-tenant": "calm"} if number % 2 else {}
            headers["x-slo-class"] = "strict" if number % 3 else "relaxed"
            headers |= {"x-slo-tbt-ms": "1", "x-slo-ttft-ms": "1"} if number % 4 == 1 else {}
            words = 400 if number % 2 else 4000
            body = {"model": "simulated", "prompt": "word " * words, "stream": True, "max_tokens": 30}
            while True:
                async with self.client.post(f"{self.proxy}/v1/completions", json=body, headers=headers) as answer:
                    assert answer.status == 200
                    await answer.read()

        async def refused() -> None:
            body = {"model": "nobody has it", "prompt": "x"}
            while True:
                async with self.client.post(f"{self.proxy}/v1/completions", json=body) as answer:
                    assert answer.status == 404
                await asyncio.sleep(0.5)

        await asyncio.gather(refused(), *map(requests, range(8)))


@asynccontextmanager
async def redis(folder: Path) -> AsyncIterator[str | None]:
    """A Redis as Compose starts it, on a socket of its own; ``None`` where there is none."""
    if shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None:
        yield None
        return
    command = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text(encoding="utf-8"))["services"]["redis"]["command"]
    path = folder / "redis.sock"
    async with process(*command, "--port", "0", "--unixsocket", str(path)):
        async with asyncio.timeout(30):
            while not path.exists():  # noqa: ASYNC110 - made by another process
                await asyncio.sleep(0.1)
        yield f"unix://{path}"


@asynccontextmanager
async def stack(folder: Path) -> AsyncIterator[Stack]:
    engines, port, scraper = [free_port(), free_port()], free_port(), free_port()
    scrape = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "slai-proxy", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]},
            {"job_name": "engines", "static_configs": [{"targets": [f"127.0.0.1:{e}" for e in engines]}]},
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(scrape), encoding="utf-8")
    ours = (sys.executable, "-m", "proxy")
    async with AsyncExitStack() as running, aiohttp.ClientSession() as client:
        ports = ",".join(map(str, engines))
        await running.enter_async_context(
            process(*ours, "engine", "--ports", ports, "--speed", "5", "--token-budget", "8192")
        )
        for engine in engines:
            await answers(client, f"http://127.0.0.1:{engine}/health")
        store = await running.enter_async_context(redis(folder))
        urls = ",".join(f"http://127.0.0.1:{engine}" for engine in engines)
        settings = ["--port", str(port), "--config", str(ROOT / "deploy/slai.demo.yaml")]
        settings += ["--tiles", "--token-budget", "8192", "--max-num-seqs", "128"]
        settings += ["--redis", store] if store is not None else []
        await running.enter_async_context(process(*ours, "serve", "--engines", urls, *settings))
        await answers(client, f"http://127.0.0.1:{port}/readyz")
        await running.enter_async_context(
            process(
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{scraper}",
            )
        )
        await answers(client, f"http://127.0.0.1:{scraper}/-/ready")
        yield Stack(client, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{scraper}", fleet=store is not None)


async def asked_for(found: Stack) -> dict[str, str]:
    """What is asked of Prometheus, by where it is asked: must have an answer while there is load."""
    asked = {}
    for path in sorted((ROOT / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for number, target in enumerate(panel.get("targets", [])):
                asked[f"{path.stem}, {panel['title']}, {number}"] = target["expr"]
    assert len(asked) > 40
    for group in (await found.ask("rules"))["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule
            if rule["type"] == "recording":
                asked[f"rule {rule['name']}"] = rule["name"]
            # An alert that does not fire has no data; what it asks for has.
            asked |= {f"rule {rule['name']}: {name}": seen(name) for name in names(rule["query"]) if found.has(name)}
    # "or vector(0)" always has.
    return asked | {f"{where}: {name}": seen(name) for where, of in asked.items() for name in names(of)}


def seen(name: str) -> str:
    return f"last_over_time({name}[2m])"


async def test_every_panel_and_every_rule_has_data_under_load(tmp_path: Path) -> None:
    async with stack(tmp_path) as found:
        load = asyncio.ensure_future(found.load())
        try:
            async with asyncio.timeout(30):
                while not await found.rules_are_evaluated():  # noqa: ASYNC110 - by another process
                    await asyncio.sleep(0.5)
            left = await asked_for(found)
            try:
                async with asyncio.timeout(60):
                    while left:
                        left = {where: asked for where, asked in left.items() if not await found.series(asked)}
                        assert not load.done(), load.exception()
                        await asyncio.sleep(0.5)
            except TimeoutError:
                raise AssertionError(f"without data: {left}") from None
            for target in (await found.ask("targets"))["activeTargets"]:
                assert target["health"] == "up", target
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
