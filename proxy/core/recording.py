"""A scheduler that takes down what it is told and what it answers; the simulator and the live proxy can run either."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.events import TokensProduced
from proxy.core.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.actions import Action
    from proxy.core.config import SchedulerConfig
    from proxy.core.events import Event

Record = tuple[float, str, int] | tuple[float, "Event | None", "list[Action]"]
"""``(now, request_id, chunks)`` for tokens without consequence, else ``(now, event, actions)``; no event: a tick."""


class RecordedScheduler(Scheduler):
    """Hands a record of every call to ``record``; the cost is that call, once per token."""

    def __init__(self, config: SchedulerConfig, record: Callable[[Record], object]) -> None:
        super().__init__(config)
        self._record = record

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, TokensProduced):
            return self.on_tokens(event.request_id, event.chunks, now) or []
        actions = super().handle(event, now)
        self._record((now, event, actions))
        return actions

    def on_tokens(self, request_id: str, chunks: int, now: float) -> list[Action] | None:
        actions = Scheduler.on_tokens(self, request_id, chunks, now)  # per token, and super() costs twice as much
        self._record((now, TokensProduced(request_id, chunks), actions) if actions else (now, request_id, chunks))
        return actions

    def tick(self, now: float) -> list[Action]:
        actions = super().tick(now)
        self._record((now, None, actions))
        return actions
