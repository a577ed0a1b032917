"""A scheduler on a stage: one method per event, answers as short lines, invariants after every call."""

from typing import Any

from builders import make_limits, make_request, make_scheduler
from invariants import check_after_tick, check_scheduler

from proxy.core.actions import Action, Slice, describe
from proxy.core.engine import EngineBelief
from proxy.core.events import (
    Arrived,
    DrainStarted,
    Ended,
    EngineDown,
    EngineRemoved,
    EngineUp,
    Event,
    NotStarted,
    SliceEnded,
    Tokenized,
    TokensProduced,
)
from proxy.core.scheduler import Scheduler


class Play:
    """Every method takes the time ``at`` which it happens (default: as before) and returns what the scheduler does.

    An answer reads ``["dispatch a e0", "reject b queue_full"]``.
    """

    def __init__(self, scheduler: Scheduler | None = None, **fields: Any) -> None:
        self.scheduler = make_scheduler(**fields) if scheduler is None else scheduler
        self.now = 0.0
        self.actions: list[Action] = []
        """What the last call answered."""
        self.is_hasty = True
        """Whether the moment comes at once for which a slice is held; otherwise a ``tick`` has to bring it."""
        self._flying: list[Slice] = []
        self._sent_at: dict[int, float] = {}

    def engine(self, engine_id: str = "e0") -> EngineBelief:
        return next(e for e in self.scheduler.engines if e.id == engine_id)

    def arrive(
        self,
        request_id: str,
        prompt_tokens: int = 100,
        *,
        at: float | None = None,
        since: float | None = None,
        **fields: Any,
    ) -> list[str]:
        """``since``: when the request's first byte came."""
        return self.handle(Arrived(make_request(request_id, prompt_tokens, **fields), since), at)

    def tokens(self, request_id: str, chunks: int = 1, *, at: float | None = None) -> list[str]:
        return self.handle(TokensProduced(request_id, chunks), at)

    def end(self, request_id: str, *, at: float | None = None, served: bool | None = None) -> list[str]:
        return self.handle(Ended(request_id, served=served), at)

    def not_started(self, request_id: str, back_off_seconds: float = 1.0, *, at: float | None = None) -> list[str]:
        return self.handle(NotStarted(request_id, back_off_seconds), at)

    def tokenized(self, request_id: str, prompt_tokens: int, *, at: float | None = None) -> list[str]:
        return self.handle(Tokenized(request_id, prompt_tokens), at)

    def slice_ended(self, request_id: str, tokens: int, *, cached: bool = True, at: float | None = None) -> list[str]:
        """Of several equal slices on their way the oldest ends; if there is none, one that was never sent."""
        matching = (s for s in self._flying if (s.request_id, s.tokens) == (request_id, tokens))
        piece = next(matching, Slice(request_id, "e0", tokens, held_tokens=0, number=1_000_000))
        self._flying = [s for s in self._flying if s is not piece]
        return self.handle(SliceEnded(piece, cached), at)

    def answer_slices(self, *, before: float) -> None:
        """All slices on their way that were sent ``before`` then end now."""
        for piece in [s for s in self._flying if self._sent_at[s.number] < before]:
            self.slice_ended(piece.request_id, piece.tokens)

    def up(
        self, engine_id: str = "e0", *, at: float | None = None, models: tuple[str, ...] = (), **limits: Any
    ) -> list[str]:
        return self.handle(EngineUp(engine_id, make_limits(**limits), frozenset(models)), at)

    def down(self, engine_id: str = "e0", *, at: float | None = None) -> list[str]:
        return self.handle(EngineDown(engine_id), at)

    def remove(self, engine_id: str = "e0", drain_seconds: float = 30.0, *, at: float | None = None) -> list[str]:
        return self.handle(EngineRemoved(engine_id, drain_seconds), at)

    def drain(self, *, at: float | None = None) -> list[str]:
        return self.handle(DrainStarted(), at)

    def handle(self, event: Event, at: float | None = None) -> list[str]:
        self._move_to(at)
        answer = self._answer(self.scheduler.handle(event, self.now))
        while self.is_hasty and (held := [e.slice_at for e in self.scheduler.engines if e.slice_at is not None]):
            answer += self.tick(at=max(self.now, min(held)))
        return answer

    def tick(self, *, at: float | None = None) -> list[str]:
        self._move_to(at)
        answer = self._answer(self.scheduler.tick(self.now))
        check_after_tick(self.scheduler, self.now)
        return answer

    def _move_to(self, at: float | None) -> None:
        if at is not None:
            assert at >= self.now, "time does not run backwards"
            self.now = at

    def _answer(self, actions: list[Action]) -> list[str]:
        self.actions = actions
        sent = [a for a in actions if isinstance(a, Slice)]
        self._flying += sent
        self._sent_at.update((piece.number, self.now) for piece in sent)
        check_scheduler(self.scheduler, self.now)
        return [describe(action, self.now).split(" ", 1)[1] for action in actions]
