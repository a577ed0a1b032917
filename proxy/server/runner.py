"""How connections are served: aiohttp's way, but for two things.

A client whose bytes are no HTTP is told so in our own words. And requests to the paths that nearly all go to pass by
aiohttp's search for a route, which takes longer than all else that it does between a request's head and its handler.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_server import Server
from aiohttp.web_urldispatcher import PlainResource, UrlMappingMatchInfo

from proxy.server.answers import error_response
from proxy.wire.errors import LocalFailure, answer

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Messages(list[Any]):
    """Requests that wait on a connection, in what aiohttp keeps them.

    There is hardly ever more than one, for which a deque has room for 64. And their headers are kept but once: as long
    as a stream lasts, they are there.
    """

    __slots__ = ()

    def append(self, item: Any) -> None:
        message, payload = item
        if isinstance(message, RawRequestMessage):
            message = message._replace(raw_headers=())
        super().append((message, payload))

    def popleft(self) -> Any:
        return self.pop(0)


class _Never:
    """In the place of a timer; ``Connections`` ends what is idle, and needs none for each."""

    def cancel(self) -> None:
        """There is nothing to cancel."""


_NEVER: Any = _Never()


class _Connection(RequestHandler):
    """One client's connection."""

    __slots__ = ()

    def __init__(self, manager: Server, *, loop: asyncio.AbstractEventLoop, **more: Any) -> None:
        super().__init__(manager, loop=loop, **more)
        self._messages: Any = _Messages()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
            self._keepalive_handle = _NEVER

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what no handler has answered: bytes that are no HTTP, or a fault of the server.

        aiohttp tells the client, in plain text, and the log what the bytes were; they may be a prompt or a key.
        """
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        _log.debug("%s sent what is no HTTP: %s", request.remote, type(exc).__name__)
        reason = LocalFailure.HEAD_TOO_LARGE if isinstance(exc, LineTooLong) else LocalFailure.MALFORMED
        response = error_response(answer(reason))
        response.force_close()
        return response


class _Server(Server):
    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


def by_plain_paths(app: web.Application, otherwise: Handler) -> Handler:
    """Return a handler of all requests to an application, which finds those at once that are posted to a plain path.

    What is found for them is the same for all, and so can be made once. Other requests go to ``otherwise``, as do all
    where there is not exactly one middleware.
    """
    if len(app.middlewares) != 1:
        return otherwise
    middleware: Any = app.middlewares[0]
    found: dict[str, UrlMappingMatchInfo] = {}
    for route in app.router.routes():
        if route.method == hdrs.METH_POST and isinstance(route.resource, PlainResource):
            match = found[route.resource.canonical] = UrlMappingMatchInfo({}, route)
            match.add_app(app)
            match.freeze()

    def handle(request: web.Request) -> Awaitable[web.StreamResponse]:
        match = found.get(request.rel_url.raw_path) if request.method == hdrs.METH_POST else None
        if match is None or hdrs.EXPECT in request.headers:
            return otherwise(request)
        request._match_info = match  # noqa: SLF001 - as aiohttp does it
        answer: Awaitable[web.StreamResponse] = middleware(request, match.handler)
        return answer

    return handle


class Runner(web.AppRunner):
    """Serves an application; takes what ``web.AppRunner`` takes.

    Bodies of requests are not inflated: they pass as they come.
    """

    __slots__ = ()

    def __init__(self, app: web.Application, **more: Any) -> None:
        super().__init__(app, access_log=None, handler_cancellation=True, auto_decompress=False, **more)

    async def _make_server(self) -> Server:
        made = await super()._make_server()
        handler: Any = by_plain_paths(self.app, made.request_handler)
        return _Server(
            handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,  # noqa: SLF001 - aiohttp has no other place to say what a connection is
            **made._kwargs,  # noqa: SLF001
        )
