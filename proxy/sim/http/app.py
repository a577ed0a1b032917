"""The aiohttp application around a simulated engine, and engines on ports."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from aiohttp import HttpVersion11, web
from prometheus_client import CONTENT_TYPE_LATEST

from proxy import __version__
from proxy.sim.blockcache import BlockCache
from proxy.sim.engine import EngineConfig, SimulatedEngine
from proxy.sim.http.answers import Answer, EventStream, Silence
from proxy.sim.http.bodies import ApiError, Generation, Limits, read_chat, read_completion, read_tokenize
from proxy.sim.http.metrics import EngineMetrics
from proxy.sim.http.server import SimulatedServer

SERVER = web.AppKey("server", SimulatedServer)
"""Where the application keeps its engine."""

_METRICS = web.AppKey("metrics", EngineMetrics)
_MAX_BODY_BYTES = 64 << 20
_KEEP_ALIVE_SECONDS = 5.0
"""As short as vLLM's: clients that pool connections for longer must cope with finding them closed."""
_SHUTDOWN_SECONDS = 1.0
_BACKLOG = 2048

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(
    engine: SimulatedEngine, *, model: str, speed: float = 1.0, max_model_len: int = 32_768
) -> web.Application:
    """Build the application of one engine; its steps run from startup to cleanup.

    Run it with ``handler_cancellation=True``, as ``start_engines`` does, or clients that leave go unnoticed.
    """
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
    app[SERVER] = SimulatedServer(engine, model=model, speed=speed, max_model_len=max_model_len)
    app[_METRICS] = EngineMetrics(app[SERVER])
    app.cleanup_ctx.append(_steps)
    app.on_shutdown.append(_cut)
    app.add_routes(
        [
            web.post("/v1/completions", _completions),
            web.post("/v1/chat/completions", _chat_completions),
            web.post("/tokenize", _tokenize),
            web.get("/v1/models", _models),
            web.get("/health", _health),
            web.get("/version", _version),
            web.get("/metrics", _metrics),
        ]
    )
    return app


class RunningEngine(NamedTuple):
    """An engine that listens; ``runner.app[SERVER]`` is its inside."""

    url: str
    runner: web.AppRunner


async def serve(app: web.Application, host: str = "127.0.0.1", port: int = 0) -> RunningEngine:
    """Start an application of ``create_app`` on a port; 0 takes any that is free.

    Raises:
        OSError: the port cannot be bound.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=_KEEP_ALIVE_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=_BACKLOG).start()
    except BaseException:
        await runner.cleanup()
        raise
    address = runner.addresses[0]
    name = f"[{address[0]}]" if ":" in address[0] else address[0]
    return RunningEngine(f"http://{name}:{address[1]}", runner)


async def start_engines(
    ports: Sequence[int],
    config: EngineConfig | None = None,
    *,
    model: str,
    speed: float = 1.0,
    host: str = "127.0.0.1",
) -> list[RunningEngine]:
    """Start one engine per port, in this process; port 0 takes any that is free.

    Raises:
        OSError: a port cannot be bound; the engines started before it are stopped again.
    """
    engines: list[RunningEngine] = []
    try:
        for port in ports:
            app = create_app(SimulatedEngine(config, cache=BlockCache), model=model, speed=speed)
            engines.append(await serve(app, host, port))
    except BaseException:
        await stop_engines(engines)
        raise
    return engines


async def stop_engines(engines: Sequence[RunningEngine]) -> None:
    """Stop engines at once: running streams are cut off, as when an engine dies."""
    await asyncio.gather(*(engine.runner.cleanup() for engine in engines))


async def _steps(app: web.Application) -> AsyncIterator[None]:
    task = asyncio.get_running_loop().create_task(app[SERVER].run(), name="steps of a simulated engine")
    yield
    task.cancel()
    await asyncio.wait([task])


async def _cut(app: web.Application) -> None:
    app[SERVER].cut()


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        refusal = error
    except web.HTTPException as error:  # no such path, wrong method, body too large
        status = HTTPStatus(error.status)
        refusal = ApiError(status.phrase, error_type=status.phrase, status=status)
    return web.Response(status=refusal.status, body=refusal.body, content_type="application/json")


async def _completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, read_completion)


async def _chat_completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, read_chat)


async def _generate(request: web.Request, read: Callable[[bytes, Limits], Generation]) -> web.StreamResponse:
    server = request.app[SERVER]
    wanted = read(await _json_body(request), server.limits)
    server.check_alive()
    answer = Answer(wanted, server.limits.model, request.headers.get("X-Request-Id") or uuid.uuid4().hex)
    if wanted.stream:
        return await _stream(request, answer)
    await server.generate(wanted.prompt_tokens, wanted.output_tokens, Silence(answer), wanted.hashes)
    return web.Response(body=answer.whole(), content_type="application/json")


async def _stream(request: web.Request, answer: Answer) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    if request.version >= HttpVersion11:
        response.enable_chunked_encoding()
    await response.prepare(request)
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has gone")
    events = EventStream(answer, transport, chunked=response.chunked)
    wanted = answer.wanted
    await request.app[SERVER].generate(wanted.prompt_tokens, wanted.output_tokens, events, wanted.hashes)
    return response


async def _json_body(request: web.Request) -> bytes:
    if request.content_type != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(message, error_type="Bad Request")
    return await request.read()


async def _tokenize(request: web.Request) -> web.Response:
    limits = request.app[SERVER].limits
    ids = read_tokenize(await _json_body(request), limits)
    return _json({"count": len(ids), "max_model_len": limits.max_model_len, "tokens": ids, "token_strs": None})


async def _models(request: web.Request) -> web.Response:
    limits = request.app[SERVER].limits
    card = {
        "id": limits.model,
        "object": "model",
        "created": 0,
        "owned_by": "vllm",
        "root": limits.model,
        "parent": None,
        "max_model_len": limits.max_model_len,
        "permission": [],
    }
    return _json({"object": "list", "data": [card]})


async def _health(request: web.Request) -> web.Response:
    return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE if request.app[SERVER].failed else HTTPStatus.OK)


async def _version(_: web.Request) -> web.Response:
    return _json({"version": f"{__version__}+simulated"})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[_METRICS].exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
