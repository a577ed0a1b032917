"""``proxy.core.bypass``: the way past empty queues decides, and leaves behind, what the way through them would."""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar
from unittest.mock import patch

from builders import make_limits, make_request
from hypothesis import settings
from interpreted import interpreted
from test_scheduler_stateful import AnyEvents, SeveralModels

from proxy.core.actions import Action, Dispatch
from proxy.core.config import SchedulerConfig
from proxy.core.events import Arrived, Ended, EngineUp, Event, TokensProduced
from proxy.core.request import RequestClass
from proxy.core.scheduler import Scheduler
from proxy.core.snapshot import view_state
from proxy.core.turns import Turn

pytestmark = interpreted


class LongWay(Scheduler):
    """Puts every newcomer into a queue."""

    def handle(self, event: Event, now: float) -> list[Action]:
        with patch("proxy.core.scheduler.bypass", new=lambda *_, **__: None):
            return super().handle(event, now)


class BothWays(Scheduler):
    """Goes both, and compares."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        super().__init__(config)
        self.other = LongWay(config)

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, TokensProduced):
            return self.on_tokens(event.request_id, event.chunks, now) or []
        actions = super().handle(event, now)
        self._compare(actions, self.other.handle(event, now), now)
        return actions

    def on_tokens(self, request_id: str, chunks: int, now: float) -> list[Action] | None:
        actions = super().on_tokens(request_id, chunks, now)
        self._compare(actions, self.other.on_tokens(request_id, chunks, now), now)
        return actions

    def tick(self, now: float) -> list[Action]:
        actions = super().tick(now)
        self._compare(actions, self.other.tick(now), now)
        return actions

    def _compare(self, actions: list[Action] | None, others: list[Action] | None, now: float) -> None:
        assert actions == others
        assert self.next_deadline() == self.other.next_deadline()
        assert view_state(self, now) == view_state(self.other, now)


def both_ways(config: SchedulerConfig, lengths: Iterable[int]) -> BothWays:
    made = BothWays(config)
    for length in lengths:
        for scheduler in (made, made.other):
            scheduler._ledger.growth.pooled.learn(length)
    return made


class AnyEventsBothWays(AnyEvents):
    def make_scheduler(self, config: SchedulerConfig, lengths: list[int]) -> Scheduler:
        return both_ways(config, lengths)


class SeveralModelsBothWays(SeveralModels):
    def make_scheduler(self, config: SchedulerConfig, lengths: list[int]) -> Scheduler:
        return both_ways(config, lengths)


bounded = settings(
    max_examples=40, stateful_step_count=40, derandomize=True, database=None, deadline=None, report_multiple_bugs=False
)
TestAnyEventsBothWays = AnyEventsBothWays.TestCase
TestAnyEventsBothWays.settings = bounded
TestSeveralModelsBothWays = SeveralModelsBothWays.TestCase
TestSeveralModelsBothWays.settings = bounded


class TestCalmTraffic:
    """Hardly anybody waits: what most traffic is, and what the machines above seldom make."""

    classes: ClassVar = (RequestClass("a", tbt_seconds=0.1), RequestClass("b", weight=3.0))

    def test_requests_that_come_one_by_one(self) -> None:
        config = SchedulerConfig(tenant_guarantees={"x": 1000}, tenant_weights={"y": 2.0})
        scheduler, now = both_ways(config, ()), 100.0
        for engine in "ab":
            scheduler.handle(EngineUp(engine, make_limits(token_budget=2048, max_num_seqs=4), frozenset()), now)
        under_way: list[str] = []
        for number in range(400):
            now = round(now + (number * 7919 % 13) * 1e-3 + (200.0 if number in {150, 250} else 0.0), 6)
            request = make_request(
                str(number),
                20 + number * 31 % 400,
                request_class=self.classes[number % 2],
                tenant=("", "x", "y")[number % 3],
                may_wait=number % 7 > 0,
            )
            request = replace(request, streamed=number % 5 > 0)
            actions = scheduler.handle(Arrived(request, now - 0.01), now)
            under_way += [a.request_id for a in actions if isinstance(a, Dispatch)]
            now = round(now + 0.002, 6)
            if under_way and int(under_way[0]) % 5:
                scheduler.on_tokens(under_way[0], 1, now)
            if len(under_way) > number % 9 % 5:
                over = under_way.pop(0)
                scheduler.handle(Ended(over, number % 40, None, True), now)
                under_way += [a.request_id for a in scheduler.tick(now) if isinstance(a, Dispatch)]
        alone = scheduler.ledger.turns.counts[Turn.ALONE]
        assert alone > 200, "most found nobody waiting"


def test_nothing_is_left_of_a_request_that_did_not_wait() -> None:
    scheduler = Scheduler()
    scheduler.handle(EngineUp("e", make_limits(), frozenset()), 0.0)
    with patch("proxy.core.scheduler.why_refuse", side_effect=AssertionError("the long way")):
        assert scheduler.handle(Arrived(make_request("r")), 1.0) == [Dispatch("r", "e")]
    assert (scheduler.waiting, scheduler.waiting_tokens, scheduler.waiting_bytes) == (0, 0, 0)
    assert scheduler.next_deadline() is None
    scheduler.handle(Ended("r", 1), 2.0)
    assert not scheduler.ledger.entries
