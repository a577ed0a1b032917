"""Several replicas of the proxy on the simulator's clock, in front of the same engines: a scheduler to the run.

Requests come to the replicas in turn. Either the replicas are a fleet, with the very members that the live proxy runs,
letters that take their time and a store that answers at once; or each knows of nothing but its own requests.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Protocol

from proxy.core.events import Arrived, Ended, EngineReported, EngineUp, SliceEnded
from proxy.core.fleet import FleetConfig, Letter, Member, Register, Role
from proxy.core.scheduler import Scheduler
from proxy.sim.fleet import Clock, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.core.actions import Action
    from proxy.core.config import SchedulerConfig
    from proxy.core.engine import EngineBelief
    from proxy.core.events import Event


class Decider(Protocol):
    """What decides in a run: a scheduler, or something like one."""

    config: SchedulerConfig

    @property
    def engines(self) -> tuple[EngineBelief, ...]:
        """What is believed of each engine by whoever decides for all; nothing if there is no such one."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """As ``Scheduler.handle``."""

    def on_tokens(self, request_id: str, chunks: int, now: float) -> list[Action] | None:
        """As ``Scheduler.on_tokens``."""

    def tick(self, now: float) -> list[Action]:
        """As ``Scheduler.tick``."""

    def next_deadline(self) -> float | None:
        """As ``Scheduler.next_deadline``."""


class Replicas:
    """See the module's docstring; nothing may happen before ``start``, but that engines come up."""

    def __init__(self, count: int, config: SchedulerConfig, message_seconds: float, *, apart: bool = False) -> None:
        self.config = config
        self.letters = 0
        """That were sent."""
        self._delay_us = microseconds(message_seconds)
        self._clock = Clock()
        self._perform: Callable[[list[Action]], None] = list.clear
        self._fleet = FleetConfig()
        self._register = Register(born=-inf)
        self._members = [] if apart else [Member(f"r{i}", Scheduler(config), self._fleet) for i in range(count)]
        self._replicas: Sequence[Scheduler | Member] = self._members or [Scheduler(config) for _ in range(count)]
        self._writing: set[str] = set()
        self._by_id = {member.id: member for member in self._members}

    @property
    def engines(self) -> tuple[EngineBelief, ...]:
        leader = next((member for member in self._members if member.role is Role.LEADER), None)
        return () if leader is None else leader.scheduler.engines

    def start(self, clock: Clock, perform: Callable[[list[Action]], None], is_over: Callable[[], bool]) -> None:
        """Let the members give their first signs of life; the last ones are given when ``is_over``.

        ``perform``: does what is decided at other times than in a call.
        """
        self._clock, self._perform = clock, perform
        for member in self._members:
            self._beat(member, is_over)

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, EngineUp | EngineReported):
            return [action for of in self._replicas for action in self._after(of, of.handle(event, now))]
        match event:
            case Arrived(request):
                request_id = request.id
            case SliceEnded(piece):
                request_id = piece.request_id
            case Ended(request_id):
                pass
            case _:
                raise TypeError(f"{type(event).__name__} does not happen in a simulation")
        of = self._of(request_id)
        return self._after(of, of.handle(event, now))

    def on_tokens(self, request_id: str, chunks: int, now: float) -> list[Action] | None:
        of = self._of(request_id)
        actions = of.on_tokens(request_id, chunks, now)
        self._after(of, [])
        return actions

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for of in self._replicas:
            due = of.next_deadline()
            if due is not None and microseconds(due) <= self._clock.now_us:
                actions += self._after(of, of.tick(now))
        return actions

    def next_deadline(self) -> float | None:
        return min((due for of in self._replicas if (due := of.next_deadline()) is not None), default=None)

    def _of(self, request_id: str) -> Scheduler | Member:
        return self._replicas[int(request_id) % len(self._replicas)]

    def _after(self, of: Scheduler | Member, actions: list[Action]) -> list[Action]:
        """Have the letters written that a replica has to write, when all that happens now has happened."""
        if isinstance(of, Member) and of.has_mail and of.id not in self._writing:
            self._writing.add(of.id)
            self._clock.at(self._clock.now_us, self._write, of)
        return actions

    def _write(self, member: Member) -> None:
        self._writing.remove(member.id)
        for letter in member.take_outbox(self._clock.now):
            self.letters += 1
            self._clock.at(self._clock.now_us + self._delay_us, self._deliver, letter)

    def _deliver(self, letter: Letter) -> None:
        member = self._by_id[letter.to]
        self._perform(self._after(member, member.receive(letter, self._clock.now)))

    def _beat(self, member: Member, is_over: Callable[[], bool]) -> None:
        now = self._clock.now
        standing = self._register.beat(member.id, self._fleet.life_seconds, now)
        self._perform(self._after(member, member.on_standing(standing, now, now)))
        if not is_over():
            when_us = self._clock.now_us + microseconds(self._fleet.beat_seconds)
            self._clock.at(when_us, partial(self._beat, member, is_over))
