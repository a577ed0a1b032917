"""Everything that is not scheduled: any other path and method goes to an engine as it came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.core.events import Passed
from proxy.core.request import RejectReason
from proxy.server.access import CALLER
from proxy.server.answers import error_response, relayed, start
from proxy.server.bodies import looked_into, read_body
from proxy.server.websocket import wants_websocket
from proxy.upstream.client import EngineClient, EngineError
from proxy.wire import headers as wire_headers
from proxy.wire.alias import rename_model
from proxy.wire.coding import UnknownCodingError
from proxy.wire.errors import AccessFailure, LocalFailure, answer
from proxy.wire.keys import is_engine_administration
from proxy.wire.openai import BadRequest, peek

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.server.driver import Driver
    from proxy.server.websocket import WebSockets

_CHEAP = ("GET", "HEAD", "OPTIONS", "DELETE")
"""Methods that give an engine next to nothing to do."""
_NOT_FOR_ALL = (
    "this path administers the engine, or goes past the queue: call the engine itself, give out an API key with "
    "admin: true, or start the proxy with --engine-administration"
)


@dataclass(slots=True)
class PassThrough:
    """Relays a request to the engine that serves its model and has the least to do."""

    driver: Driver
    client: EngineClient
    sockets: WebSockets
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of models."""
    administration: bool = False
    """Whether clients without an API key may administer engines."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Relay one request and its answer."""
        if CALLER not in request and not self.administration and is_engine_administration(request.path):
            return error_response(answer(AccessFailure.PATH, message=_NOT_FOR_ALL), request.path)
        if wants_websocket(request):
            return await self._relay_websocket(request)
        try:
            body = await read_body(request)
        except web.HTTPRequestTimeout:
            return error_response(answer(LocalFailure.BODY_TOO_SLOW), request.path)
        except web.HTTPRequestEntityTooLarge:
            return error_response(answer(LocalFailure.BODY_TOO_LARGE), request.path)
        except web.RequestPayloadError:
            told = answer(LocalFailure.BAD_REQUEST, message="the request body cannot be decoded")
            return error_response(told, request.path)
        model = await _model(request, body)
        caller = request.get(CALLER)
        if caller is not None:
            caller.use_model(model, request.method)
        if (named := self.aliases.get(model)) is not None:
            body, model = rename_model(await looked_into(request.headers, body, request.client_max_size), named), named
        engine_id = self._place(model)
        if engine_id is None:
            return error_response(answer(RejectReason.NO_ENGINE), request.path)
        forwarded = wire_headers.forward_request_headers(request.headers, keep_credentials=caller is None)
        if named is not None:
            forwarded = [(name, value) for name, value in forwarded if name.lower() != "content-encoding"]
        counts = request.method not in _CHEAP
        if counts:
            self.driver.feed(Passed(engine_id, begins=True))
        try:
            async with self.client.send(
                engine_id, request.method, request.rel_url.raw_path_qs, forwarded, body
            ) as upstream:
                response = relayed(request, upstream)
                await start(request, response)
                try:
                    async for data in upstream.chunks():
                        await response.write(data)
                except EngineError:
                    if request.transport is not None:
                        request.transport.abort()  # a cut of our own is the only honest end
                    return response
                await response.write_eof()
                return response
        except EngineError as error:
            return error_response(answer(error.failure), request.path)
        finally:
            if counts:
                self.driver.feed(Passed(engine_id, begins=False))

    def _place(self, model: str) -> str | None:
        scheduler = self.driver.scheduler
        # Where none serves the model, any engine can say that it lacks it.
        return scheduler.place_unscheduled(model) or scheduler.place_unscheduled("")

    async def _relay_websocket(self, request: web.Request) -> web.StreamResponse:
        model = request.query.get("model", "")
        caller = request.get(CALLER)
        if caller is not None:
            caller.use_model(model)
        model = self.aliases.get(model, model)
        engine_id = self._place(model)
        if engine_id is None:
            return error_response(answer(RejectReason.NO_ENGINE), request.path)
        self.driver.feed(Passed(engine_id, begins=True))
        try:
            return await self.sockets.relay(request, engine_id, keep_credentials=caller is None)
        finally:
            self.driver.feed(Passed(engine_id, begins=False))


async def _model(request: web.Request, body: bytes) -> str:
    if request.content_type != "application/json" or not body:
        return ""
    try:
        return peek(await looked_into(request.headers, body, request.client_max_size), chat=False).model
    except (BadRequest, web.RequestPayloadError, web.HTTPRequestEntityTooLarge, UnknownCodingError):
        return ""  # whatever is wrong with it, the engine will say
