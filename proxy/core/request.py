"""What is scheduled: requests, their classes, and the ways in which they end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from proxy.core.prefix import NO_BLOCKS, PromptBlocks


@dataclass(frozen=True, slots=True)
class RequestClass:
    """The latency promise that a group of requests shares.

    ``ttft_seconds`` counts from the request's arrival at the proxy to its first token; ``tbt_seconds``
    bounds every gap between two tokens of one stream. ``None`` means that nothing is promised.
    """

    name: str
    ttft_seconds: float | None = None
    tbt_seconds: float | None = None
    weight: float = 1.0
    """Its share of the engines beside classes of other weights; those of one weight share as if they were one class."""
    ttft_limit_seconds: float | None = None
    """A request that cannot have its first token so soon after its arrival is refused, at once if that can be told."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < inf:
            raise ValueError("a class's weight must be positive and finite")


STRICT = RequestClass("strict", tbt_seconds=0.1)
RELAXED = RequestClass("relaxed", tbt_seconds=0.5)
"""The two classes of the paper's evaluation: paying users (5 % of requests) and free ones (95 %)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request as the scheduler sees it; never its text.

    ``prompt_tokens`` may be an estimate: errors of a few ten percent hardly change the order, and the
    engine's ``usage`` corrects the KV account when the request ends. ``max_tokens`` is what the client
    allows the engine to generate, ``None`` where it set no limit.
    """

    id: str
    prompt_tokens: int
    model: str = ""
    max_tokens: int | None = None
    request_class: RequestClass = RELAXED
    sliceable: bool = False
    """Whether its prompt may be sent ahead in slices: its token ids are at hand and the engines cache prefixes."""
    size_bytes: int = 0
    """Length of the body, which somebody holds in memory while the request waits."""
    streamed: bool = True
    """Whether its tokens are seen as they come; an answer in one piece shows none until its end."""
    blocks: PromptBlocks = NO_BLOCKS
    """By which the engines that have the prompt's beginning in their cache are found."""
    tenant: str = ""
    """Whose share of the engines it comes out of; tenants share those evenly, or by their weights."""
    fingerprint: bytes | None = None
    """The same for a request that comes again, and for no other; ``None``: it will not be known again."""
    waited_before_seconds: float = 0.0
    """Time since it came first, if it was refused then and has come back when it was told to."""
    sequences: int = 1
    """Answers that it asks for: each takes a slot of the engine, and one token of every step."""
    may_wait: bool = True
    """Whether it may be queued; if not, it starts at once or is refused."""


class Outcome(StrEnum):
    """How a request ended; every accepted request ends in exactly one of these. Metric label."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    ENGINE_FAILED = "engine_failed"
    ENGINE_ERROR = "engine_error"
    """The engine answered with an error of its own: the request's fault or the engine's, told unchanged."""
    REJECTED = "rejected"


class RejectReason(StrEnum):
    """Why the proxy refuses a request itself. Metric label; ``proxy.wire.errors`` has the answer for each."""

    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    TOO_LATE = "too_late"
    """Its first token cannot come, or has not come, within the limit of its class."""
    NO_QUEUE = "no_queue"
    """It could not start at once, and its client does not want to wait."""
    NO_ENGINE = "no_engine"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LONG = "too_long"
    DRAINING = "draining"
