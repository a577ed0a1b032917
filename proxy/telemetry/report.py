"""What is known about a request when it is over: the one thing that metrics, spans and logs are made from."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from proxy.core.blame import Blame
    from proxy.core.request import Outcome, RequestClass
    from proxy.telemetry.tracing import Trace

MAX_BREACHES = 32
"""Late tokens of one stream of which the cause is kept; all are counted."""
MAX_GAPS = 16_384
"""Gaps of one stream that are kept for its p99; the maximum, the mean and the misses cover all of them."""


@dataclass(slots=True)
class TokenTimes:
    """When a stream's tokens passed through the proxy, on the event loop's clock.

    A gap lies between two reads that brought tokens: tokens which the engine or the network delivered together
    ended one wait of the client, not several.
    """

    tbt_seconds: float | None = None
    """The deadline for every gap, if there is one."""
    first_at: float | None = None
    last_at: float | None = None
    chunks: int = 0
    """Token-bearing chunks."""
    gaps: array[float] = field(default_factory=lambda: array("f"))
    gap_count: int = 0
    gap_max: float = 0.0
    misses: int = 0

    def on_read(self, now: float, chunks: int) -> float | None:
        """Note a read with ``chunks`` token-bearing chunks; return the gap that it ended, if any."""
        self.chunks += chunks
        last_at, self.last_at = self.last_at, now
        if last_at is None:
            self.first_at = now
            return None
        gap = now - last_at
        self.gap_count += 1
        if gap > self.gap_max:  # noqa: PLR1730 - a call takes three times as long, for every token
            self.gap_max = gap
        if self.tbt_seconds is not None and gap > self.tbt_seconds:
            self.misses += 1
        if self.gap_count <= MAX_GAPS:
            self.gaps.append(gap)
        return gap

    def gap_mean(self) -> float | None:
        if self.first_at is None or self.last_at is None or not self.gap_count:
            return None
        return (self.last_at - self.first_at) / self.gap_count

    def gap_p99(self) -> float | None:
        """The smallest gap that at least 99 % of the kept ones do not exceed."""
        if not self.gaps:
            return None
        return min(self.gap_max, sorted(self.gaps)[ceil(0.99 * len(self.gaps)) - 1])  # kept in single precision


class Breach(NamedTuple):
    """One token that came late."""

    at: float
    gap_seconds: float
    blame: Blame


@dataclass(slots=True)
class RequestReport:
    """One generation request; times are seconds on the driver's clock."""

    request_id: str
    """The proxy's own number for it."""
    client_id: str
    """``x-request-id``: the client's own if it sent one."""
    operation: str
    """``chat`` or ``text_completion``, as OpenTelemetry's GenAI conventions have it."""
    arrived_at: float
    request_class: RequestClass
    path: str = ""
    """Of the API, which decides on the shape of errors."""
    sequences: int = 1
    """Answers that are asked for."""
    model: str = ""
    stream: bool = False
    prompt_tokens: int = 0
    """Estimated when the request came, the engine's own figure if it told one."""
    prompt_tokens_told: int | None = None
    """By the engine."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine says to have found cached."""
    max_tokens: int | None = None
    dispatched_at: float | None = None
    engine_id: str | None = None
    dispatches: int = 0
    replays: int = 0
    """Dispatches after an engine had failed that may have begun the request."""
    times: TokenTimes = field(default_factory=TokenTimes)
    breaches: list[Breach] = field(default_factory=list)
    """Of its TBT deadline: the first ones, with their causes."""
    completion_tokens: int | None = None
    sibling_chunks: int = 0
    """Token-bearing chunks beyond those of ``times``, where a stream has several answers: those count steps."""
    finish_reason: str | None = None
    """Why the engine ended a stream, in its own word."""
    asked_usage: bool = False
    """The engine was asked for usage on the proxy's account."""
    outcome: Outcome | None = None
    reason: str | None = None
    """Of a refusal or failure; a short word from a fixed set."""
    status: int | None = None
    ended_at: float | None = None
    tenant: str = ""
    trace: Trace | None = None
    """Its spans, where there are any."""

    @property
    def ttft_seconds(self) -> float | None:
        """From arrival to the first token that a client can see; ``None`` where the answer was not streamed."""
        return None if self.times.first_at is None else self.times.first_at - self.arrived_at

    @property
    def most_output_tokens(self) -> int | None:
        """What may be generated in all answers together; ``None`` where the client does not say."""
        return None if self.max_tokens is None else self.max_tokens * self.sequences

    @property
    def output_tokens(self) -> int:
        """What was generated: as the engine told, or else what was seen of it."""
        return self.completion_tokens or self.times.chunks + self.sibling_chunks

    @property
    def queue_seconds(self) -> float | None:
        """Time in the proxy's queue, until the last dispatch."""
        return None if self.dispatched_at is None else self.dispatched_at - self.arrived_at

    @property
    def missed_ttft(self) -> bool:
        limit, ttft = self.request_class.ttft_seconds, self.ttft_seconds
        return limit is not None and ttft is not None and ttft > limit

    def deadlines(self) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
        """Of either kind, how many deadlines fell due and how many of these were missed."""
        has_ttft = self.request_class.ttft_seconds is not None and self.ttft_seconds is not None
        has_tbt = self.times.tbt_seconds is not None
        return (
            ("ttft", int(has_ttft), int(self.missed_ttft)),
            ("tbt", self.times.gap_count if has_tbt else 0, self.times.misses),
        )

    def late(self) -> dict[str, int]:
        """How many of the late tokens that are kept have which cause."""
        return dict(Counter(breach.blame.cause.value for breach in self.breaches))

    def missed(self, now: float | None = None) -> list[str]:
        """Which deadlines were not kept, ``ttft`` and ``tbt``; with ``now`` also a TTFT that is past being kept."""
        limit = self.request_class.ttft_seconds
        late = now is not None and limit is not None and self.ttft_seconds is None and now - self.arrived_at > limit
        misses = {"ttft": self.missed_ttft or (self.stream and late), "tbt": self.times.misses > 0}
        return [name for name, missed in misses.items() if missed]
