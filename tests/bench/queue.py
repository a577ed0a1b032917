"""How long each arrival, release and end holds the event loop up while very many requests wait."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from proxy.core.config import SchedulerConfig
from proxy.core.events import Arrived, Ended, EngineUp
from proxy.core.limits import EngineLimits
from proxy.core.request import Request
from proxy.core.scheduler import Scheduler
from proxy.server.garbage import collect_young_only

_SLOTS = 64
_PACE_SECONDS = 1e-4
_MOVES = 10_000


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds of CPU: what else the machine does is not the queue's affair."""

    waiting: int
    filling: np.ndarray
    arrivals: np.ndarray
    ends: np.ndarray
    """Each releases somebody who waits."""
    joining: float
    """An engine joins for which all of them wait."""

    def __str__(self) -> str:
        def told(name: str, seconds: np.ndarray) -> str:
            p50, p99, most = np.quantile(seconds, (0.5, 0.99, 1.0)) * 1e6
            return f"{name:<28}{p50:>10.0f}{p99:>10.0f}{most:>10.0f}"

        return "\n".join(
            (
                f"{'us':<28}{'p50':>10}{'p99':>10}{'longest':>10}",
                told(f"arrivals up to {self.waiting}", self.filling),
                told(f"arrivals before {self.waiting}", self.arrivals),
                told("ends, each with a release", self.ends),
                f"{'another engine joins':<28}{'':>20}{self.joining * 1e6:>10.0f}",
            )
        )


def measure(waiting: int) -> Pauses:
    """Fill the queue, let requests come and go before it, and let another engine join."""
    scheduler = Scheduler(
        SchedulerConfig(max_queue_requests=2 * waiting, max_queue_bytes=1 << 40, queue_timeout_seconds=1e6)
    )
    limits = EngineLimits(max_num_seqs=_SLOTS)
    scheduler.handle(EngineUp("e0", limits, frozenset({"m"})), 0.0)
    collect_young_only()  # as the proxy does
    now, number, running = 0.0, 0, list[str]()

    def timed(event: Arrived | Ended) -> float:
        nonlocal now
        now = round(now + _PACE_SECONDS, 6)
        began = time.thread_time()
        for action in scheduler.handle(event, now):
            running.append(action.request_id)
        scheduler.next_deadline()
        return time.thread_time() - began

    def arrive() -> float:
        nonlocal number
        number += 1
        tokens = 20 + 7919 * number % 4000
        return timed(Arrived(Request(str(number), tokens, model="m", size_bytes=500, fingerprint=b"%d" % number)))

    filling = [arrive() for _ in range(waiting + _SLOTS)]
    arrivals, ends = [], []
    for _ in range(min(_MOVES, waiting)):
        ends.append(timed(Ended(running.pop(0), 10, None, True)))
        arrivals.append(arrive())
    began = time.thread_time()
    scheduler.handle(EngineUp("e1", limits, frozenset({"m"})), now)
    joining = time.thread_time() - began
    return Pauses(scheduler.waiting, np.array(filling), np.array(arrivals), np.array(ends), joining)
