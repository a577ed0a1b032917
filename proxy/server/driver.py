"""The live shell of the scheduler: feeds it events, does what it answers, and keeps its one timer.

Who ends a request: the handler that submitted it, in one ``finally``, by ``end``. The driver only hands decisions to
the handler that waits for them; if that handler is gone meanwhile, its ``end`` gives back what it was granted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from math import inf
from typing import TYPE_CHECKING

from proxy.core.actions import Action, Cut, Slice
from proxy.core.events import Arrived, Ended, Event, NotStarted, TokensProduced

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.fleet import Member
    from proxy.core.request import Request
    from proxy.core.scheduler import Scheduler
    from proxy.telemetry.chronicle import Observe

_log = logging.getLogger(__name__)

Ticket = asyncio.Future[Action]
"""Resolves to the scheduler's decision on a request: ``Dispatch`` or ``Reject``."""


class Driver:
    """Runs a scheduler on an event loop's clock; every method must be called on that loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        loop: asyncio.AbstractEventLoop,
        *,
        decider: Member | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_action: Callable[[Action, float], None] | None = None,
        observe: Observe | None = None,
        on_decision: Callable[[type[Event] | None, list[Action], float | None], None] | None = None,
    ) -> None:
        """Let ``decider`` decide, of whom ``scheduler`` is the part to look at; by default the scheduler itself does.

        ``clock`` must run with the loop's own: uvloop's shows whole milliseconds, too coarse to time tokens with.

        ``on_decision`` is told what came of which event (``None``: a tick), and of how many seconds' work if known.
        """
        self.scheduler = scheduler
        self._decider = decider or scheduler
        self._clock = clock
        self._loop = loop
        self._on_action = on_action
        self._observe = observe
        self._on_decision = on_decision
        self._tickets: dict[str, Ticket] = {}
        self._on_slice: dict[str, Callable[[Slice], None]] = {}
        self._on_cut: dict[str, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf  # not asked of the handle: uvloop gives a plain one for a time that has come
        self._reads: list[tuple[Callable[[bytes, float], None], bytes, float]] = []

    @property
    def decides(self) -> bool:
        """Whether what is submitted is decided on here, with all that is known, and not by somebody else later."""
        return True

    def now(self) -> float:
        """The time in whole microseconds, as the simulator has it: equal times, equal decisions.

        Whoever asks may tell the scheduler something next, so it is told first of all that was read before.
        """
        if self._reads:
            self.catch_up()
        return _whole_microseconds(self._clock())

    def note(self, look: Callable[[bytes, float], None], data: bytes) -> None:
        """Have ``look`` see a read that has just come, once all that came with it have been passed on.

        To look at a token takes longer than to pass it on, and the tokens of an engine's step come all at once.
        """
        if not self._reads:
            self._loop.call_soon(self.catch_up)
        self._reads.append((look, data, self._clock()))

    def catch_up(self) -> None:
        """Have all reads looked at that were noted."""
        reads, self._reads = self._reads, []
        for look, data, at in reads:
            try:
                look(data, _whole_microseconds(at))
            except Exception:  # noqa: BLE001 - it is one stream's, and the others' reads are still to be looked at
                _log.exception("a read of a stream is not counted through a fault of the proxy")

    def submit(
        self,
        request: Request,
        arrived_at: float,
        on_slice: Callable[[Slice], None] | None = None,
        on_cut: Callable[[], None] | None = None,
    ) -> Ticket:
        """Hand over a request that has been read; ``end`` must follow, whatever becomes of the ticket.

        ``on_slice`` sends a slice of its prompt; without it the request must not be sliceable. ``on_cut`` ends the
        engine's answer where it is.
        """
        ticket = self._ticket(request.id)
        if on_slice is not None:
            self._on_slice[request.id] = on_slice
        if on_cut is not None:
            self._on_cut[request.id] = on_cut
        self.feed(Arrived(request, arrived_at))
        return ticket

    def not_started(self, request_id: str, back_off_seconds: float | None = None) -> Ticket:
        """Give a dispatched request back to the queue, as its engine provably did not start it."""
        ticket = self._ticket(request_id)
        self.feed(NotStarted(request_id, back_off_seconds))
        return ticket

    def on_tokens(self, request_id: str, chunks: int, now: float) -> None:
        """Tell of a read with token-bearing chunks; the path of every token, so kept short."""
        if (actions := self._decider.on_tokens(request_id, chunks, now)) is not None:
            if actions and self._observe is not None:
                self._observe(TokensProduced(request_id, chunks), actions, now)
            if actions and self._on_decision is not None:
                # Without the time that it took: looking at the clock twice for each token is not free.
                self._on_decision(TokensProduced, actions, None)
            self.perform(actions, now)

    def end(
        self,
        request_id: str,
        tokens: int | None = None,
        cached_tokens: int | None = None,
        *,
        served: bool | None = None,
    ) -> None:
        """Tell that a request is over.

        ``tokens``: length of an answer that was not streamed; ``cached_tokens``: of the prompt; each if it was told.
        ``served``: whether the engine did what it should; ``None`` where that cannot be told.
        """
        self._tickets.pop(request_id, None)
        self._on_slice.pop(request_id, None)
        self._on_cut.pop(request_id, None)
        self.feed(Ended(request_id, tokens, cached_tokens, served))

    def feed(self, event: Event) -> None:
        """Tell the scheduler what happened and do what it wants done."""
        now, began = self.now(), time.perf_counter()
        actions = self._decider.handle(event, now)
        if self._on_decision is not None:
            self._on_decision(type(event), actions, time.perf_counter() - began)
        if self._observe is not None:
            self._observe(event, actions, now)
        self.perform(actions, now)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ticket(self, request_id: str) -> Ticket:
        ticket = self._tickets[request_id] = self._loop.create_future()
        return ticket

    def perform(self, actions: list[Action], now: float) -> None:
        """Do what was decided, and see to it that the next due time is kept."""
        for action in actions:
            if self._on_action is not None:
                self._on_action(action, now)
            if isinstance(action, Slice):
                self._on_slice[action.request_id](action)
                continue
            if isinstance(action, Cut):
                if (cut := self._on_cut.get(action.request_id)) is not None:
                    cut()
                continue
            ticket = self._tickets.pop(action.request_id, None)
            if ticket is not None and not ticket.done():
                ticket.set_result(action)
        self._arm()

    def _arm(self) -> None:
        deadline = self._decider.next_deadline()
        if self._timer is not None:
            if deadline is not None and self._timer_at <= deadline:
                return  # fires early enough, and finds nothing to do if that is too early
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer, self._timer_at = self._loop.call_at(deadline, self._tick, deadline), deadline

    def _tick(self, deadline: float) -> None:
        self._timer = None
        # A loop may call a timer up to one clock tick early; the scheduler would find nothing due and ask again.
        now, began = max(deadline, self.now()), time.perf_counter()
        actions = self._decider.tick(now)
        if self._on_decision is not None:
            self._on_decision(None, actions, time.perf_counter() - began)
        if self._observe is not None:
            self._observe(None, actions, now)
        self.perform(actions, now)


def _whole_microseconds(seconds: float) -> float:
    return round(seconds * 1e6) / 1e6  # round(x, 6) takes three times as long, and this is done for every token
