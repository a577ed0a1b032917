"""An OpenAI-compatible server that does what a test's script says, and a clock that the script sets."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.core.request import RequestClass
from proxy.sim.workload import ScheduledRequest

KIND = RequestClass("gold", ttft_seconds=2.0, tbt_seconds=0.1)

DONE = b"data: [DONE]\n\n"


class Clock:
    """Stands still unless a script moves it."""

    def __init__(self) -> None:
        self.value = 0.0
        self._read = asyncio.Event()

    def __call__(self) -> float:
        self._read.set()
        return self.value

    async def write(self, response: web.StreamResponse, data: bytes, at: float) -> None:
        """Write ``data`` at the time ``at`` and wait until the client has taken note."""
        self.value = at
        self._read.clear()
        await response.write(data)
        await self._read.wait()


Script = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class Upstream:
    """What the server was sent, and the script by which it answers."""

    def __init__(self) -> None:
        self.script: Script = answer_in_full
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[web.Request] = []
        self.peers: list[Any] = []
        self.models: Callable[[], web.Response] = lambda: web.json_response({"data": [{"id": "tiny"}]})
        self.url = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(request)
        self.bodies.append(body)
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        return await self.script(request, body)

    async def list_models(self, request: web.Request) -> web.Response:
        return self.models()


async def start_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def token(text: str = "a", **more: Any) -> bytes:
    return event({"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": None}], **more})


def usage(completion_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": completion_tokens}})


async def answer_in_full(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await start_stream(request)
    for _ in range(body["max_tokens"]):
        await response.write(token())
    await response.write(usage(body["max_tokens"]) + DONE)
    return response


def request_at(
    at: float, *, index: int = 0, prompt: int = 3, output: int = 2, kind: RequestClass = KIND
) -> ScheduledRequest:
    return ScheduledRequest(index, at, prompt, output, kind, content_seed=index)


def requests_at(times: Iterable[float]) -> list[ScheduledRequest]:
    return [request_at(at, index=index) for index, at in enumerate(times)]


@asynccontextmanager
async def serve() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/completions", upstream.generate)
    app.router.add_post("/v1/chat/completions", upstream.generate)
    app.router.add_get("/v1/models", upstream.list_models)
    async with TestServer(app) as server:
        upstream.url = str(server.make_url("")).rstrip("/")
        yield upstream
