"""What a client is told when something goes wrong: one table, for every reason there is.

The shape is OpenAI's, so that client libraries raise their own exceptions. 429 says that the client should
slow down, 503 that there is nothing here to serve it with. Those libraries retry 408, 409, 429 and 5xx two
times on their own; ``x-should-retry`` overrules that where a retry would repeat work that an engine may
have done, or cannot help. Beside it stand

``Retry-After``, ``retry-after-ms``
    when to come back, in seconds and more exactly;
``x-slai-reason``
    the reason, one word of this table;
``x-slai-estimated-wait-ms``
    when the first token would have come, had the request been let in. Only where that can be told.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING

from proxy.core.request import RejectReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.wire.openai import BadRequest


class UpstreamFailure(StrEnum):
    """How an engine failed a request, told by what had happened until then. Metric label."""

    CONNECT_FAILED = "connect_failed"
    CUT_BEFORE_ANSWER = "cut_before_answer"
    """The engine had the request, and may have worked on it, but no byte of an answer came."""
    CUT_MID_STREAM = "cut_mid_stream"
    TIMED_OUT = "timed_out"
    REMOVED = "engine_removed"
    """The engine was taken out of service, and its answer took longer than the time that was left for it."""


class LocalFailure(StrEnum):
    """What ends a request before the scheduler sees it, or through a fault of ours. Metric label."""

    BAD_REQUEST = "bad_request"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TOO_SLOW = "body_too_slow"
    MALFORMED = "malformed"
    """What came is no HTTP."""
    TARGET = "target_not_allowed"
    """A method or path that goes to no engine."""
    HEAD_TOO_LARGE = "head_too_large"
    UNKNOWN_CODING = "unknown_coding"
    """The body is compressed in a way that is not known here."""
    INTERNAL = "internal"


class AccessFailure(StrEnum):
    """Why a client is not let in. Metric label."""

    NO_KEY = "no_key"
    UNKNOWN_KEY = "unknown_key"
    PATH = "path_not_allowed"
    MODEL = "model_not_allowed"
    CLASS = "class_not_allowed"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    CONCURRENCY = "concurrency"


ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as a client gets it: as a whole answer, or as the last event of a stream."""

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    retry_after_seconds: float | None = None
    should_retry: bool | None = None
    """``None`` leaves it to the client library's own rule for the status."""
    reason: str | None = None
    estimated_wait_seconds: float | None = None

    def body(self) -> bytes:
        """Return the error as JSON, in ASCII and on one line."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def anthropic_body(self) -> bytes:
        """Return the error as clients of Anthropic's Messages API expect it, in ASCII and on one line."""
        error = {"type": _ANTHROPIC_TYPES.get(self.status, "api_error"), "message": self.message}
        return json.dumps({"type": "error", "error": error}).encode()

    def headers(self) -> dict[str, str]:
        """Return the answer's headers; waits are rounded up, so that nobody comes back too early."""
        headers = {"Content-Type": "application/json"}
        wait = self.retry_after_seconds
        if wait is not None and isfinite(wait):
            headers["Retry-After"] = str(max(0, ceil(wait)))
            headers["retry-after-ms"] = str(max(0, ceil(wait * 1000)))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        if self.reason is not None:
            headers["x-slai-reason"] = self.reason
        if self.estimated_wait_seconds is not None and isfinite(self.estimated_wait_seconds):
            headers["x-slai-estimated-wait-ms"] = str(max(0, ceil(self.estimated_wait_seconds * 1000)))
        return headers

    def sse_frame(self) -> bytes:
        """Return the error as one event, for a stream whose status has been sent; no ``[DONE]`` follows it."""
        return b"data: " + self.body() + b"\n\n"


Reason = RejectReason | UpstreamFailure | LocalFailure | AccessFailure

_TABLE: Mapping[Reason, ErrorAnswer] = MappingProxyType(
    {
        RejectReason.QUEUE_FULL: ErrorAnswer(
            429,
            "rate_limit_error",
            "slow_down",
            "the queue is full; slow down",
            retry_after_seconds=1,
            should_retry=True,
        ),
        RejectReason.QUEUE_TIMEOUT: ErrorAnswer(
            429,
            "rate_limit_error",
            "slow_down",
            "the request waited in the queue for as long as it may; slow down",
            retry_after_seconds=1,
            should_retry=True,
        ),
        # Ours, not the client's: it asked for no more than others do.
        RejectReason.TOO_LATE: ErrorAnswer(
            503,
            "service_unavailable_error",
            "server_is_overloaded",
            "the first token would come later than the request's limit allows; the server is overloaded",
            retry_after_seconds=1,
            should_retry=True,
        ),
        # Who does not want to wait here does not want to wait in a client library either.
        RejectReason.NO_QUEUE: ErrorAnswer(
            429,
            "rate_limit_error",
            "slow_down",
            "the request would have to wait, and x-slai-no-queue forbids it",
            retry_after_seconds=1,
            should_retry=False,
        ),
        RejectReason.NO_ENGINE: ErrorAnswer(
            503,
            "service_unavailable_error",
            "no_engines",
            "no engine is available to serve the request",
            retry_after_seconds=5,
            should_retry=True,
        ),
        RejectReason.DRAINING: ErrorAnswer(
            503,
            "service_unavailable_error",
            "server_is_overloaded",
            "this server is shutting down; try again to reach another",
            retry_after_seconds=1,
            should_retry=True,
        ),
        RejectReason.UNKNOWN_MODEL: ErrorAnswer(
            404, "invalid_request_error", "model_not_found", "the model does not exist", param="model"
        ),
        RejectReason.TOO_LONG: ErrorAnswer(
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "the prompt is longer than any engine's context or KV cache",
        ),
        # Nothing was sent, so a retry repeats nothing.
        UpstreamFailure.CONNECT_FAILED: ErrorAnswer(
            502,
            "server_error",
            "upstream_error",
            "the engine could not be reached",
            retry_after_seconds=1,
            should_retry=True,
        ),
        UpstreamFailure.CUT_BEFORE_ANSWER: ErrorAnswer(
            502,
            "server_error",
            "upstream_error",
            "the engine closed the connection before it answered",
            should_retry=False,
        ),
        # Read from the stream's last event; the status is the one of logs and metrics.
        UpstreamFailure.CUT_MID_STREAM: ErrorAnswer(
            502,
            "server_error",
            "upstream_error",
            "the engine closed the connection before its answer was complete",
            should_retry=False,
        ),
        UpstreamFailure.TIMED_OUT: ErrorAnswer(
            504, "timeout_error", "upstream_timeout", "the engine did not answer in time", should_retry=False
        ),
        UpstreamFailure.REMOVED: ErrorAnswer(
            502,
            "server_error",
            "upstream_error",
            "the engine was taken out of service before its answer was complete",
            should_retry=False,
        ),
        LocalFailure.BAD_REQUEST: ErrorAnswer(400, "invalid_request_error", None, "the request is not valid"),
        LocalFailure.BODY_TOO_LARGE: ErrorAnswer(
            413, "invalid_request_error", "request_too_large", "the request body is too large"
        ),
        LocalFailure.BODY_TOO_SLOW: ErrorAnswer(
            408,
            "invalid_request_error",
            "request_timeout",
            "the request body did not come in time",
            should_retry=False,
        ),
        AccessFailure.NO_KEY: ErrorAnswer(
            401,
            "invalid_request_error",
            "invalid_api_key",
            "an API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            should_retry=False,
        ),
        AccessFailure.UNKNOWN_KEY: ErrorAnswer(
            401, "invalid_request_error", "invalid_api_key", "the API key is not known here", should_retry=False
        ),
        AccessFailure.PATH: ErrorAnswer(
            403,
            "invalid_request_error",
            "path_not_allowed",
            "this API key may not use the engines' own administration",
            should_retry=False,
        ),
        AccessFailure.MODEL: ErrorAnswer(
            403,
            "invalid_request_error",
            "model_not_allowed",
            "this API key may not use the model",
            param="model",
            should_retry=False,
        ),
        AccessFailure.CLASS: ErrorAnswer(
            403,
            "invalid_request_error",
            "class_not_allowed",
            "this API key may not use the class",
            param="x-slo-class",
            should_retry=False,
        ),
        AccessFailure.REQUESTS_PER_MINUTE: ErrorAnswer(
            429,
            "requests",
            "rate_limit_exceeded",
            "this API key has reached its limit of requests per minute",
            should_retry=True,
        ),
        # Without a time to come back it is a prompt that can never pass.
        AccessFailure.TOKENS_PER_MINUTE: ErrorAnswer(
            429,
            "tokens",
            "rate_limit_exceeded",
            "this API key has reached its limit of tokens per minute",
            should_retry=False,
        ),
        AccessFailure.CONCURRENCY: ErrorAnswer(
            429,
            "requests",
            "rate_limit_exceeded",
            "this API key has reached its limit of requests at once",
            should_retry=True,
        ),
        LocalFailure.MALFORMED: ErrorAnswer(400, "invalid_request_error", None, "the request is not valid HTTP/1.1"),
        LocalFailure.TARGET: ErrorAnswer(
            400, "invalid_request_error", None, "the method, or a path with . or .. in it, is not passed on"
        ),
        LocalFailure.HEAD_TOO_LARGE: ErrorAnswer(
            431, "invalid_request_error", "head_too_large", "the request line or a header is too long"
        ),
        LocalFailure.UNKNOWN_CODING: ErrorAnswer(
            415,
            "invalid_request_error",
            "unsupported_content_encoding",
            "a compressed request has to be scheduled by its prompt: its Content-Encoding must be gzip or deflate",
        ),
        LocalFailure.INTERNAL: ErrorAnswer(
            500, "server_error", "internal_error", "the proxy failed; the request is not at fault", should_retry=False
        ),
    }
)

ANSWERS: Mapping[Reason, ErrorAnswer] = MappingProxyType({r: replace(a, reason=str(r)) for r, a in _TABLE.items()})
"""The answer to each reason. Waits are what a client should wait where nobody knows better."""


def answer(
    reason: Reason,
    *,
    message: str | None = None,
    retry_after_seconds: float | None = None,
    estimated_wait_seconds: float | None = None,
) -> ErrorAnswer:
    """Return the answer to ``reason``, with a message or waits that the caller knows better than the table."""
    found = ANSWERS[reason]
    if message is None and retry_after_seconds is None and estimated_wait_seconds is None:
        return found
    return replace(
        found,
        message=message or found.message,
        retry_after_seconds=found.retry_after_seconds if retry_after_seconds is None else retry_after_seconds,
        should_retry=True if reason is AccessFailure.TOKENS_PER_MINUTE and retry_after_seconds else found.should_retry,
        estimated_wait_seconds=estimated_wait_seconds,
    )


def bad_request(error: BadRequest) -> ErrorAnswer:
    """Return the answer to a request that ``proxy.wire`` itself found wrong."""
    found = ANSWERS[LocalFailure.BAD_REQUEST]
    return replace(found, message=error.message, param=error.param, code=error.code)


def model_not_found(model: str) -> ErrorAnswer:
    """Return the answer to a request for a model that no engine serves."""
    name = model if len(model) <= 100 else f"{model[:100]}..."
    return answer(RejectReason.UNKNOWN_MODEL, message=f"the model {name!r} does not exist")
