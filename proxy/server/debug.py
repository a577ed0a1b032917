"""What goes on, for whoever runs the proxy: metrics, the settings in force, the scheduler's state, single requests.

It has a port of its own, on the loopback interface and only if asked for: on the port of the clients anybody could
look after the requests of others, and an address tells nothing there, as a web server in front makes all of them its
own. Nothing can be changed by it. With ``--debug-key-file`` it wants that key. Without one, the name by which it is
called must be a local one (or an address, where it listens to others), or a page in the operator's browser could read
it (DNS rebinding).
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from proxy.core.snapshot import view_state, view_waiting
from proxy.server.connections import CONNECTIONS, ConnectionLimits, Connections, note_requests
from proxy.server.debug_openapi import description
from proxy.server.live import EVENTS_PATH, PAGE_PATH, LivePage, view_member
from proxy.server.scrape import scraped
from proxy.telemetry.chronicle import Stage
from proxy.wire.keys import presented_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proxy.config import Settings
    from proxy.server.app import Proxy

HOST = "127.0.0.1"
STATE_PATH = "/debug/state"
REQUEST_PATH = "/debug/requests/"
CONFIG_PATH = "/debug/config"
_LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
_OPEN_PATHS = ("/livez", "/readyz")
_MOST_CONNECTIONS = 64


def create_debug_app(proxy: Proxy) -> web.Application:
    """Build the application; its own description is at ``/openapi.json``."""
    if proxy.chronicle is None:
        raise ValueError("the proxy keeps no chronicle")
    chronicle, driver = proxy.chronicle, proxy.driver

    async def state(_: web.Request) -> web.Response:
        told = msgspec.to_builtins(view_state(driver.scheduler, driver.now()))
        return _answer(told | {"fleet": None if proxy.fleet is None else view_member(proxy.fleet.member)})

    async def one_request(request: web.Request) -> web.Response:
        story, now = chronicle.find(request.match_info["id"]), driver.now()
        if story is None:
            return _answer({"error": "no such request: it has never been here, or has ended long ago"}, status=404)
        told, waits = story.tell(now), view_waiting(driver.scheduler, story.request_id, now)
        if waits is not None:
            told["waits"] = waits
        elif proxy.fleet is not None and story.stage is Stage.WAITING:
            told["decided_by"] = proxy.fleet.member.leader  # who knows what it waits for, by another name
        return _answer(told)

    async def config(_: web.Request) -> web.Response:
        reloader = proxy.reloader
        reloads = None if reloader is None else reloader.reloads | {"last_error": reloader.last_error}
        return _answer({"settings": _shown(proxy.settings), "reloads": reloads})

    async def metrics(request: web.Request) -> web.Response:
        return await scraped(proxy.metrics, request)

    async def livez(_: web.Request) -> web.Response:
        return _answer({"live": True})

    async def readyz(_: web.Request) -> web.Response:
        return _answer({"ready": proxy.ready, "draining": proxy.draining}, status=200 if proxy.ready else 503)

    async def openapi(_: web.Request) -> web.Response:
        return _answer(description(needs_key=proxy.debug_key is not None))

    async def directory(request: web.Request) -> web.Response:
        paths = (
            STATE_PATH,
            REQUEST_PATH + "ID",
            PAGE_PATH,
            CONFIG_PATH,
            "/metrics",
            "/livez",
            "/readyz",
            "/openapi.json",
        )
        return _answer([f"{request.url.origin()}{path}" for path in paths])

    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        key = proxy.debug_key
        if key is not None:
            if request.path not in (*_OPEN_PATHS, PAGE_PATH) and not key.opens(presented_key(request.headers)):
                told = _answer({"error": "the key of the debug port is needed, as 'Authorization: Bearer KEY'"}, 401)
                told.headers["WWW-Authenticate"] = "Bearer"
                return told
        elif not _is_ours(request.headers.get("Host", ""), anywhere=not is_loopback(proxy.settings.debug_host)):
            return _answer({"error": f"call it by one of the names {', '.join(_LOCAL_NAMES)}"}, 403)
        try:
            return await handler(request)
        except web.HTTPException as error:
            told = _answer({"error": error.reason}, error.status)
            if "Allow" in error.headers:
                told.headers["Allow"] = error.headers["Allow"]
            return told

    app = web.Application(middlewares=[note_requests, guard], client_max_size=1 << 16)
    app[CONNECTIONS] = Connections(ConnectionLimits(_MOST_CONNECTIONS), driver.now)
    for path in ("/", "/debug", "/debug/", REQUEST_PATH.rstrip("/"), REQUEST_PATH):
        app.router.add_get(path, directory)
    live = LivePage(proxy, chronicle)
    for path, handler in (
        (PAGE_PATH, live.page),
        (EVENTS_PATH, live.events),
        (STATE_PATH, state),
        (REQUEST_PATH + "{id}", one_request),
        (CONFIG_PATH, config),
        ("/metrics", metrics),
        ("/livez", livez),
        ("/readyz", readyz),
        ("/openapi.json", openapi),
    ):
        app.router.add_get(path, handler)
    return app


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_ours(host: str, *, anywhere: bool) -> bool:
    """Whether a name by which we are called is none that somebody else can make point here."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    if name in _LOCAL_NAMES:
        return True
    try:
        return anywhere and bool(ip_address(name or ""))
    except ValueError:
        return False


def _shown(settings: Settings) -> dict[str, Any]:
    """The settings, without hashes of keys and what may stand before the host in a URL."""
    shown: dict[str, Any] = settings.model_dump(mode="json")
    for entry in shown["keys"].values():
        del entry["sha256"]
    for entry in shown["tenants"].values():
        entry["key_sha256"] = len(entry["key_sha256"])
    if (endpoint := shown["otlp_endpoint"]) is not None:
        parts = urlsplit(endpoint)
        shown["otlp_endpoint"] = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
    return shown


def _answer(value: Any, status: int = 200) -> web.Response:
    body = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    return web.Response(status=status, body=body, content_type="application/json")
