"""Everything that is not scheduled: any other path and method goes to an engine as it came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.core.request import RejectReason
from proxy.server.access import CALLER
from proxy.server.answers import error_response, relayed, start
from proxy.server.bodies import looked_into, read_body
from proxy.upstream.client import EngineClient, EngineError
from proxy.wire import headers as wire_headers
from proxy.wire.coding import UnknownCodingError
from proxy.wire.errors import LocalFailure, answer
from proxy.wire.openai import BadRequest, peek

if TYPE_CHECKING:
    from proxy.core.scheduler import Scheduler


@dataclass(slots=True)
class PassThrough:
    """Relays a request to the engine that serves its model and has the least to do."""

    scheduler: Scheduler
    client: EngineClient

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Relay one request and its answer."""
        try:
            body = await read_body(request)
        except web.HTTPRequestTimeout:
            return error_response(answer(LocalFailure.BODY_TOO_SLOW))
        except web.HTTPRequestEntityTooLarge:
            return error_response(answer(LocalFailure.BODY_TOO_LARGE))
        except web.RequestPayloadError:
            return error_response(answer(LocalFailure.BAD_REQUEST, message="the request body cannot be decoded"))
        model = await _model(request, body)
        caller = request.get(CALLER)
        if caller is not None:
            caller.use_model(model, request.method)
        engine_id = self.scheduler.place_unscheduled(model)
        engine_id = engine_id or self.scheduler.place_unscheduled("")  # the engine itself says that it lacks the model
        if engine_id is None:
            return error_response(answer(RejectReason.NO_ENGINE))
        forwarded = wire_headers.forward_request_headers(request.headers, keep_credentials=caller is None)
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
            return error_response(answer(error.failure))


async def _model(request: web.Request, body: bytes) -> str:
    if request.content_type != "application/json" or not body:
        return ""
    try:
        return peek(await looked_into(request.headers, body, request.client_max_size), chat=False).model
    except (BadRequest, web.RequestPayloadError, web.HTTPRequestEntityTooLarge, UnknownCodingError):
        return ""  # whatever is wrong with it, the engine will say
