"""One streaming request to an OpenAI-compatible server, with the arrival of every token noted.

How a request ends is told by ``Result.error``, in words that repeat and so can be counted:

``http 503``
    The server answered with that status.
``connect``
    No connection to the server.
``cut``
    The stream ended, or the connection broke, before ``[DONE]``.
``error event``
    The server reported an error inside the stream.
``not a stream``
    An answer that is no event stream, although one was asked for.
``no token``
    The stream ended properly and had no token in it.
``timeout``
    Not finished in the time allowed.
``unfinished``
    The run was interrupted first.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.content import as_json, prompt_ids
from loadgen.texts import TextLengths
from proxy.upstream.client import EngineError
from proxy.vllm_plugin.options import TBT_ARGUMENT
from proxy.wire.errors import UpstreamFailure
from proxy.wire.openai import read_chunk
from proxy.wire.sse import EventSplitter
from proxy.wire.tenants import TENANT_HEADER
from proxy.wire.timing import ASK_TIMING, queue_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadgen.results import Result
    from proxy.sim.workload import ScheduledRequest
    from proxy.upstream.client import EngineAnswer, EngineClient

_LONGEST_REFUSAL_BYTES = 1 << 16

_ERRORS = {UpstreamFailure.CONNECT_FAILED: "connect", UpstreamFailure.TIMED_OUT: "timeout"}


_ABOUT = TextLengths()


class _ErrorEvent(Exception):  # noqa: N818 - what it stands for
    """The server reported an error inside the stream."""


async def _never_full() -> None:
    """Wait for room, of which there always is enough."""


class Api(StrEnum):
    """The endpoint that a run uses."""

    COMPLETIONS = "completions"
    """Prompts are token ids, so their lengths are exact."""
    CHAT = "chat"
    """Prompts are text: of exact length where the server tells how long they are, else of about the right one."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Api.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Client:
    """What all requests of a run have in common.

    ``clock`` gives the seconds since the run's start in the run's own time, which passes ``time_scale`` times as
    fast as the server's; ``timeout_seconds`` is in the run's time too. ``nonce`` goes into every prompt, so that a
    server's prefix cache is no help, neither within a run nor in the next one with the same seed.
    """

    servers: EngineClient
    clock: Callable[[], float]
    model: str
    nonce: int
    api: Api = Api.COMPLETIONS
    time_scale: float = 1.0
    timeout_seconds: float = 600.0
    send_class: bool = False
    """Whether the class's name is sent beside its deadlines; a proxy that does not know it refuses the request."""
    standard: bool = False
    """Whether only fields of OpenAI's own API are sent; outputs end where the model ends them, then."""
    texts: TextLengths = _ABOUT
    """How long the texts of chats are."""
    headers: tuple[tuple[str, str], ...] = (
        ("Content-Type", "application/json"),
        ("Accept-Encoding", "identity"),  # A compressed stream comes in blocks, not in tokens.
        (ASK_TIMING, "1"),
    )

    def prepare(self, scheduled: ScheduledRequest) -> bytes:
        """Build the body of a request: some 0.1 ms for a long prompt, so do it before the time to send."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": scheduled.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.standard:
            body |= {"min_tokens": scheduled.output_tokens, "ignore_eos": True}
            if (tbt_seconds := scheduled.request_class.tbt_seconds) is not None:
                # For engines with our scheduler inside, if nobody in front tells them; vLLM's own looks past it.
                body["vllm_xargs"] = {TBT_ARGUMENT: 1000 * tbt_seconds / self.time_scale}
        if self.api is Api.CHAT:
            body["messages"] = [{"role": "user", "content": self.texts.text(scheduled, self.nonce)}]
            return msgspec.json.encode(body)
        # The ids of a long prompt are nearly all of the body, and come as JSON already.
        return msgspec.json.encode(body)[:-1] + b',"prompt":' + as_json(prompt_ids(scheduled, self.nonce)) + b"}"

    async def send(self, base_url: str, record: Result, body: bytes) -> None:
        """Send one prepared request and note on ``record`` what comes back; failures are noted, not raised."""
        error: str | None
        try:
            async with asyncio.timeout(self.timeout_seconds / self.time_scale):
                record.url, record.sent_at = base_url, self.clock()
                headers = self._headers(record.request)
                async with self.servers.send(base_url, "POST", self.api.path, headers, body) as answer:
                    error = await self._follow(answer, record)
        except TimeoutError:
            error = "timeout"
        except EngineError as failed:
            error = _ERRORS.get(failed.failure, "cut")
        except asyncio.CancelledError:
            self._end(record, self.clock(), "unfinished")
            raise
        self._end(record, self.clock(), error)

    def _headers(self, request: ScheduledRequest) -> list[tuple[str, str]]:
        kind, headers = request.request_class, list(self.headers)
        for name, seconds in (("x-slo-ttft-ms", kind.ttft_seconds), ("x-slo-tbt-ms", kind.tbt_seconds)):
            if seconds is not None:
                headers.append((name, f"{1000 * seconds / self.time_scale:g}"))
        if self.send_class:
            headers.append(("x-slo-class", kind.name))
        if request.tenant:
            headers.append((TENANT_HEADER, request.tenant))
        return headers

    @staticmethod
    async def _read_refusal(answer: EngineAnswer) -> None:
        """Read it to its end, after which its connection can be used again; one that does not end is left."""
        size = 0
        async for data in answer.chunks():
            size += len(data)
            if size > _LONGEST_REFUSAL_BYTES:
                break

    async def _follow(self, answer: EngineAnswer, record: Result) -> str | None:
        record.status = answer.status
        if answer.status != 200:
            await self._read_refusal(answer)
            return f"http {answer.status}"
        if answer.content_type != "text/event-stream":
            return "not a stream"
        if (queued := queue_seconds(answer.headers)) is not None:
            record.on_queued(queued * self.time_scale)
        splitter, clock = EventSplitter(), self.clock

        def take(data: bytes, _: bytes | None) -> bool:
            # In the callback that reads the socket: what it costs is what limits the tokens that a client can take.
            now = clock()
            if record.first_byte_at is None:
                record.first_byte_at = now
            for payload in splitter.feed(data):
                chunk = read_chunk(payload)
                if chunk.error:
                    raise _ErrorEvent
                # A token of which nothing shows counts too: prompts of random tokens make models answer with half
                # characters and, as they may not end, with end marks, and what is measured is the engine's pace.
                if chunk.tokens or chunk.held_back:
                    record.on_tokens(now, chunk.tokens or 1)
                if chunk.queue_seconds is not None:
                    record.on_queued(chunk.queue_seconds * self.time_scale)
                if chunk.completion_tokens is not None:
                    record.prompt_tokens, record.cached_tokens = chunk.prompt_tokens, chunk.cached_tokens
                    record.completion_tokens = chunk.completion_tokens
                if chunk.done:
                    if record.completion_tokens is not None:
                        record.tokens = record.completion_tokens
                    self._end(record, now, None if record.tokens else "no token")
            return True

        try:
            # Reads on after [DONE] to the end of the body: only then can the connection serve another request.
            await answer.pump(take, _never_full)
        except _ErrorEvent:
            return "error event"
        return "cut"

    @staticmethod
    def _end(record: Result, now: float, error: str | None) -> None:
        # The first end counts: what breaks after [DONE] concerns nobody.
        if record.finished_at is None:
            record.finished_at, record.error = now, error
