"""The relay of one answer from an engine to its client.

Bytes pass as they came; what is parsed is parsed beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import HttpVersion11
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE

from proxy.core.request import Outcome
from proxy.server.access import CALLER
from proxy.server.answers import STARTED, carried, join_head, relayed, send_whole
from proxy.server.downstream import Downstream
from proxy.server.meter import StreamMeter
from proxy.server.waiting import as_event
from proxy.upstream.client import EngineAnswer, EngineError
from proxy.wire.apis import APIS
from proxy.wire.errors import UpstreamFailure, answer
from proxy.wire.headers import plain_head
from proxy.wire.timing import SERVER_TIMING, queue_timing, wants_timing
from proxy.wire.usage import UsageRemover

if TYPE_CHECKING:
    from aiohttp import web

    from proxy.server.driver import Driver
    from proxy.telemetry.metrics import Metrics
    from proxy.telemetry.report import RequestReport
    from proxy.wire.apis import Api

_SERVER = f"Server: {SERVER_SOFTWARE}".encode()
_ERROR = 400
_MAX_USAGE_BODY_BYTES = 1 << 20
"""A longer answer that is not streamed passes without a look at its usage."""


async def relay(
    request: web.Request, report: RequestReport, upstream: EngineAnswer, driver: Driver, metrics: Metrics
) -> web.StreamResponse:
    """Pass an engine's answer on, whole or as it comes, and note in ``report`` what came of it.

    Raises:
        ConnectionError: the client is gone.
    """
    report.status = upstream.status
    api = APIS[report.path]
    streamed = upstream.content_type == "text/event-stream"
    if not streamed and upstream.is_whole and (head := _plain_head(request, report, upstream, driver)) is not None:
        body = upstream.take()
        response = send_whole(request, head, body)
        _conclude(report, api, body)
        if request.protocol.writing_paused:
            await request.writer.drain()
        return response
    remover = UsageRemover() if report.asked_usage and streamed else None
    response = await _begin(request, report, upstream, without_usage=remover is not None)
    upstream.forget_head()
    as_one_event = response.prepared and not streamed
    histogram, blame = metrics.tbt(report.request_class.name), driver.scheduler.blame
    meter = StreamMeter(report, histogram, driver.on_tokens, blame, api.read_event)
    kept = None if streamed or as_one_event else bytearray()
    failure: UpstreamFailure | None = None
    request[STARTED] = response
    try:
        if streamed:
            stream = Downstream(response, meter, driver, remover)
            await stream.begin(request, upstream.take())
            await stream.go_on(upstream)
        elif as_one_event:
            named = not api.is_openai and upstream.status >= _ERROR
            await response.write(as_event(await upstream.read(), named=named))
        else:
            if upstream.has_more:
                join_head(response)
            await response.prepare(request)
            async for data in upstream.chunks():
                await response.write(data)
                if kept is not None:
                    kept += data
                    if len(kept) > _MAX_USAGE_BODY_BYTES:
                        kept = None
    except EngineError as error:
        failure = error.failure
    else:
        if streamed and upstream.ends_with_connection and not meter.complete:
            failure = UpstreamFailure.CUT_MID_STREAM
    if failure is not None:
        report.outcome, report.reason = Outcome.ENGINE_FAILED, str(failure)
        frame = api.error_frame(answer(failure))
        await _tell_cut(request, response, meter if streamed or as_one_event else None, frame)
        return response
    _conclude(report, api, bytes(kept or b""), is_error=meter.error)
    await response.write_eof()
    return response


def _conclude(report: RequestReport, api: Api, body: bytes, *, is_error: bool = False) -> None:
    """Note that an answer has been passed on to its end; ``body`` is looked into for its usage, if there is any."""
    assert report.status is not None
    if report.status >= _ERROR or is_error:
        report.outcome, report.reason = Outcome.ENGINE_ERROR, f"engine_{report.status}"
    else:
        report.outcome = Outcome.COMPLETED
    if body and len(body) <= _MAX_USAGE_BODY_BYTES:
        usage = api.read_usage(body)
        report.prompt_tokens_told, report.completion_tokens, report.cached_tokens = usage
        report.prompt_tokens = report.prompt_tokens_told or report.prompt_tokens


def _plain_head(request: web.Request, report: RequestReport, upstream: EngineAnswer, driver: Driver) -> bytes | None:
    """Return the head of an answer that can be sent at once, as aiohttp would make it; ``None`` if it is to."""
    if (
        not request.keep_alive
        or request.version != HttpVersion11
        or carried(request, STARTED) is not None
        or report.replays
        or wants_timing(request.headers)
        or driver.scheduler.draining
    ):
        return None
    caller = carried(request, CALLER)
    defaults = {
        b"x-request-id": f"X-Request-Id: {report.client_id}".encode(),
        b"date": f"Date: {rfc822_formatted_time()}".encode(),
        b"server": _SERVER,
    }
    instead = {} if caller is None else caller.headers()
    return plain_head(upstream.status, upstream.reason, upstream.raw_headers, defaults, instead)


def replayed(report: RequestReport) -> dict[str, str]:
    """The header that marks an answer before which another engine may have worked on the request."""
    return {"x-slai-replayed": str(report.replays)} if report.replays else {}


async def _begin(
    request: web.Request, report: RequestReport, upstream: EngineAnswer, *, without_usage: bool
) -> web.StreamResponse:
    """Make the client's answer, or take the one whose head is out already."""
    started: web.StreamResponse | None = carried(request, STARTED)
    if started is not None:
        if report.replays:
            await started.write(b": replayed\n\n")
        return started
    response = relayed(request, upstream)
    response.headers.setdefault("X-Request-Id", report.client_id)
    if report.replays:
        response.headers.update(replayed(report))
    if wants_timing(request.headers):
        response.headers.add(SERVER_TIMING, queue_timing(report.queue_seconds or 0.0))
    if without_usage:
        response.headers.popall("Content-Length", None)
    return response


async def _tell_cut(
    request: web.Request, response: web.StreamResponse, meter: StreamMeter | None, frame: bytes
) -> None:
    """End an answer that the engine cut: one error event in a stream, a cut of our own in anything else."""
    if meter is None or response.content_length is not None:
        # A body of stated length cannot say that it is incomplete, but a connection that closes too early does.
        if request.transport is not None:
            request.transport.abort()
        return
    await response.write(frame if meter.at_boundary else b"\n\n" + frame)
    await response.write_eof()
