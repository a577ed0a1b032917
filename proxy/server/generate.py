"""The way of a generation request: read, wait for the scheduler, send to an engine, relay (``relay``), account.

Bytes pass in both directions as they came; what is parsed is parsed beside them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from random import Random
from typing import TYPE_CHECKING

from aiohttp import hdrs, web
from multidict import CIMultiDict

from proxy.core.actions import Dispatch, Reject
from proxy.core.entrance import refused_unread
from proxy.core.prefix import NO_BLOCKS
from proxy.core.request import Outcome, Request, RequestClass
from proxy.server.access import CALLER, AccessError
from proxy.server.answers import STARTED, carried, error_response
from proxy.server.bodies import Body, looked_into, read_body, withholds_body
from proxy.server.relay import relay, replayed
from proxy.server.slices import Slicer, slice_headers
from proxy.server.waiting import as_event, decided
from proxy.telemetry.report import RequestReport
from proxy.upstream.client import Cutter, EngineClient, EngineError
from proxy.wire import headers as wire_headers
from proxy.wire.alias import rename_model
from proxy.wire.apis import APIS
from proxy.wire.coding import UnknownCodingError
from proxy.wire.errors import ErrorAnswer, LocalFailure, UpstreamFailure, answer, bad_request, model_not_found
from proxy.wire.keys import API_KEY
from proxy.wire.openai import BadRequest
from proxy.wire.prompt import plan_slices
from proxy.wire.usage import ask_for_usage
from proxy.wire.xargs import tell_tbt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.core.actions import Action
    from proxy.core.prefix import PromptBlocks
    from proxy.core.promptsize import PromptSize, PromptSizes
    from proxy.core.tiles import TileConfig
    from proxy.server.access import Caller
    from proxy.server.driver import Driver, Ticket
    from proxy.telemetry.chronicle import Chronicle
    from proxy.telemetry.metrics import Metrics
    from proxy.telemetry.tracing import Tracing
    from proxy.wire.fingerprint import Fingerprinter
    from proxy.wire.openai import RequestView
    from proxy.wire.tenants import Tenants

_log = logging.getLogger(__name__)

_BUSY = (429, 503)
"""Statuses by which an engine says that its own queue is full: it has not started the request."""
_NOT_DECODED = answer(LocalFailure.BAD_REQUEST, message="the request body cannot be decoded")


@dataclass(slots=True)
class Generator:
    """Serves the APIs by which text is generated (``wire.apis``)."""

    driver: Driver
    client: EngineClient
    metrics: Metrics
    tracing: Tracing
    sizes: PromptSizes
    fingerprinter: Fingerprinter
    classes: Mapping[str, RequestClass]
    default_class: RequestClass
    tenants: Tenants
    tiles: TileConfig | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of models."""
    chronicle: Chronicle | None = None
    asks_usage: bool = False
    """Whether engines are asked for the usage of streams whose clients did not ask."""
    comment_seconds: float | None = None
    """How often a client that waits for a stream is sent a comment; ``None``: never."""
    replays: int = 0
    """How often a request is sent again whose engine failed before any of its answer came, and may have begun it."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _random: Random = field(default_factory=Random)
    """For names of requests: nobody has to be kept from guessing them, and asking the system for each costs more."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request."""
        arrived_at = self.driver.now()
        api = APIS.get(request.rel_url.raw_path) or APIS[request.path]
        client_id = wire_headers.request_id(request.headers) or f"{self._random.getrandbits(128):032x}"
        report = RequestReport(
            request_id=str(next(self._numbers)),  # clients repeat theirs
            client_id=client_id,
            operation=api.operation,
            arrived_at=arrived_at,
            request_class=self.default_class,
            path=api.path,
        )
        if self.chronicle is not None:
            self.chronicle.begin(report)
        report.trace = self.tracing.begin(request.headers, api.path, time.time_ns())
        try:
            body = await self._read(request, report)
            view = api.peek(body.plain)
            caller = carried(request, CALLER)
            default = self.default_class if caller is None else self._class_of(caller, request, view.model)
            report.request_class = wire_headers.request_class(request.headers, self.classes, default)
            report.tenant = self.tenants.of(request.headers) if caller is None else caller.key.tenant
            forwarded = self._forwarded(request, client_id)
            if (model := self.aliases.get(view.model)) is not None:
                body.sent = body.plain = rename_model(body.plain, model)
                view = view._replace(model=model)
                forwarded.popall("Content-Encoding", None)
            self._note(report, view)
            if caller is not None:
                caller.reserve(report.prompt_tokens, report.most_output_tokens)
            self.tracing.inject(report.trace, forwarded)
            return await self._schedule(request, report, view.prompt, forwarded, body)
        except BadRequest as error:
            return self._refuse(report, LocalFailure.BAD_REQUEST, bad_request(error))
        except AccessError as refusal:
            return await _in_time(request, self._refuse(report, refusal.failure, refusal.told))
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(report, LocalFailure.BODY_TOO_LARGE, answer(LocalFailure.BODY_TOO_LARGE))
        except web.HTTPRequestTimeout:
            return self._refuse(report, LocalFailure.BODY_TOO_SLOW, answer(LocalFailure.BODY_TOO_SLOW))
        except web.RequestPayloadError:
            return self._refuse(report, LocalFailure.BAD_REQUEST, _NOT_DECODED)
        except UnknownCodingError:
            return self._refuse(report, LocalFailure.UNKNOWN_CODING, answer(LocalFailure.UNKNOWN_CODING))
        except (asyncio.CancelledError, ConnectionError):
            # The handler is cancelled, or a write fails, when the client leaves.
            report.outcome = report.outcome or Outcome.CLIENT_GONE
            raise
        except Exception:
            _log.exception("request %s (%s) failed through a fault of the proxy", report.request_id, client_id)
            report.outcome, report.reason = Outcome.REJECTED, str(LocalFailure.INTERNAL)
            raise
        finally:
            whole = None if report.stream else report.completion_tokens
            self.driver.end(report.request_id, whole, report.cached_tokens, served=_served(report))
            report.ended_at = self.driver.now()
            if (caller := carried(request, CALLER)) is not None:
                _settle(caller, report)
            self.metrics.record(report)
            if self.chronicle is not None:
                self.chronicle.finish(report)
            self.tracing.end(report.trace, report, report.ended_at, time.time_ns())

    def _refuse_unread(self, request: web.Request, report: RequestReport) -> None:
        """Let a request pass whose client waits for a word before it sends the body.

        Raises:
            AccessError: it is refused whatever the body holds.
        """
        scheduler, caller = self.driver.scheduler, carried(request, CALLER)
        report.tenant = self.tenants.of(request.headers) if caller is None else caller.key.tenant
        may_wait = wire_headers.may_wait(request.headers)
        smallest = Request(report.request_id, 1, may_wait=may_wait, tenant=report.tenant)
        now, draining = self.driver.now(), scheduler.draining
        unread = refused_unread(scheduler.ledger, scheduler.config, smallest, now, draining=draining)
        if unread is not None and (draining or self.driver.decides):
            refusal = self.driver.submit(unread, report.arrived_at).result()
            assert isinstance(refusal, Reject)
            raise AccessError(refusal.reason, _told(refusal))

    async def _read(self, request: web.Request, report: RequestReport) -> Body:
        if withholds_body(request):
            self._refuse_unread(request, report)
        sent = await read_body(request)
        if hdrs.CONTENT_ENCODING not in request.headers:
            return Body(sent, sent)
        return Body(sent, await looked_into(request.headers, sent, request.client_max_size))

    def _note(self, report: RequestReport, view: RequestView) -> None:
        report.model, report.stream, report.max_tokens = view.model, view.stream, view.max_tokens
        report.prompt_tokens, report.sequences = self.sizes.tokens(view.model, view.prompt), view.sequences
        report.times.tbt_seconds = report.request_class.tbt_seconds

    @staticmethod
    def _forwarded(request: web.Request, client_id: str) -> CIMultiDict[str]:
        """Return the headers that an engine gets."""
        kept = wire_headers.forward_request_headers(request.headers, keep_credentials=carried(request, CALLER) is None)
        forwarded = CIMultiDict(kept)
        forwarded["X-Request-Id"] = client_id
        forwarded["Accept-Encoding"] = "identity"  # a compressed stream could be relayed, but not measured
        return forwarded

    def _class_of(self, caller: Caller, request: web.Request, model: str) -> RequestClass:
        """Let the caller have the model, and return the class that its requests have by default."""
        caller.use_model(model)
        return self.classes.get(caller.use_class(request.headers.get("x-slo-class")) or "", self.default_class)

    async def _schedule(
        self,
        request: web.Request,
        report: RequestReport,
        prompt: PromptSize,
        forwarded: CIMultiDict[str],
        body: Body,
    ) -> web.StreamResponse:
        slicer = self._slicer(report, forwarded, body.plain)
        core_request = Request(
            report.request_id,
            report.prompt_tokens,
            model=report.model,
            max_tokens=report.max_tokens,
            request_class=report.request_class,
            sliceable=slicer is not None and slicer.plan.ids is not None,
            streamed=report.stream,
            size_bytes=body.size_bytes,
            fingerprint=self.fingerprinter.whole(report.path, _credentials(request), body.sent),
            may_wait=wire_headers.may_wait(request.headers),
            blocks=self._blocks(report, body.plain),
            tenant=report.tenant,
            sequences=report.sequences,
        )
        cutter, caller = Cutter(), carried(request, CALLER)
        if caller is not None:
            caller.hang(core_request.id)
        ticket = self.driver.submit(core_request, report.arrived_at, slicer.send if slicer else None, cutter.cut)
        try:
            if caller is not None:
                # No engine works for one that may be refused.
                caller.refuse_by(ticket, partial(self._tokenize, slicer, ticket))
            elif slicer is not None:
                self._tokenize(slicer, ticket)
            asks = self.asks_usage and report.stream and body.plain is body.sent and APIS[report.path].is_openai
            if asks and (asking := ask_for_usage(body.sent)) is not None:
                body.sent, report.asked_usage = asking, True
            return await self._dispatch(ticket, request, report, forwarded, body, cutter=cutter)
        finally:
            if slicer is not None:
                slicer.cancel()
            if report.prompt_tokens_told is not None and report.outcome is Outcome.COMPLETED:
                self.sizes.learn(report.model, prompt, report.prompt_tokens_told)

    def _tokenize(self, slicer: Slicer | None, ticket: Ticket) -> None:
        """Have an engine tell the prompt's tokens, if that is how it can be sliced and it has not been decided on."""
        if slicer is None or slicer.plan.ids is not None or ticket.done():
            return
        engine_id = self.driver.scheduler.place_unscheduled(slicer.report.model)
        if engine_id is not None:
            slicer.tokenize(engine_id)

    def _blocks(self, report: RequestReport, body: bytes) -> PromptBlocks:
        for engine in self.driver.scheduler.engines:
            if engine.limits.caches_prefixes:
                return self.fingerprinter.blocks(body, report.prompt_tokens, chat=report.operation == "chat")
        return NO_BLOCKS

    def _slicer(self, report: RequestReport, forwarded: CIMultiDict[str], body: bytes) -> Slicer | None:
        """Prepare to slice the prompt, if it is long enough to be worth it and can be cut at all."""
        if self.tiles is None or report.prompt_tokens < 2 * self.tiles.smallest_tokens:
            return None
        api = APIS[report.path]
        engines = self.driver.scheduler.engines
        if not api.is_openai or (engines and all(engine.plugin for engine in engines)):
            return None
        plan = plan_slices(body, chat=api.is_chat)
        if plan is None:
            return None
        headers = slice_headers(forwarded.items())
        return Slicer(report, plan, self.driver, self.client, self.metrics, self.tracing, headers)

    async def _dispatch(
        self,
        ticket: Ticket,
        request: web.Request,
        report: RequestReport,
        forwarded: CIMultiDict[str],
        body: Body,
        *,
        cutter: Cutter,
    ) -> web.StreamResponse:
        while True:
            decision = ticket.result() if ticket.done() else await self._decided(ticket, request, report)
            if isinstance(decision, Reject):
                told = _told(decision)
                if told.status == 404:
                    told = model_not_found(report.model)
                return await _in_time(request, self._refuse(report, decision.reason, told))
            assert isinstance(decision, Dispatch)
            engine_id = decision.engine_id
            report.engine_id, report.dispatched_at = engine_id, self.driver.now()
            report.dispatches += 1
            asked_seconds: float | None = None
            self.tracing.attempt(report, forwarded)
            try:
                async with self.client.send(
                    engine_id,
                    request.method,
                    request.rel_url.raw_path_qs,
                    forwarded.items(),
                    self._with_deadline(engine_id, report, body.sent, forwarded),
                    cutter=cutter,
                ) as upstream:
                    if upstream.status not in _BUSY:
                        body.forget()
                        forwarded.clear()
                        return await relay(request, report, upstream, self.driver, self.metrics)
                    asked_seconds = wire_headers.retry_after_seconds(upstream.headers)
                    self.tracing.turned_away(report, str(upstream.status), upstream.status)
            except EngineError as error:
                if error.failure is not UpstreamFailure.CONNECT_FAILED and report.replays < self.replays:
                    report.replays += 1
                elif error.failure is not UpstreamFailure.CONNECT_FAILED:
                    report.outcome, report.reason = Outcome.ENGINE_FAILED, str(error.failure)
                    report.status = answer(error.failure).status
                    return await _in_time(request, _error(report, answer(error.failure)))
                self.tracing.turned_away(report, str(error.failure))
            # The engine provably has not started, or the operator takes a second generation: back to its old place.
            report.engine_id = None
            cutter.renew()  # its removal has nothing to do with the next one
            ticket = self.driver.not_started(report.request_id, asked_seconds)

    def _with_deadline(self, engine_id: str, report: RequestReport, body: bytes, forwarded: CIMultiDict[str]) -> bytes:
        """Return the body as an engine gets it: with the class's TBT deadline where our plugin asks for that."""
        engine, tbt_seconds = self.driver.scheduler.ledger.engines.get(engine_id), report.request_class.tbt_seconds
        if engine is None or engine.plugin is None or not engine.plugin.takes_deadlines or tbt_seconds is None:
            return body
        return body if "Content-Encoding" in forwarded else tell_tbt(body, tbt_seconds)

    async def _decided(self, ticket: Ticket, request: web.Request, report: RequestReport) -> Action:
        if self.comment_seconds is None or not report.stream:
            return await ticket
        return await decided(ticket, request, self.comment_seconds, {"X-Request-Id": report.client_id})

    def _refuse(self, report: RequestReport, reason: str, told: ErrorAnswer) -> web.Response:
        report.outcome, report.reason, report.status = Outcome.REJECTED, str(reason), told.status
        return _error(report, told)


async def _in_time(request: web.Request, response: web.Response) -> web.StreamResponse:
    """Answer by ``response``, or by an event where the head of a stream is out already."""
    started: web.StreamResponse | None = carried(request, STARTED)
    if started is None:
        return response
    assert isinstance(response.body, bytes)
    await started.write(as_event(response.body, named=not APIS[request.path].is_openai))
    await started.write_eof()
    return started


def _told(refusal: Reject) -> ErrorAnswer:
    after, wait = refusal.retry_after_seconds, refusal.estimated_wait_seconds
    return answer(refusal.reason, retry_after_seconds=after, estimated_wait_seconds=wait)


def _served(report: RequestReport) -> bool | None:
    """Whether the engine did what it should; ``None``: the client left, the proxy refused, or it is not to blame."""
    match report.outcome:
        case Outcome.COMPLETED:
            return True
        case Outcome.ENGINE_ERROR:
            return None if report.status == HTTPStatus.OK else (report.status or 0) < HTTPStatus.INTERNAL_SERVER_ERROR
        case Outcome.ENGINE_FAILED:
            return None if report.reason == UpstreamFailure.REMOVED else False
        case _:
            return None


def _error(report: RequestReport, told: ErrorAnswer) -> web.Response:
    response = error_response(told, report.path)
    response.headers["X-Request-Id"] = report.client_id
    response.headers.update(replayed(report))
    return response


def _settle(caller: Caller, report: RequestReport) -> None:
    """Charge what was used: all that an engine did, also for a client that left, but not where the engine failed."""
    worked = report.engine_id is not None and report.outcome in (Outcome.COMPLETED, Outcome.CLIENT_GONE)
    if worked or report.times.chunks:
        caller.settle(report.prompt_tokens, report.output_tokens)


def _credentials(request: web.Request) -> bytes:
    authorization, key = request.headers.get(hdrs.AUTHORIZATION, ""), request.headers.get(API_KEY, "")
    return f"{authorization}\n{key}".encode("utf-8", "surrogateescape")
