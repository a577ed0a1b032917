"""What the leader's decisions take in core and codec, by how many requests wait."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from proxy.core.actions import Dispatch
from proxy.core.config import SchedulerConfig
from proxy.core.events import Arrived, Ended, EngineUp
from proxy.core.fleet import Member, Register, Role
from proxy.core.limits import EngineLimits
from proxy.core.request import Request
from proxy.core.scheduler import Scheduler
from proxy.server.garbage import collect_young_only
from proxy.wire.letters import decode_letter, encode_letter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.core.events import Event

_SLOTS = 64
_TOKEN_BUDGET = 1_000_000
"""Nobody waits for a step, but for a slot."""
_ENGINE = EngineUp("http://engine:8000", EngineLimits(_TOKEN_BUDGET, _SLOTS), frozenset({"m"}))
_PACE_SECONDS = 1e-4
_MOVES = 2000


class _Alone:
    """One proxy by itself."""

    def __init__(self, most: int) -> None:
        self.scheduler = _scheduler(most)
        self.scheduler.handle(_ENGINE, 0.0)
        self.now = 0.0
        self.running: list[str] = []

    def happens(self, event: Event) -> tuple[float, ...]:
        """Return the CPU that it took."""
        self.now = round(self.now + _PACE_SECONDS, 6)
        began = time.thread_time()
        actions = self.scheduler.handle(event, self.now)
        self.scheduler.next_deadline()
        taken = time.thread_time() - began
        self.running += [action.request_id for action in actions if isinstance(action, Dispatch)]
        return (taken,)


class _Fleet:
    """A leader and a follower, to which everything happens."""

    def __init__(self, most: int) -> None:
        self.now = 0.0
        self.running: list[str] = []
        self._register = Register(born=-60.0)
        self._leader, self._follower = (Member(name, _scheduler(most)) for name in ("one", "two"))
        for member in (self._leader, self._follower):
            member.handle(_ENGINE, 0.0)
        while self._leader.role is not Role.LEADER or not self._follower.leader:
            self.now += 0.5
            self._leader.tick(self.now)
            self._beat()
            self._exchange()

    def happens(self, event: Event) -> tuple[float, ...]:
        """Return the CPU that it took the leader, and the follower."""
        before, self.now = self.now, round(self.now + _PACE_SECONDS, 6)
        if int(before * 2) != int(self.now * 2):
            self._beat()  # now and then, and not a part of any event
            self._exchange()
        began = time.thread_time()
        self._follower.handle(event, self.now)
        by_follower = time.thread_time() - began
        by_leader, more = self._exchange()
        return by_leader, by_follower + more

    @property
    def waiting(self) -> int:
        return self._leader.scheduler.waiting

    def _beat(self) -> None:
        for member in (self._leader, self._follower):
            member.on_standing(self._register.beat(member.id, 2.0, self.now), self.now, self.now)

    def _exchange(self) -> tuple[float, float]:
        """Let letters go to and fro until there are no more."""
        taken = [0.0, 0.0]
        members = self._leader, self._follower
        arrived: list[list[bytes]] = [[], []]
        while True:
            for which, member in enumerate(members):
                began = time.thread_time()
                actions = [a for data in arrived[which] for a in member.receive(decode_letter(data), self.now)]
                sent = [encode_letter(letter) for letter in member.take_outbox(self.now)] if member.has_mail else []
                member.next_deadline()
                taken[which] += time.thread_time() - began
                arrived[which], arrived[1 - which] = [], arrived[1 - which] + sent
                self.running += [action.request_id for action in actions if isinstance(action, Dispatch)]
            if not any(arrived):
                return taken[0], taken[1]


def _scheduler(most: int) -> Scheduler:
    return Scheduler(SchedulerConfig(max_queue_requests=most, max_queue_bytes=1 << 40, queue_timeout_seconds=1e6))


def measure(sizes: Sequence[int], rounds: int) -> str:
    """Let requests come to a follower, and end there, before queues of all ``sizes``, ``rounds`` times in turn."""
    collect_young_only()  # as the proxy does
    found: dict[int, list[np.ndarray]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size, results in found.items():
            results.append(_round(size))
    columns = ("alone", "leader", "follower")
    head = "".join(f"{name + ' ' + what:>24}" for what in ("arrival", "end") for name in columns)
    lines = [f"{'us, p50 (range of rounds), p99':<10}", f"{'waiting':<10}{head}"]
    for size, results in found.items():
        p50, p99 = np.quantile(np.array(results) * 1e6, (0.5, 0.99), axis=1)  # rounds, columns
        cells = [
            f"{np.median(p50[:, n]):.0f} ({p50[:, n].min():.0f}-{p50[:, n].max():.0f}), {np.median(p99[:, n]):.0f}"
            for n in range(2 * len(columns))
        ]
        lines.append(f"{size:<10}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def _round(waiting: int) -> np.ndarray:
    """CPU of arrivals and of ends with the release of the next: of one alone, a leader, a follower."""
    alone, fleet = _Alone(2 * waiting + 1000), _Fleet(2 * waiting + 1000)
    number = 0

    def arrive() -> list[float]:
        nonlocal number
        number += 1
        request = Request(str(number), 20 + 7919 * number % 4000, model="m", size_bytes=500, fingerprint=b"%d" % number)
        return [taken for side in (alone, fleet) for taken in side.happens(Arrived(request))]

    def end() -> list[float]:
        return [taken for side in (alone, fleet) for taken in side.happens(Ended(side.running.pop(0), 10, None, True))]

    for _ in range(waiting + _SLOTS):
        arrive()
    assert alone.scheduler.waiting == fleet.waiting
    taken = [(end(), arrive()) for _ in range(_MOVES)]
    return np.array([arrival + over for over, arrival in taken])
