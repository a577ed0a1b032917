"""What goes on, for whoever runs the proxy: the scheduler's state, and the life of single requests.

It has a port of its own, on the loopback interface and only if asked for: on the port of the clients anybody could
look after the requests of others, and an address tells nothing there, as a web server in front makes all of them its
own. The name by which it is called must be a local one, too, or a page in the operator's browser could read it
(DNS rebinding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from proxy.core.snapshot import view_state, view_waiting

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proxy.server.driver import Driver
    from proxy.telemetry.chronicle import Chronicle

HOST = "127.0.0.1"
STATE_PATH = "/debug/state"
REQUEST_PATH = "/debug/requests/"
_LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")


def create_debug_app(driver: Driver, chronicle: Chronicle) -> web.Application:
    """Build the application with ``/debug/state`` and ``/debug/requests/ID``."""

    async def state(_: web.Request) -> web.Response:
        return _answer(view_state(driver.scheduler, driver.now()))

    async def one_request(request: web.Request) -> web.Response:
        story, now = chronicle.find(request.match_info["id"]), driver.now()
        if story is None:
            return _answer({"error": "no such request: it has never been here, or has ended long ago"}, status=404)
        waits = view_waiting(driver.scheduler, story.request_id, now)
        return _answer(story.tell(now) | ({} if waits is None else {"waits": waits}))

    async def directory(request: web.Request) -> web.Response:
        return _answer([f"{request.url.origin()}{path}" for path in (STATE_PATH, REQUEST_PATH + "ID")])

    app = web.Application(middlewares=[_for_local_names])
    for path in ("/", "/debug", "/debug/", REQUEST_PATH.rstrip("/"), REQUEST_PATH):
        app.router.add_get(path, directory)
    app.router.add_get(STATE_PATH, state)
    app.router.add_get(REQUEST_PATH + "{id}", one_request)
    return app


@web.middleware
async def _for_local_names(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        name = urlsplit(f"//{request.headers.get('Host', '')}").hostname
    except ValueError:
        name = None
    if name not in _LOCAL_NAMES:
        return web.Response(status=403, text=f"call it by one of the names {', '.join(_LOCAL_NAMES)}\n")
    return await handler(request)


def _answer(value: Any, status: int = 200) -> web.Response:
    body = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    return web.Response(status=status, body=body, content_type="application/json")
