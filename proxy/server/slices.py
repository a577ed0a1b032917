"""Sending prompts ahead in slices: the live side of ``core.tiles``."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from proxy.core.events import SliceEnded, Tokenized
from proxy.server.tasks import Tasks
from proxy.upstream.client import EngineClient, EngineError
from proxy.wire.openai import read_usage
from proxy.wire.prompt import SlicePlan, read_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.core.actions import Slice
    from proxy.server.driver import Driver
    from proxy.telemetry.metrics import Metrics
    from proxy.telemetry.report import RequestReport
    from proxy.telemetry.tracing import Tracing

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Slicer:
    """The slices of one request. Whatever goes wrong with them costs a prefill done twice, never the request."""

    report: RequestReport
    plan: SlicePlan
    driver: Driver
    client: EngineClient
    metrics: Metrics
    tracing: Tracing
    headers: list[tuple[str, str]]
    _tasks: Tasks = field(default_factory=Tasks)
    _pending: dict[str, Slice] = field(default_factory=dict)

    def tokenize(self, engine_id: str) -> None:
        """Ask an engine for the prompt's token ids; the request may be sliced from then on."""
        self._tasks.spawn(self._tokenize(engine_id), f"tokenize {self.report.request_id}")

    def send(self, piece: Slice) -> None:
        """Have the engine cache a prefix."""
        self._pending[piece.slice_id] = piece
        self._tasks.spawn(self._send(piece), f"slice {piece.slice_id}")

    def cancel(self) -> None:
        """Abort whatever is on its way: the client is gone."""
        self._tasks.cancel()
        for piece in list(self._pending.values()):  # a task that has not begun yet never reaches its own end
            self._end(piece, cached=False)

    async def _tokenize(self, engine_id: str) -> None:
        try:
            async with self.client.send(
                engine_id, "POST", "/tokenize", self.headers, self.plan.tokenize_body
            ) as answer:
                body = await answer.read()
                ids = read_token_ids(body) if answer.status == HTTPStatus.OK else None
        except EngineError as error:
            _log.info("tokenizing %s failed: %s", self.report.request_id, error.failure)
            return
        if ids is not None:
            self.plan.ids = ids
            self.driver.feed(Tokenized(self.report.request_id, len(ids)))

    async def _send(self, piece: Slice) -> None:
        cached, found = False, None
        sent = self.plan.body(piece.tokens)
        with self.tracing.slice(self.report, piece) as span:
            headers = [*self.headers, *span.headers.items()]
            try:
                async with self.client.send(piece.engine_id, "POST", "/v1/completions", headers, sent) as answer:
                    span.status = answer.status
                    body = await answer.read()
                    if answer.status == HTTPStatus.OK:
                        found = read_usage(body).cached_tokens
                        # Without --enable-prompt-tokens-details the engine does not tell; then it is believed.
                        cached = found is None or 2 * found >= piece.held_tokens
                        self.metrics.record_slice(piece.tokens - piece.held_tokens, piece.held_tokens, found, len(sent))
                    else:
                        span.failure = str(answer.status)
            except EngineError as error:
                span.failure = str(error.failure)
                _log.info("slice %s failed: %s", piece.slice_id, error.failure)
            finally:
                span.cached, span.cached_tokens = cached, found
                self._end(piece, cached=cached, found_tokens=found)

    def _end(self, piece: Slice, *, cached: bool, found_tokens: int | None = None) -> None:
        if self._pending.pop(piece.slice_id, None) is None:
            return
        scheduler = self.driver.scheduler
        paid = scheduler.slices_pay(piece.engine_id, self.driver.now())
        self.driver.feed(SliceEnded(piece, cached, found_tokens))
        if paid and not scheduler.slices_pay(piece.engine_id, self.driver.now()):
            _log.warning(
                "engine %s does not keep in its cache what slices bring: prompts go to it whole for a while",
                piece.engine_id,
            )


def slice_headers(forwarded: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The client's headers that a slice needs (credentials, routing to a data-parallel rank), without its identity."""
    own = {"x-request-id", "traceparent", "tracestate", "content-type", "content-encoding", "accept"}
    return [*((n, v) for n, v in forwarded if n.lower() not in own), ("Content-Type", "application/json")]
