"""The driver in virtual time: tickets, the one timer, and what becomes of requests that nobody waits for any more."""

import asyncio
from typing import Any

import pytest
from builders import make_limits, make_request
from interpreted import interpreted
from invariants import check_scheduler
from virtual import run_in_virtual_time

from proxy.core.actions import Action, Dispatch, Reject, describe
from proxy.core.config import SchedulerConfig
from proxy.core.events import DrainStarted, EngineDown, EngineUp
from proxy.core.request import RejectReason
from proxy.core.scheduler import Scheduler
from proxy.server.driver import Driver, Ticket

pytestmark = interpreted  # ticks are noted in the scheduler's place


class Stage:
    """A driver on the running loop with one engine of one sequence, so that a second request has to wait."""

    def __init__(self, engines: tuple[str, ...] = ("e0",), **config: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.log: list[str] = []
        self.ticks: list[float] = []
        self.scheduler = Scheduler(SchedulerConfig(**config))
        self._tick, self.scheduler.tick = self.scheduler.tick, self._note_tick  # type: ignore[method-assign]
        self.driver = Driver(self.scheduler, self.loop, clock=self.loop.time, on_action=self._note)
        for engine in engines:
            self.driver.feed(EngineUp(engine, make_limits(max_num_seqs=1)))

    def _note(self, action: Action, now: float) -> None:
        self.log.append(describe(action, now))

    def _note_tick(self, now: float) -> list[Action]:
        self.ticks.append(now)
        return self._tick(now)

    def submit(self, request_id: str, prompt_tokens: int = 10) -> Ticket:
        return self.driver.submit(make_request(request_id, prompt_tokens), self.driver.now())

    def stream(self, request_id: str) -> Ticket:
        """Submit a request and let its first token come: it holds the engine's one sequence from then on."""
        ticket = self.submit(request_id)
        self.driver.on_tokens(request_id, 1, self.driver.now())
        return ticket

    @property
    def timer(self) -> float | None:
        return None if self.driver._timer is None else self.driver._timer.when()

    def check_nothing_left(self) -> None:
        check_scheduler(self.scheduler, self.driver.now())
        assert (self.scheduler.waiting, self.scheduler.dispatched) == (0, 0)
        assert self.driver._tickets == {}
        assert self.timer is None


def test_a_ticket_is_settled_at_once_where_the_engine_is_idle() -> None:
    async def main() -> None:
        stage = Stage()
        ticket = stage.submit("a")
        assert ticket.done()
        assert await ticket == Dispatch("a", "e0")
        assert stage.timer is None
        stage.driver.end("a")
        stage.check_nothing_left()

    run_in_virtual_time(main())


def test_a_waiting_ticket_is_settled_when_the_one_before_it_ends() -> None:
    async def main() -> None:
        stage = Stage()
        stage.stream("a")
        ticket = stage.submit("b")
        stage.loop.call_at(2.5, stage.driver.end, "a")
        assert await ticket == Dispatch("b", "e0")
        assert stage.loop.time() == 2.5
        stage.driver.end("b")
        stage.check_nothing_left()
        assert stage.log == ["0.000000 dispatch a e0", "2.500000 dispatch b e0"]

    run_in_virtual_time(main())


def test_a_queue_timeout_comes_by_itself_and_on_time() -> None:
    async def main() -> None:
        stage = Stage(queue_timeout_seconds=7.25)
        stage.stream("a")
        await asyncio.sleep(0.5)
        answer = await stage.submit("b")
        assert isinstance(answer, Reject)
        assert answer.reason is RejectReason.QUEUE_TIMEOUT
        assert stage.loop.time() == 7.75
        stage.driver.end("b")
        stage.driver.end("a")
        stage.check_nothing_left()

    run_in_virtual_time(main())


def test_who_leaves_the_queue_is_never_dispatched() -> None:
    async def main() -> None:
        stage = Stage()
        stage.stream("a")
        stage.submit("b").cancel()
        stage.driver.end("b")
        assert stage.scheduler.waiting == 0
        third = stage.submit("c")
        stage.driver.end("a")
        assert await third == Dispatch("c", "e0")
        stage.driver.end("c")
        stage.check_nothing_left()
        assert [line.split()[1:] for line in stage.log] == [["dispatch", "a", "e0"], ["dispatch", "c", "e0"]]

    run_in_virtual_time(main())


def test_a_grant_that_nobody_takes_comes_back() -> None:
    """The handler is cancelled in the very turn in which its request is released."""

    async def main() -> None:
        stage = Stage()
        stage.stream("a")

        async def handler() -> None:
            try:
                await stage.submit("b")
            finally:
                stage.driver.end("b")

        task = asyncio.ensure_future(handler())
        await asyncio.sleep(0)
        stage.driver.end("a")
        assert stage.scheduler.dispatched == 1
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        stage.check_nothing_left()

    run_in_virtual_time(main())


def test_a_cancelled_ticket_does_not_break_the_others_of_its_turn() -> None:
    async def main() -> None:
        stage = Stage()
        stage.stream("a")
        tickets = [stage.submit(name) for name in "bcd"]
        tickets[1].cancel()
        stage.driver.feed(DrainStarted())
        assert [type(await ticket) for ticket in (tickets[0], tickets[2])] == [Reject, Reject]
        for name in "abcd":
            stage.driver.end(name)
        stage.check_nothing_left()

    run_in_virtual_time(main())


def test_what_an_engine_turned_away_goes_out_again_when_its_back_off_is_over() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.submit("a")
        await asyncio.sleep(1)
        ticket = stage.driver.not_started("a", 0.75)
        assert stage.scheduler.dispatched == 0
        assert await ticket == Dispatch("a", "e0")
        assert stage.loop.time() == 1.75
        stage.driver.end("a")
        stage.check_nothing_left()

    run_in_virtual_time(main())


def test_what_one_engine_turned_away_goes_to_another_at_once_and_before_later_requests() -> None:
    async def main() -> None:
        stage = Stage(("e0", "e1"))
        await stage.submit("a")
        stage.stream("b")
        later = stage.submit("c")
        ticket = stage.driver.not_started("a", 5.0)
        stage.driver.end("b")
        assert await ticket == Dispatch("a", "e1")
        assert not later.done()
        for name in "ac":
            stage.driver.end(name)
        stage.check_nothing_left()

    run_in_virtual_time(main())


def test_nobody_waits_for_engines_that_are_all_down() -> None:
    async def main() -> None:
        stage = Stage()
        stage.stream("a")
        ticket = stage.submit("b")
        stage.driver.feed(EngineDown("e0"))
        answer = await ticket
        assert isinstance(answer, Reject)
        assert answer.reason is RejectReason.NO_ENGINE
        assert stage.scheduler.dispatched == 1, "the stream in flight ends by its own events"
        for name in "ab":
            stage.driver.end(name)
        stage.check_nothing_left()

    run_in_virtual_time(main())


def test_there_is_one_timer_while_something_waits_and_none_otherwise() -> None:
    async def main() -> None:
        stage = Stage(("e0", "e1"), queue_timeout_seconds=10.0)
        stage.stream("a")
        stage.stream("b")
        assert stage.timer is None
        stage.submit("c")
        assert stage.timer == 10.0
        await asyncio.sleep(1)
        stage.submit("d")
        assert stage.timer == 10.0, "the older one's"
        stage.driver.not_started("a", 2.0)
        assert stage.timer == 3.0, "the end of the back-off comes earlier"
        for name in "abcd":
            stage.driver.end(name)
        stage.check_nothing_left()

    run_in_virtual_time(main())


def test_a_timer_that_is_called_early_does_not_spin() -> None:
    async def main() -> None:
        stage = Stage(queue_timeout_seconds=1.0)
        stage.driver._clock = lambda: stage.loop.time() - 4e-7  # loops call up to one tick of their clock too early
        stage.stream("a")
        await stage.submit("b")
        assert stage.ticks == [1.0]
        for name in "ab":
            stage.driver.end(name)
        stage.check_nothing_left()

    run_in_virtual_time(main())


def test_the_clock_is_read_in_whole_microseconds() -> None:
    async def main() -> None:
        driver = Driver(Scheduler(), asyncio.get_running_loop(), clock=lambda: 12.345678949)
        assert driver.now() == 12.345679

    run_in_virtual_time(main())


def test_a_closed_driver_ticks_no_more() -> None:
    async def main() -> None:
        stage = Stage(queue_timeout_seconds=1.0)
        stage.stream("a")
        stage.submit("b")
        stage.driver.close()
        await asyncio.sleep(5)
        assert stage.ticks == []

    run_in_virtual_time(main())


def test_reads_are_looked_at_in_their_order_when_all_have_been_passed_on() -> None:
    async def main() -> None:
        stage, seen = Stage(), list[tuple[bytes, float]]()
        for data in (b"a", b"b"):
            stage.driver.note(lambda read, at: seen.append((read, at)), data)
        assert seen == []
        await asyncio.sleep(0)
        assert seen == [(b"a", 0.0), (b"b", 0.0)]

    run_in_virtual_time(main())


def test_what_was_read_before_is_told_before_anything_that_happens_later() -> None:
    async def main() -> None:
        stage, told = Stage(), list[str]()
        stage.stream("a")
        stage.submit("b")
        stage.loop.call_later(1, stage.driver.note, lambda *_: told.append("read"), b"")
        await asyncio.sleep(2)
        stage.driver.note(lambda *_: told.append("last read"), b"")
        stage.driver.end("a")
        assert told == ["read", "last read"]
        assert stage.log[-1] == "2.000000 dispatch b e0"
        stage.driver.end("b")
        stage.check_nothing_left()

    run_in_virtual_time(main())


def test_a_fault_in_one_look_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        stage, seen = Stage(), list[bytes]()

        def faulty(read: bytes, now: float) -> None:
            raise ZeroDivisionError

        stage.driver.note(faulty, b"")
        stage.driver.note(lambda read, _: seen.append(read), b"b")
        await asyncio.sleep(0)
        assert seen == [b"b"]
        assert "ZeroDivisionError" in caplog.text

    run_in_virtual_time(main())
