"""From settings to a listening proxy, and from a signal to its orderly end."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from proxy.core.limits import CacheConfig
from proxy.server import debug
from proxy.server.app import PROXY, Proxy, create_app
from proxy.server.connections import CONNECTIONS, Site, raise_file_limit
from proxy.server.drain import Signals, drain
from proxy.server.files import read_files
from proxy.server.fleet import open_store
from proxy.server.garbage import collect_when_quiet, collect_young_only
from proxy.server.notify import Notifier
from proxy.server.reconfigure import put_in_force
from proxy.server.reload import Reloader
from proxy.server.runner import Runner
from proxy.server.tasks import Tasks
from proxy.server.worker import be_worker
from proxy.server.workers import Place
from proxy.sim.engine import EngineConfig
from proxy.sim.http import start_engines, stop_engines
from proxy.sim.profiles import find_profile
from proxy.sim.simulator import limits_of
from proxy.upstream.knowledge import prepare

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from proxy.config import Settings
    from proxy.core.limits import EngineLimits

_log = logging.getLogger(__name__)

_BACKLOG = 4096
_SHUTDOWN_SECONDS = 1.0
_MAX_HEADER_BYTES = 1 << 16
_MAX_HEADERS = 100
_SWITCH_SECONDS = 1e-4
"""How long a thread that sends telemetry or renders metrics may keep a token waiting, whose read needs the interpreter.

Python's own choice is 5 ms, and what waits is each read by itself.
"""
SIMULATED_MODEL = "simulated"


def check(settings: Settings) -> None:
    """Look into the files that the settings name, and at the URL of a store as far as it goes without connecting.

    Raises:
        ConfigError: one of them cannot be used.
    """
    files = read_files(settings)
    if files.store_url is not None:
        open_store(files.store_url, settings.redis_pool)


async def serve(settings: Settings, load: Callable[[], Settings] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once.

    ``load`` reads the settings anew, by SIGHUP and when one of their files changes; without it they stay.

    Raises:
        ConfigError: a file that the settings name cannot be used.
        OSError: the address is not free or not ours.
        TelemetryUnavailableError: as from ``create_app``.
        DecisionLogError: the decision log cannot be written.
        StateDirError: the directory for what is learnt cannot be used.
    """
    if settings.engines and settings.state_dir is not None:
        prepare(settings.state_dir)
    files = read_files(settings)
    sys.setswitchinterval(_SWITCH_SECONDS)
    signals, notifier = Signals(), Notifier.from_environment(os.environ)
    signals.listen()
    raise_file_limit()

    async with AsyncExitStack() as stack:
        simulated: EngineLimits | None = None
        if not settings.engines:
            config = EngineConfig(find_profile(settings.sim_profile))
            engines = await start_engines(
                [0] * settings.sim_engines, config, model=SIMULATED_MODEL, speed=settings.sim_speed
            )
            stack.push_async_callback(stop_engines, engines)
            # What is learnt of simulated engines is of no use to anybody.
            urls = tuple(engine.url for engine in engines)
            settings = settings.model_copy(update={"engines": urls, "state_dir": None})
            # Over HTTP the simulated engines have no prefix cache, so there is nothing to send ahead.
            simulated = replace(limits_of(config), caches_prefixes=False)
        limits = settings.engine_limits(CacheConfig()) if simulated is None else simulated
        app = create_app(settings, limits=None if simulated is None else lambda _: simulated, files=files)
        runner = Runner(
            app,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            tcp_keepalive=True,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            max_headers=_MAX_HEADERS,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        proxy = app[PROXY]
        place = Place.from_environment(os.environ)
        site = Site(
            runner,
            proxy.connections,
            settings.host,
            settings.port,
            tls=files.tls,
            backlog=_BACKLOG,
            shared=place is not None,
        )
        await site.start()
        if place is not None:
            await stack.enter_async_context(be_worker(place, proxy, signals.stop.set))
        tasks = Tasks()
        debugging = await _start_debugging(proxy, stack, tasks)
        greeting = _greeting(proxy, runner, debugging, limits, simulated=simulated is not None)
        if place is None:
            print(greeting, file=sys.stderr, flush=True)  # noqa: T201 - to whoever started it, not to the log
        else:
            place.greeting.write_text(greeting)  # told once, when all are ready
        tasks.spawn(proxy.connections.run(), "connections")
        tasks.spawn(notifier.run(), "watchdog")
        tasks.spawn(collect_when_quiet(lambda: proxy.connections.under_way == 0), "garbage")
        collect_young_only()
        if load is not None:
            reloader = Reloader(
                settings,
                load,
                lambda new, found: put_in_force(app, new, found, files.tls),
                signals.reload,
                notifier,
                fixed_engines=simulated is not None,
            )
            reloader.tell(proxy.metrics)
            proxy.reloader = reloader
            tasks.spawn(reloader.run(), "reload")
        stack.callback(tasks.cancel)
        notifier.ready(f"{sum(e.up for e in proxy.scheduler.engines)} of {len(proxy.scheduler.engines)} engines up")
        await signals.stop.wait()
        notifier.stopping("draining")
        await drain(proxy, signals, site.stop)
    _log.info("stopped")


async def _start_debugging(proxy: Proxy, stack: AsyncExitStack, tasks: Tasks) -> str | None:
    """Serve the debug endpoints, if there are any, and return their address."""
    settings = proxy.settings
    if settings.debug_port is None:
        return None
    app = debug.create_debug_app(proxy)
    runner = Runner(app, max_headers=_MAX_HEADERS)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    connections = app[CONNECTIONS]
    stack.callback(connections.end_all)
    try:
        await Site(runner, connections, settings.debug_host, settings.debug_port).start()
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{settings.debug_host}:{settings.debug_port}") from None
    tasks.spawn(connections.run(), "debug connections")
    if proxy.debug_key is None and not debug.is_loopback(settings.debug_host):
        _log.warning(
            "the debug port is open to whoever reaches %s: give --debug-key-file, or leave --debug-host as it is",
            settings.debug_host,
        )
    host, port, *_ = runner.addresses[0]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/debug"


def _greeting(
    proxy: Proxy, runner: web.AppRunner, debugging: str | None, limits: EngineLimits, *, simulated: bool
) -> str:
    host, port, *_ = runner.addresses[0]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    url = f"{'http' if proxy.settings.tls_cert is None else 'https'}://{host}:{port}"
    models = [str(model["id"]) for model in proxy.prober.models()]
    up = sum(engine.up for engine in proxy.scheduler.engines)
    body = f'{{"model": "{models[0] if models else "MODEL"}", "stream": true, "max_tokens": 20, "prompt": "Hello"}}'
    engines = f"{up} of {len(proxy.scheduler.engines)} engines"
    engines += " (simulated ones: no --engines are given)" if simulated else ""
    engines += f" in {proxy.settings.workers} processes" if proxy.settings.workers > 1 else ""
    tiles = " with tiles" if proxy.settings.tiles else ""
    key = "-H 'Authorization: Bearer KEY' " if proxy.settings.needs_keys else ""
    rules = (
        f"policy {proxy.settings.policy}{tiles}, token budget {limits.token_budget}, {limits.max_num_seqs} sequences"
    )
    return (
        f"slai-proxy listens on {url} and schedules for {engines}: {rules}\n"
        + "".join(f"  {e.id} {'up' if e.up else 'down'}\n" for e in proxy.scheduler.engines)
        + f"Try it:\n  curl -N {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{body}'\n"
        + (
            f"Debug: {debugging}/state and {debugging}/requests/ID    Watch: {debugging[:-6]}/live\n"
            if debugging
            else ""
        )
        + f"Metrics: {url}/metrics    Stop: Ctrl-C"
    )
