"""What became of each request and why: the life of those in flight, and of the last ones that ended.

It is told what happened and what the scheduler made of it. Of the tokens it hears only those that led to something,
so it costs nothing per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.core.actions import Action, Cut, Dispatch, Reject, Slice
from proxy.core.codec import LONGEST_TEXT
from proxy.core.events import (
    Arrived,
    DrainStarted,
    Ended,
    EngineDown,
    EngineRemoved,
    EngineReported,
    EngineUp,
    Event,
    HandedOver,
    NotStarted,
    Passed,
    Reconfigured,
    SliceEnded,
    Tokenized,
    TokensProduced,
)

if TYPE_CHECKING:
    from proxy.core.request import Request
    from proxy.telemetry.report import RequestReport

Observe = Callable[[Event | None, list[Action], float], None]
"""Is told of an event (``None``: a tick), what the scheduler made of it, and when."""

ENDED_KEPT = 1000
MOST_MOMENTS = 64
"""A request has more only if it is cut into many slices, or turned away many times; the latest are kept then."""


class Stage(StrEnum):
    """Where a request is."""

    READING = "being read"
    WAITING = "waiting"
    FIRST_TOKEN = "waiting for its first token"  # noqa: S105 - no password
    STREAMING = "streaming"
    ENDED = "ended"


class Moment(NamedTuple):
    """Something in the life of a request."""

    at: float
    what: str
    engine_id: str | None = None
    tokens: int | None = None
    """Of a slice: up to which of the prompt. Of a prompt that was tokenized: its length."""
    cause: str | None = None
    """Of a decision: what made the scheduler take it at this time."""

    def tell(self, since: float) -> dict[str, Any]:
        """Return it in terms of JSON; ``seconds`` count from ``since``."""
        told = {"what": self.what, "engine": self.engine_id, "tokens": self.tokens, "cause": self.cause}
        return {"seconds": round(self.at - since, 6)} | {
            name: value for name, value in told.items() if value is not None
        }


@dataclass(slots=True)
class Story:
    """A request from its arrival on. Times are seconds on the driver's clock."""

    request_id: str
    client_id: str = ""
    arrived_at: float = 0.0
    class_name: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=MOST_MOMENTS))
    engine_id: str | None = None
    """Where it was sent last."""
    queued_at: float | None = None
    dispatched_at: float | None = None
    """``None`` while it waits, also for a second time."""
    report: RequestReport | None = None
    """Of its handler, until it has ended."""
    ended_at: float | None = None
    outcome: str | None = None
    reason: str | None = None
    first_token_at: float | None = None
    tokens: int | None = None
    tbt_max_seconds: float | None = None
    missed: list[str] = field(default_factory=list)
    """The deadlines that it had missed when it ended."""
    late: dict[str, int] = field(default_factory=dict)
    """Of the first late tokens that it had when it ended: how many by each cause."""

    def take_in(self, request: Request, arrived_at: float, now: float) -> None:
        """Note that the scheduler has been told of it."""
        self.arrived_at, self.queued_at = arrived_at, now
        self.class_name, self.prompt_tokens = request.request_class.name, request.prompt_tokens
        self.model = request.model[:LONGEST_TEXT]
        self.moments.append(Moment(now, "queued"))

    def follow(self, action: Action, cause: str, now: float) -> None:
        """Note what the scheduler decided on it."""
        match action:
            case Dispatch(_, engine_id):
                self.engine_id, self.dispatched_at = engine_id, now
                self.moments.append(Moment(now, "dispatched", engine_id, cause=cause))
            case Slice(_, engine_id, tokens, _, _):
                self.engine_id = engine_id
                self.moments.append(Moment(now, "slice sent", engine_id, tokens, cause))
            case Cut(_, engine_id):
                self.moments.append(Moment(now, "cut: its engine had to leave", engine_id))
            case Reject(_, reason, _):
                self.moments.append(Moment(now, f"refused: {reason}", cause=cause))

    @property
    def stage(self) -> Stage:
        """Where it is."""
        if self.ended_at is not None:
            return Stage.ENDED
        if self.queued_at is None:
            return Stage.READING
        if self.dispatched_at is None:
            return Stage.WAITING
        return Stage.FIRST_TOKEN if self._first_token_at is None else Stage.STREAMING

    def tell(self, now: float) -> dict[str, Any]:
        """Return all of it in terms of JSON; times are seconds since its arrival.

        Its stages follow each other without a gap; ``engine`` takes the place of ``first_token`` and ``stream`` where
        no first token is known: the answer was not streamed, or failed.
        """
        end = now if self.ended_at is None else self.ended_at
        queued, dispatched, first_token = self.queued_at, self.dispatched_at, self._first_token_at
        report = self.report
        stages = {
            "body": (self.arrived_at, queued),
            "queue": (queued, dispatched if dispatched is not None else end),
        }
        if first_token is None and report is None:
            stages["engine"] = (dispatched, end)
        else:
            stages |= {
                "first_token": (dispatched, first_token if first_token is not None else end),
                "stream": (first_token, end),
            }
        return {
            "request_id": self.request_id,
            "client_id": self.client_id,
            "stage": self.stage,
            "class": self.class_name,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "age_seconds": round(end - self.arrived_at, 6),
            **({} if self.ended_at is None else {"ended_seconds_ago": round(now - self.ended_at, 6)}),
            "stage_seconds": {
                name: round(to - since, 6)
                for name, (since, to) in stages.items()
                if since is not None and to is not None
            },
            "engine": self.engine_id,
            "tokens": report.output_tokens if report is not None else self.tokens,
            "tbt_max_seconds": report.times.gap_max if report is not None else self.tbt_max_seconds,
            "missed": report.missed(now) if report is not None else self.missed,
            "late": report.late() if report is not None else self.late,
            "outcome": self.outcome,
            "reason": self.reason,
            "moments": [moment.tell(self.arrived_at) for moment in self.moments],
        }

    @property
    def _first_token_at(self) -> float | None:
        return self.first_token_at if self.report is None else self.report.times.first_at


class Chronicle:
    """Stories by number; those of ended requests make place for younger ones."""

    def __init__(self, kept: int = ENDED_KEPT) -> None:
        self._stories: dict[str, Story] = {}
        self._ended: deque[str] = deque()
        self._kept = kept
        self._latest: dict[str, str] = {}  # number of the latest request with a client's id

    def __len__(self) -> int:
        return len(self._stories)

    def __repr__(self) -> str:
        return f"<Chronicle of {len(self)} requests, {len(self._ended)} ended>"

    def find(self, id_: str) -> Story | None:
        """Return the request of this number, or else the latest one that a client gave this id."""
        return self._stories.get(id_) or self._stories.get(self._latest.get(id_, ""))

    def in_flight(self) -> Iterator[Story]:
        """Give the requests that have not ended, in the order of their arrival."""
        return (story for story in self._stories.values() if story.ended_at is None)

    def last_ended(self) -> Iterator[Story]:
        """Give those that have, the last one first."""
        return (self._stories[number] for number in reversed(self._ended))

    def begin(self, report: RequestReport) -> None:
        """Take up a request whose handler keeps this report."""
        number = report.request_id
        self._stories[number] = Story(number, report.client_id, report.arrived_at, report=report)
        self._latest[report.client_id] = number

    def finish(self, report: RequestReport) -> None:
        """Keep of the report of a request that has ended what explains it."""
        story = self._stories.get(report.request_id)
        if story is None:
            return
        times = report.times
        story.outcome, story.reason = report.outcome, report.reason
        story.first_token_at, story.tokens = times.first_at, report.output_tokens
        story.tbt_max_seconds = times.gap_max if times.gap_count else None
        story.missed = report.missed()
        story.late = report.late()
        story.report = None  # it holds every gap of the stream
        self._end(story, report.ended_at or story.arrived_at)

    def observe(self, event: Event | None, actions: list[Action], now: float) -> None:
        """Take down an event and what the scheduler made of it; see ``Observe``."""
        match event:
            case Arrived(request, arrived_at):
                if (story := self._stories.get(request.id)) is None:
                    story = self._stories[request.id] = Story(request.id)
                story.take_in(request, now if arrived_at is None else arrived_at, now)
            case Tokenized(request_id, prompt_tokens) if (known := self._stories.get(request_id)) is not None:
                known.prompt_tokens = prompt_tokens
                known.moments.append(Moment(now, "tokenized", tokens=prompt_tokens))
            case NotStarted(request_id, _) if (known := self._stories.get(request_id)) is not None:
                known.dispatched_at = None
                known.moments.append(Moment(now, "turned away by the engine", known.engine_id))
            case SliceEnded(piece, cached) if (known := self._stories.get(piece.request_id)) is not None:
                what = "slice cached" if cached else "slice not cached"
                known.moments.append(Moment(now, what, piece.engine_id, piece.tokens))
        for action in actions:
            if (concerned := self._stories.get(action.request_id)) is not None:
                concerned.follow(action, self._cause(event, action.request_id), now)
        if isinstance(event, Ended) and (ended := self._stories.get(event.request_id)) is not None:
            self._end(ended, now)

    def _cause(self, event: Event | None, request_id: str) -> str:
        match event:
            case None:
                return "the timer: a slice was due, a back-off or a limit was over, or steps went by unseen"
            case Arrived(request, _):
                return "its own arrival" if request.id == request_id else f"the arrival of request {request.id}"
            case TokensProduced(other, _):
                return f"the end of a step of {self._engine_of(other)}, told by a token of request {other}"
            case Ended(other, _):
                return f"the end of request {other}, on {self._engine_of(other) or 'no engine'}"
            case NotStarted(other, _):
                whose = "it" if other == request_id else f"request {other}"
                return f"{self._engine_of(other)} turning {whose} away"
            case SliceEnded(piece, _):
                return f"the end of a slice of request {piece.request_id}, on {piece.engine_id}"
            case Tokenized(other, _):
                return f"request {other} being tokenized"
            case EngineUp(engine_id):
                return f"{engine_id} coming up, or telling of new limits"
            case EngineDown(engine_id):
                return f"{engine_id} going down"
            case EngineRemoved(engine_id):
                return f"{engine_id} being removed"
            case EngineReported(engine_id):
                return f"the figures of {engine_id} itself"
            case HandedOver():
                return "the replica that leads, or another one leading from then on"
            case Passed(engine_id):
                return f"a request past the queue, to {engine_id}"
            case DrainStarted():
                return "the drain of the proxy"
            case Reconfigured():
                return "other settings"
            case _:
                return type(event).__name__

    def _engine_of(self, request_id: str) -> str | None:
        story = self._stories.get(request_id)
        return None if story is None else story.engine_id

    def _end(self, story: Story, now: float) -> None:
        if story.ended_at is not None:
            return
        story.ended_at = now
        self._ended.append(story.request_id)
        while len(self._ended) > self._kept:
            forgotten = self._stories.pop(self._ended.popleft())
            if self._latest.get(forgotten.client_id) == forgotten.request_id:
                del self._latest[forgotten.client_id]
