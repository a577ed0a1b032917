"""What the scheduler is told. Every event is a fact; what to do about it is the scheduler's affair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.actions import Slice
    from proxy.core.config import SchedulerConfig
    from proxy.core.feedback import DelaySnapshot
    from proxy.core.limits import EngineLimits
    from proxy.core.plugin import PluginPolicy
    from proxy.core.request import Request
    from proxy.core.selfreport import EngineReport
    from proxy.core.stepmodel import StepModelSnapshot


@dataclass(frozen=True, slots=True)
class Arrived:
    """A client's request was read completely. ``arrived_at`` is when its head had come, before all of its body."""

    request: Request
    arrived_at: float | None = None


@dataclass(frozen=True, slots=True)
class TokensProduced:
    """A dispatched request's stream brought ``chunks`` token-bearing chunks in one read.

    The first such event of a request ends its prefill. An unmodified engine gives each running stream one chunk
    per step, so the count is also how many engine steps have passed for this stream.
    """

    request_id: str
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class Ended:
    """A request is over, however it ended and whether it was waiting or dispatched. Unknown ids are ignored."""

    request_id: str
    tokens: int | None = None
    """Length of an answer that came in one piece: it tells how fast the engine stepped, as no stream did."""
    cached_tokens: int | None = None
    """How much of the prompt the engine says it found in its prefix cache."""
    served: bool | None = None
    """Whether the engine did what it should, or failed; ``None``: that cannot be told, as of a client that left."""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """An engine provably did not start a dispatched request (refused connection, its own queue limit).

    The request goes back to its old place in the order, and the engine gets nothing for ``back_off_seconds`` if it
    asked for that, and else for longer each time (see ``backoff``).
    """

    request_id: str
    back_off_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A request's prompt has been tokenized: its exact length is known, and it may be sliced."""

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class SliceEnded:
    """A slice of a prompt is over. ``cached``: whether the engine has now cached it, as far as we can tell."""

    piece: Slice
    cached: bool = True
    found_tokens: int | None = None
    """Of its ``held_tokens``, how many the engine says that it found cached."""


@dataclass(frozen=True, slots=True)
class EngineUp:
    """An engine may be used from now on, or what is known about it has changed."""

    engine_id: str
    limits: EngineLimits
    models: frozenset[str] = frozenset()
    """Models that it serves; empty while unknown: then it is taken to serve any."""
    learnt: StepModelSnapshot | None = None
    """What an earlier run has learnt about the steps of such an engine; takes the place of what is known of them."""
    delay: DelaySnapshot | None = None
    """And of the way to it and back."""
    plugin: PluginPolicy | None = None
    """Which of our rules its own scheduler goes by, if it has our plugin."""


@dataclass(frozen=True, slots=True)
class EngineDown:
    """An engine exists but gets nothing new. Its streams in flight end by their own events."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """An engine does not belong to us any more: it gets nothing new, and is forgotten when nothing of ours is there.

    What is still there after ``drain_seconds`` is cut. An ``EngineUp`` or ``EngineDown`` before that takes it back.
    """

    engine_id: str
    drain_seconds: float


@dataclass(frozen=True, slots=True)
class EngineReported:
    """An engine's own figures; ``None`` when it has stopped to give them. Reports of unknown engines are ignored."""

    engine_id: str
    report: EngineReport | None


@dataclass(frozen=True, slots=True)
class Passed:
    """An engine was given a request past the queue (``begins``), or is done with one. Unknown engines are ignored."""

    engine_id: str
    begins: bool


@dataclass(frozen=True, slots=True)
class InFlight:
    """A request that an engine has, and ``tokens`` of its answer so far. No event of its own: see ``HandedOver``."""

    request: Request
    engine_id: str
    arrived_at: float
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Requests change hands between replicas. Nothing is released before all of it is known.

    ``gone``: those that somebody else schedules from now on, or nobody; their engines are neither praised nor blamed,
    and ids that are not known are ignored. ``in_flight``: those that count from now on at the engines that have them;
    one at an unknown engine is ignored. ``waiting``: those that come to the queue, with the age that they have. Of
    both, those whose id is in use are ignored.
    """

    gone: tuple[str, ...] = ()
    in_flight: tuple[InFlight, ...] = ()
    waiting: tuple[Arrived, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """The proxy is shutting down: whatever waits is refused, and so is whatever comes."""


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """Other rules hold from now on; the order, tiles and throughput mode stay what they are."""

    config: SchedulerConfig


Event = (
    Arrived
    | TokensProduced
    | Ended
    | NotStarted
    | Tokenized
    | SliceEnded
    | EngineUp
    | EngineDown
    | EngineRemoved
    | EngineReported
    | Passed
    | HandedOver
    | DrainStarted
    | Reconfigured
)
