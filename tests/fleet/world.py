"""Engines that count, replicas as processes, and clients that say what they saw."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from redis_server import free_port

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence
    from pathlib import Path

MODEL = "counting"


class CountingEngine:
    """Streams ``max_tokens`` tokens, one every ``gap_seconds``, to any number of requests, and counts how many."""

    def __init__(self, gap_seconds: float) -> None:
        self.gap_seconds = gap_seconds
        self.active = 0
        self.most = 0
        self.started: list[tuple[float, str]] = []
        """When each request came, and the first word of its prompt."""
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", lambda _: _ok())
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        port = free_port()
        await web.TCPSite(self._runner, "127.0.0.1", port, backlog=4096).start()
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        tokens = int(asked["max_tokens"])
        self.active += 1
        self.most = max(self.most, self.active)
        self.started.append((monotonic(), asked["prompt"].partition(" ")[0]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            event = b"data: " + json.dumps({"choices": [{"index": 0, "text": "a"}]}).encode() + b"\n\n"
            due = monotonic()
            for _ in range(tokens):
                due += self.gap_seconds
                await asyncio.sleep(due - monotonic())
                await response.write(event)
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.active -= 1
        return response


async def _ok() -> web.Response:
    return web.Response()


@dataclass
class Replica:
    """A proxy as a process of its own."""

    name: str
    engines: list[str]
    redis: str
    """Empty: it is no member of a fleet."""
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self, log: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLAI_")}
        arguments = ["serve", "--port", str(self.port), "--engines", ",".join(self.engines), *self.flags]
        arguments += ["--queue-timeout-seconds", "600", *(("--redis", self.redis) if self.redis else ())]
        with log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "proxy", *arguments, stderr=output, env=environment
            )
        async with asyncio.timeout(60), aiohttp.ClientSession() as client:
            while True:
                with suppress(aiohttp.ClientError):
                    async with client.get(f"{self.url}/readyz") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)

    @property
    def lives(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def role(self) -> str:
        """Who decides on its requests; empty where it does not tell."""
        with suppress(aiohttp.ClientError):
            roles = await self.samples("slai_fleet_role")
            return next((role for (role,), value in roles.items() if value), "")
        return ""

    async def samples(self, name: str) -> dict[tuple[str, ...], float]:
        async with aiohttp.ClientSession() as client, client.get(f"{self.url}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if sample.name == name
        }

    def send_signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def end(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@dataclass
class Seen:
    """What the clients of one replica saw."""

    outcomes: dict[str, int] = field(default_factory=dict)
    longest_gap_seconds: float = 0.0
    """Between two tokens of any of their streams."""

    refused: list[tuple[float, str]] = field(default_factory=list)
    """When somebody was refused, and the wait that was told, in ms."""

    def note(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


async def ask(replica: Replica, client: aiohttp.ClientSession, seen: Seen, tokens: int, prompt: str) -> bool:
    """Send one streamed request and note how it ended; whether it was answered to the end."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True}
    got, done, last = 0, False, 0.0
    try:
        async with client.post(f"{replica.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                seen.refused.append((monotonic(), answer.headers.get("x-slai-estimated-wait-ms", "")))
                seen.note(f"refused {answer.headers.get('x-slai-reason', answer.status)}")
                return False
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: {") and b'"error"' in line:
                    seen.note("told of an error")
                    return False
                elif line.startswith(b"data: {"):
                    now = monotonic()
                    if got:
                        seen.longest_gap_seconds = max(seen.longest_gap_seconds, now - last)
                    got, last = got + 1, now
        completed = done and got == tokens
        seen.note("completed" if completed else "cut")
    except (aiohttp.ClientError, OSError):
        seen.note("cut" if got else "connection lost while waiting")
    except TimeoutError:
        seen.note("hung")
    else:
        return completed
    return False


async def unite(replicas: Sequence[Replica], seconds: float = 30) -> list[Replica]:
    """Wait until one of those that live leads and the others follow, and return them, the leader first.

    Raises:
        TimeoutError: it does not come to that.
    """
    async with asyncio.timeout(seconds):
        while True:
            live = [replica for replica in replicas if replica.lives]
            roles = {replica.name: await replica.role() for replica in live}
            if sorted(roles.values()) == ["follower"] * (len(live) - 1) + ["leader"]:
                return sorted(live, key=lambda replica: roles[replica.name] != "leader")
            await asyncio.sleep(0.1)


async def until(condition: Callable[[], object], seconds: float) -> float | None:
    """Wait for a condition, and return how long that took; ``None`` if it does not hold in time."""
    began = monotonic()
    while not condition():
        if monotonic() - began > seconds:
            return None
        await asyncio.sleep(0.01)
    return monotonic() - began
