"""Everything that is not scheduled: any other path and method goes to an engine as it came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web
from multidict import CIMultiDict

from proxy.core.request import RejectReason
from proxy.server.access import CALLER
from proxy.server.answers import error_response, start
from proxy.server.bodies import read_body
from proxy.upstream.client import EngineClient, EngineError
from proxy.wire import headers as wire_headers
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
        model = _model(request, body)
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
                response = web.StreamResponse(
                    status=upstream.status,
                    reason=upstream.reason,
                    headers=CIMultiDict(
                        wire_headers.forward_response_headers(upstream.headers, keep_content_length=True)
                    ),
                )
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


def _model(request: web.Request, body: bytes) -> str:
    if request.content_type != "application/json" or not body:
        return ""
    try:
        return peek(body, chat=False).model
    except BadRequest:
        return ""
