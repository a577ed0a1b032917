"""Simulated engines on a virtual clock, and the network to them."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.sim.engine import Produced, SimulatedEngine
    from proxy.sim.workload import ScheduledRequest


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


class Clock:
    """Virtual time and what is still to happen in it; equal times happen in the order of their scheduling."""

    def __init__(self) -> None:
        self.now_us = 0
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    @property
    def now(self) -> float:
        return self.now_us / 1e6

    def at(self, when_us: int, call: Callable[..., None], *args: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (when_us, self._number, call, args))

    def run(self) -> None:
        events = self._events
        while events:
            self.now_us, _, call, args = heapq.heappop(events)
            call(*args)


class Prompt(NamedTuple):
    """What an engine is sent: the arguments of ``SimulatedEngine.add``."""

    sequence_id: str
    prompt_tokens: int
    output_tokens: int
    content: str | None
    tbt_seconds: float | None = None
    common: int = 0
    ready: int = 0


def direct(request: ScheduledRequest) -> Prompt:
    """What an engine is sent without a scheduler in front."""
    return Prompt(
        str(request.index),
        request.prompt_tokens,
        request.output_tokens,
        request.prefix or None,
        request.request_class.tbt_seconds,
        request.prefix_tokens,
    )


class TimedEngine:
    """A simulated engine on the virtual clock."""

    def __init__(
        self,
        clock: Clock,
        model: SimulatedEngine,
        network_seconds: float,
        deliver: Callable[[list[Produced]], None],
        refuse: Callable[[str], None],
        *,
        on_step: Callable[[], None],
        on_step_end: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.queue_seconds: dict[str, float] = {}
        """From the receipt of each prompt to the first step that works on it."""
        self.busy_seconds = 0.0
        self._in_transit = 0
        self._clock = clock
        self.network_us = microseconds(network_seconds)
        self._deliver = deliver
        self._refuse = refuse
        self._on_step = on_step
        self._on_step_end = on_step_end
        self._busy = False
        self._received_us: dict[str, int] = {}  # of prompts that no step has worked on yet

    @property
    def queued(self) -> int:
        """Requests that were sent to it and are in no batch."""
        return self._in_transit + self.model.waiting

    def send(self, prompt: Prompt) -> None:
        self._in_transit += 1
        self._clock.at(self._clock.now_us + self.network_us, self._receive, prompt)

    def _receive(self, prompt: Prompt) -> None:
        self._in_transit -= 1
        request_id = prompt.sequence_id
        try:
            self.model.add(*prompt[:4], tbt_seconds=prompt.tbt_seconds, common=prompt.common, ready=prompt.ready)
        except ValueError:  # longer than the KV cache, as vLLM's 400
            self._clock.at(self._clock.now_us + self.network_us, self._refuse, request_id)
            return
        self._received_us[request_id] = self._clock.now_us
        if not self._busy:
            self._step()

    def _step(self) -> None:
        seconds = self.model.start_step()
        self._busy = seconds is not None
        if seconds is None:
            return
        self.busy_seconds += seconds
        self._clock.at(self._clock.now_us + microseconds(seconds), self._end_step)
        for request_id in self.model.step_admitted:
            if (received_us := self._received_us.pop(request_id, None)) is not None:  # not admitted a second time
                self.queue_seconds[request_id] = (self._clock.now_us - received_us) / 1e6
        self._on_step()

    def _end_step(self) -> None:
        if self._on_step_end is not None:
            self._on_step_end()
        produced = self.model.finish_step()
        if produced:
            self._clock.at(self._clock.now_us + self.network_us, self._deliver, produced)
        self._step()
