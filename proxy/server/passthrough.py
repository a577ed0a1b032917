"""Everything that is not scheduled: any other path and method goes to an engine as it came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.core.events import Passed
from proxy.core.promptsize import PRIOR
from proxy.core.request import RejectReason
from proxy.server.access import CALLER
from proxy.server.answers import carried, error_response, relayed, start
from proxy.server.bodies import UPLOADS, looked_into, read_body
from proxy.server.websocket import wants_websocket
from proxy.upstream.client import EngineClient, EngineError
from proxy.wire import headers as wire_headers
from proxy.wire.alias import rename_model
from proxy.wire.coding import UnknownCodingError
from proxy.wire.errors import AccessFailure, LocalFailure, answer
from proxy.wire.keys import is_engine_administration
from proxy.wire.multipart import model_of_form, rename_model_of_form
from proxy.wire.openai import BadRequest, peek, read_usage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.server.driver import Driver
    from proxy.server.websocket import WebSockets
    from proxy.upstream.client import EngineAnswer

_CHEAP = ("GET", "HEAD", "OPTIONS", "DELETE")
"""Methods that give an engine next to nothing to do."""
_ERROR = 400
_MOST_KEPT_BYTES = 1 << 20
"""Of an answer to a client with a key, to see what is charged."""
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
        if carried(request, CALLER) is None and not self.administration and is_engine_administration(request.path):
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
        with request.app[UPLOADS].held(len(body)):
            return await self._relay(request, body)

    async def _relay(self, request: web.Request, body: bytes) -> web.StreamResponse:
        model, prompt_tokens = await _look(request, body)
        caller = carried(request, CALLER)
        if caller is not None:
            caller.use_model(model, request.method)
        if caller is not None and prompt_tokens:
            # As output, of which a whole bucket will do: it is a guess, and no reason to refuse a request for good.
            caller.reserve(0, prompt_tokens)
            await caller.judged()
        forwarded = wire_headers.forward_request_headers(request.headers, keep_credentials=caller is None)
        if (named := self.aliases.get(model)) is not None:
            body, model = await _renamed(request, body, named), named
            forwarded = [(name, value) for name, value in forwarded if name.lower() != "content-encoding"]
        engine_id = self._place(model)
        if engine_id is None:
            return error_response(answer(RejectReason.NO_ENGINE), request.path)
        counts = request.method not in _CHEAP
        if counts:
            self.driver.feed(Passed(engine_id, begins=True))
        used = Used(prompt_tokens)
        try:
            async with self.client.send(
                engine_id, request.method, request.rel_url.raw_path_qs, forwarded, body
            ) as upstream:
                used.begin(upstream)
                response = relayed(request, upstream)
                await start(request, response)
                try:
                    async for data in upstream.chunks():
                        await response.write(data)
                        used.feed(data)
                except EngineError:
                    if request.transport is not None:
                        request.transport.abort()  # a cut of our own is the only honest end
                    return response
                used.end()
                await response.write_eof()
                return response
        except EngineError as error:
            used.tokens = 0
            return error_response(answer(error.failure), request.path)
        finally:
            if counts:
                self.driver.feed(Passed(engine_id, begins=False))
            if caller is not None:
                caller.settle(used.tokens, 0)

    def _place(self, model: str) -> str | None:
        scheduler = self.driver.scheduler
        # Where none serves the model, any engine can say that it lacks it.
        return scheduler.place_unscheduled(model) or scheduler.place_unscheduled("")

    async def _relay_websocket(self, request: web.Request) -> web.StreamResponse:
        model = request.query.get("model", "")
        caller = carried(request, CALLER)
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


class Used:
    """Tokens that a key is charged for a request that passes the queue by.

    They are what the engine tells; a guess, where its answer is too long to be kept, is no JSON or never comes to its
    end; and none where it has failed, or tells none in an answer that was understood, as that to ``/tokenize``.
    """

    def __init__(self, guess: int) -> None:
        self.tokens = guess
        self._kept: bytearray | None = None

    def begin(self, upstream: EngineAnswer) -> None:
        """Look at the head of the answer."""
        if upstream.status >= _ERROR:
            self.tokens = 0
        elif upstream.content_type == "application/json" and "Content-Encoding" not in upstream.headers:
            self._kept = bytearray()

    def feed(self, data: bytes) -> None:
        """Look at more of it."""
        if self._kept is not None:
            self._kept += data
            if len(self._kept) > _MOST_KEPT_BYTES:
                self._kept = None

    def end(self) -> None:
        """It has come to its end."""
        if self._kept:
            told = read_usage(bytes(self._kept))
            self.tokens = (told.prompt_tokens or 0) + (told.completion_tokens or 0)


async def _look(request: web.Request, body: bytes) -> tuple[str, int]:
    """Return the model that a body names, and about how many tokens are in it; what is not understood has none."""
    kind = request.content_type
    if not body or kind not in ("application/json", "multipart/form-data"):
        return "", 0
    try:
        plain = await looked_into(request.headers, body, request.client_max_size)
        if kind != "application/json":
            return model_of_form(plain, request.headers["Content-Type"]), 0
        view = peek(plain, chat=False)
    except (BadRequest, web.RequestPayloadError, web.HTTPRequestEntityTooLarge, UnknownCodingError):
        return "", 0  # whatever is wrong with it, the engine will say
    return view.model, PRIOR.tokens(view.prompt)


async def _renamed(request: web.Request, body: bytes, model: str) -> bytes:
    """Return a body that ``_look`` understood, not compressed and with another model in it."""
    plain = await looked_into(request.headers, body, request.client_max_size)
    if request.content_type == "application/json":
        return rename_model(plain, model)
    return rename_model_of_form(plain, request.headers["Content-Type"], model)
