"""The aiohttp application: routes, start and end of what it owns."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from proxy.core.events import DrainStarted
from proxy.core.limits import CacheConfig, EngineLimits
from proxy.core.promptsize import PromptSizes
from proxy.core.recording import RecordedScheduler
from proxy.core.request import RejectReason
from proxy.core.scheduler import Scheduler
from proxy.server.access import (
    ACCESS,
    CALLER,
    Access,
    AccessError,
    admit,
    goes_on_at_once,
    keep_access,
    refuse,
    tell_limits,
)
from proxy.server.answers import STARTED, carried, end_by_closing, error_response, forget, leave_untyped
from proxy.server.bodies import close_unread, expect_later, limit_bodies
from proxy.server.connections import CONNECTIONS, Connections, limit_connections
from proxy.server.files import DebugKey, Files, read_files
from proxy.server.fleet import Fleet, FleetDriver, drive
from proxy.server.generate import Generator
from proxy.server.lag import watch_lag
from proxy.server.passthrough import PassThrough
from proxy.server.scrape import scraped
from proxy.server.websocket import WebSockets
from proxy.telemetry.chronicle import Chronicle
from proxy.telemetry.decisionlog import DecisionLog, LogFile
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.otlp import otlp
from proxy.telemetry.sending import Telemetry
from proxy.upstream.client import EngineClient, Timeouts
from proxy.upstream.discovery import Discovery
from proxy.upstream.knowledge import Knowledge
from proxy.upstream.probe import Prober
from proxy.upstream.sources import split
from proxy.wire.apis import APIS
from proxy.wire.errors import LocalFailure, answer
from proxy.wire.fingerprint import Fingerprinter

if TYPE_CHECKING:
    from proxy.config import Settings
    from proxy.core.config import SchedulerConfig
    from proxy.server.driver import Driver
    from proxy.server.reload import Reloader
    from proxy.server.workers import Place
    from proxy.telemetry.tracing import Tracing
    from proxy.upstream.credentials import EngineTrust

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Proxy:
    """The parts of a running proxy, for whoever started it."""

    settings: Settings
    driver: Driver
    client: EngineClient
    metrics: Metrics
    tracing: Tracing
    prober: Prober
    discovery: Discovery
    access: Access
    connections: Connections
    trust: EngineTrust
    debug_key: DebugKey | None
    """What opens the debug port; ``None``: it is open."""
    chronicle: Chronicle | None = None
    """There where somebody may ask for it."""
    fleet: Fleet | None = None
    """There where several replicas share one queue."""
    place: Place | None = None
    """There where it is one of several processes behind one port."""
    draining: bool = False
    reloader: Reloader | None = None
    """There where the settings can be read anew."""

    @property
    def scheduler(self) -> Scheduler:
        return self.driver.scheduler

    @property
    def ready(self) -> bool:
        return not self.draining and any(e.up for e in self.scheduler.engines)

    def start_drain(self) -> None:
        """Refuse what waits and what comes; streams in flight go on."""
        self.draining = True
        self.driver.feed(DrainStarted())


PROXY = web.AppKey("proxy", Proxy)

LimitsOf = Callable[[CacheConfig], EngineLimits]


def create_app(
    settings: Settings,
    *,
    limits: LimitsOf | None = None,
    tracing: Tracing | None = None,
    files: Files | None = None,
) -> web.Application:
    """Build the proxy's application; engines are probed and requests scheduled from its start to its cleanup.

    ``limits`` gives an engine's limits from the size of its KV cache as it reports it; the settings' own by default.
    ``files`` is what was read from the files that the settings name, if they have been read already.
    Serve it with ``handler_cancellation=True``, or the requests of clients that leave go on.

    Raises:
        ConfigError: the API keys, or the files for TLS, cannot be used.
        TelemetryUnavailableError: OpenTelemetry is asked for in a way that is not known, or its package is missing.
    """
    app = web.Application(client_max_size=settings.max_body_bytes, middlewares=[_serve])
    files = files or read_files(settings)
    trust, connections, access = files.trust, limit_connections(app, settings), keep_access(app, files.keys)
    limit_bodies(app, settings)
    telemetry = Telemetry(otlp(settings.otlp_endpoint), tracing)

    async def life(app: web.Application) -> AsyncIterator[None]:
        classes, rules = settings.request_classes(), settings.scheduler_config()
        scheduler, log = _decide(settings, rules)
        chronicle = None if settings.debug_port is None else Chronicle()
        sizes = PromptSizes()
        metrics = Metrics(scheduler, classes, settings.tenants, sizes)
        driver, fleet = drive(
            settings, files.store_url, scheduler, metrics, None if chronicle is None else chronicle.observe
        )
        secret = secrets.token_bytes(32) if fleet is None else await fleet.secret()
        client = EngineClient(Timeouts(settings.connect_timeout_seconds, settings.idle_timeout_seconds), trust)
        # It reads a small file, and nobody is served yet.
        knowledge = None if settings.state_dir is None else Knowledge.load(settings.state_dir)
        prober = Prober(
            (),
            limits or settings.engine_limits,
            driver.feed,
            interval_seconds=settings.probe_interval_seconds,
            knowledge=knowledge,
            tiles=settings.tiles,
            trust=trust,
        )
        if isinstance(driver, FleetDriver):
            access.join(driver)
        _watch(metrics, driver, connections, access)
        discovery = _discover(app, prober, metrics)
        app[PROXY] = Proxy(
            settings,
            driver,
            client,
            metrics,
            telemetry.tracing,
            prober,
            discovery,
            access,
            connections,
            trust,
            files.debug_key,
            chronicle,
            fleet,
        )
        app[GENERATOR] = Generator(
            driver,
            client,
            metrics,
            telemetry.tracing,
            sizes,
            Fingerprinter(hmac.digest(secret, b"fingerprints", "sha256")),
            classes,
            classes[settings.default_class],
            settings.tenant_reader(hmac.digest(secret, b"tenants", "sha256")),
            rules.tiles,
            settings.aliases,
            chronicle,
            settings.ask_usage,
            settings.queue_comment_seconds,
            settings.replays,
        )
        app[PASS_THROUGH] = PassThrough(
            driver,
            client,
            WebSockets(trust, settings.connect_timeout_seconds, settings.max_body_bytes),
            settings.aliases,
            settings.engine_administration,
        )
        discovery.configure(*split(settings.engines, settings.discovery_interval_seconds))
        # Before the first request: who is there? An engine that is down now costs no more than its refusal.
        await discovery.look_first()
        await prober.look_first()
        if fleet is not None:
            await fleet.join()
        running = {
            "probes": prober.run(),
            "discovery": discovery.run(),
            "loop lag": watch_lag(metrics.record_lag),
            "metrics": telemetry.run(metrics),
        }
        running |= {} if fleet is None else {"fleet": fleet.run()}
        running |= {} if log is None else {"decision log": log.run()}
        if knowledge is not None:
            running["knowledge"] = knowledge.run(lambda: prober.identify(scheduler.engines))
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(task, name=name) for name, task in running.items()]
            yield
            for task in background:
                task.cancel()
        driver.close()
        if fleet is not None:
            await fleet.leave()
        if log is not None:
            await log.close()
        if knowledge is not None:
            await knowledge.keep(prober.identify(scheduler.engines))
        for to_engines in (prober, client, app[PASS_THROUGH].sockets):
            await to_engines.close()
        await telemetry.close()

    app.cleanup_ctx.append(life)
    app.on_response_prepare.append(_before_head)
    _route(app)
    return app


GENERATOR = web.AppKey("generator", Generator)
PASS_THROUGH = web.AppKey("pass_through", PassThrough)


async def _before_head(request: web.Request, response: web.StreamResponse) -> None:
    """Do what is to be done to every head of an answer, whoever made it."""
    tell_limits(request, response)
    close_unread(request, response)
    if request.app[PROXY].draining:  # the client is to find another proxy for its next request
        response.force_close()
        response.headers["Connection"] = "close"  # the head has been made by now
    leave_untyped(request, response)
    end_by_closing(request, response)


def _route(app: web.Application) -> None:
    for path in APIS:
        app.router.add_post(path, _generate, expect_handler=expect_later)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/livez", _livez)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/health", _readyz)
    app.router.add_get("/metrics", _metrics)
    app.router.add_route("*", "/{path:.*}", _pass_through, expect_handler=expect_later)


def _decide(settings: Settings, rules: SchedulerConfig) -> tuple[Scheduler, DecisionLog | None]:
    """Make the scheduler, and the log of what it decides if there is to be one."""
    if settings.decision_log is None:
        return Scheduler(rules), None
    log = DecisionLog(LogFile(settings.decision_log, rules, most_bytes=settings.decision_log_bytes))
    return RecordedScheduler(rules, log.record), log


def _discover(app: web.Application, prober: Prober, metrics: Metrics) -> Discovery:
    def remove(engine: str) -> None:
        prober.remove(engine, app[PROXY].settings.engine_drain_seconds)
        app[PROXY].client.forget(engine)

    discovery = Discovery(prober.add, remove)
    metrics.watch_sources(discovery.sources)
    return discovery


def _watch(metrics: Metrics, driver: Driver, connections: Connections, access: Access) -> None:
    """Show what is neither the scheduler's nor a request's."""
    backlog = driver.scheduler.ledger.backlog
    metrics.watch_gauge(
        "slai.queue.longest",
        "How long whoever waits longest has waited",
        lambda: backlog.longest_wait(driver.now()),
        "s",
    )
    metrics.watch_obstacles(driver.now)
    connections.tell(metrics)
    access.tell(metrics)


async def _generate(request: web.Request) -> web.StreamResponse:
    return await request.app[GENERATOR].handle(request)


async def _pass_through(request: web.Request) -> web.StreamResponse:
    if request.path in APIS and request.method == hdrs.METH_POST:
        # With a slash that is written %2F: engines read it as one, the router does not.
        return await _generate(request)
    return await request.app[PASS_THROUGH].handle(request)


async def _models(request: web.Request) -> web.StreamResponse:
    proxy = request.app[PROXY]
    models = proxy.prober.models()
    by_id = {str(model["id"]): model for model in models}
    for name, model in proxy.settings.aliases.items():
        if model in by_id and name not in by_id:
            models.append({**by_id[model], "id": name, "root": model})
    if not models:
        return error_response(answer(RejectReason.NO_ENGINE))
    if (caller := carried(request, CALLER)) is not None:
        models = [model for model in models if caller.key.may_use(str(model["id"]))]
    return web.json_response({"object": "list", "data": models})


async def _livez(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _readyz(request: web.Request) -> web.Response:
    proxy = request.app[PROXY]
    engines = {e.id: "up" if e.up else "down" for e in proxy.scheduler.engines}
    state: dict[str, object] = {"ready": proxy.ready, "draining": proxy.draining}
    if not proxy.settings.needs_keys:  # anybody may ask, and the engines' addresses are not for everybody
        state["engines"] = engines
    return web.json_response(state, status=200 if proxy.ready else 503)


async def _metrics(request: web.Request) -> web.Response:
    proxy = request.app[PROXY]
    return await scraped(proxy.metrics, request, proxy.place)


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _serve(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Let a request in, answer whatever is raised, and note when it is over.

    One middleware: several would be a coroutine more each, for as long as a stream lasts.
    """
    app, caller = request.app, None
    access, connections, protocol = app[ACCESS], app[CONNECTIONS], request.protocol
    connections.busy(protocol, is_busy=True)
    try:
        caller = admit(request, access)
        if caller is not None:
            if not goes_on_at_once(request):
                await caller.judged()
            caller.check()
        return await handler(request)
    except AccessError as refusal:
        access.count(refusal)
        return refuse(request, refusal)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = {"message": error.reason, "type": "invalid_request_error", "param": None, "code": None}
        return web.Response(
            status=error.status, body=json.dumps({"error": message}).encode(), content_type="application/json"
        )
    except ConnectionError:
        left: web.StreamResponse = carried(request, STARTED) or web.Response()
        return left  # to nobody: the client is gone
    except Exception:  # noqa: BLE001 - whatever it was, the client gets an answer and the log its trace
        _log.exception("%s %s failed through a fault of the proxy", request.method, request.rel_url.raw_path)
        started: web.StreamResponse | None = carried(request, STARTED)
        if started is not None:
            if request.transport is not None:
                request.transport.abort()
            return started
        return error_response(answer(LocalFailure.INTERNAL))
    finally:
        if caller is not None:
            caller.settle(0, 0)
        connections.busy(protocol, is_busy=False)
        forget(request, STARTED)  # it refers to the request: where the client has left, each would keep the other
