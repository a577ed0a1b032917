"""Virtual time for asyncio: a loop whose clock jumps to the next timer as soon as nothing else is left to do."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heappush
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Every task waits, and no timer is left that could wake one."""


class _Timer(asyncio.TimerHandle):
    __slots__ = ("number",)

    number: int

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, _Timer)
        return (self.when(), self.number) < (other.when(), other.number)


class _Selector(selectors.SelectSelector):
    """Where the loop would sleep, it moves the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next_timer: Callable[[], float] = lambda: self.now

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise DeadlockError("nothing is ready and no timer is set")
        if not ready and timeout:
            self.now = self.next_timer()  # not "+= timeout", which may miss it by the last bit
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. Timers of one time run in the order in which they were set, as the simulator's events do."""

    def __init__(self) -> None:
        self._moving = _Selector()
        super().__init__(self._moving)
        self._moving.next_timer = self._next_timer
        self._numbers = count()

    @property
    def _timers(self) -> list[asyncio.TimerHandle]:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        return timers

    def _next_timer(self) -> float:
        return self._timers[0].when()

    def time(self) -> float:
        return self._moving.now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()  # type: ignore[attr-defined]
        timer = _Timer(when, callback, args, self, context)
        timer.number = next(self._numbers)
        heappush(self._timers, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end on a loop of its own.

    Raises:
        DeadlockError: it waits for what can never happen.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
