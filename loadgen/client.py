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

import aiohttp
import msgspec
import numpy as np

from proxy.wire.openai import read_chunk
from proxy.wire.sse import EventSplitter
from proxy.wire.tenants import TENANT_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadgen.results import Result
    from proxy.core.request import RequestClass
    from proxy.sim.workload import ScheduledRequest

# Plain words in any vocabulary: beyond the special tokens that come first, and small enough for test models.
_FIRST_ID, _LAST_ID = 10, 3999

# Chat takes text, not token ids. Common English words are one token each for nearly every tokenizer, so n words
# are about n tokens; the server's chat template adds a few.
_WORDS = ("about", "book", "city", "day", "each", "find", "good", "home", "last", "make", "new", "over", "play", "red")


class Api(StrEnum):
    """The endpoint that a run uses."""

    COMPLETIONS = "completions"
    """Prompts are token ids, so their lengths are exact."""
    CHAT = "chat"
    """Prompts are text of about the right length."""

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

    session: aiohttp.ClientSession
    clock: Callable[[], float]
    model: str
    nonce: int
    api: Api = Api.COMPLETIONS
    time_scale: float = 1.0
    timeout_seconds: float = 600.0
    send_class: bool = False
    """Whether the class's name is sent beside its deadlines; a proxy that does not know it refuses the request."""

    def prepare(self, scheduled: ScheduledRequest) -> bytes:
        """Build the body of a request: some 0.1 ms for a long prompt, so do it before the time to send."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": scheduled.output_tokens,
            "min_tokens": scheduled.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        random = np.random.default_rng([self.nonce, scheduled.content_seed])
        if self.api is Api.CHAT:
            words = " ".join(_WORDS[i] for i in random.integers(len(_WORDS), size=scheduled.prompt_tokens))
            body["messages"] = [{"role": "user", "content": words}]
        else:
            body["prompt"] = random.integers(_FIRST_ID, _LAST_ID + 1, size=scheduled.prompt_tokens).tolist()
        return msgspec.json.encode(body)

    async def send(self, base_url: str, record: Result, body: bytes) -> None:
        """Send one prepared request and note on ``record`` what comes back; failures are noted, not raised."""
        headers = {"Content-Type": "application/json", **self._class_headers(record.request.request_class)}
        if record.request.tenant:
            headers[TENANT_HEADER] = record.request.tenant
        error: str | None
        try:
            async with asyncio.timeout(self.timeout_seconds / self.time_scale):
                record.url, record.sent_at = base_url, self.clock()
                async with self.session.post(base_url + self.api.path, data=body, headers=headers) as response:
                    error = await self._follow(response, record)
        except TimeoutError:
            error = "timeout"
        except aiohttp.ClientConnectorError:
            error = "connect"
        except (aiohttp.ClientError, OSError):
            error = "cut"
        except asyncio.CancelledError:
            self._end(record, self.clock(), "unfinished")
            raise
        self._end(record, self.clock(), error)

    def _class_headers(self, kind: RequestClass) -> dict[str, str]:
        deadlines = {"x-slo-ttft-ms": kind.ttft_seconds, "x-slo-tbt-ms": kind.tbt_seconds}
        headers = {name: f"{1000 * s / self.time_scale:g}" for name, s in deadlines.items() if s is not None}
        return headers | {"x-slo-class": kind.name} if self.send_class else headers

    async def _follow(self, response: aiohttp.ClientResponse, record: Result) -> str | None:
        record.status = response.status
        if response.status != 200:
            return f"http {response.status}"
        if response.content_type != "text/event-stream":
            return "not a stream"
        splitter = EventSplitter()
        # Reads on after [DONE] to the end of the body: only then can the connection serve another request.
        async for data in response.content.iter_any():
            now = self.clock()
            if record.first_byte_at is None:
                record.first_byte_at = now
            for payload in splitter.feed(data):
                chunk = read_chunk(payload)
                if chunk.error:
                    return "error event"
                # A token of which nothing shows counts too: prompts of random tokens make models answer with half
                # characters and, as they may not end, with end marks, and what is measured is the engine's pace.
                if chunk.tokens or chunk.held_back:
                    record.on_tokens(now, chunk.tokens or 1)
                if chunk.completion_tokens is not None:
                    record.prompt_tokens, record.cached_tokens = chunk.prompt_tokens, chunk.cached_tokens
                    record.completion_tokens = chunk.completion_tokens
                if chunk.done:
                    if record.completion_tokens is not None:
                        record.tokens = record.completion_tokens
                    self._end(record, now, None if record.tokens else "no token")
        return "cut"

    @staticmethod
    def _end(record: Result, now: float, error: str | None) -> None:
        # The first end counts: what breaks after [DONE] concerns nobody.
        if record.finished_at is None:
            record.finished_at, record.error = now, error
