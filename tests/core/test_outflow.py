"""How a queue empties: work in order, and the wait that follows from it, against what really happens."""

from math import inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.fairness import Flow
from proxy.core.outflow import Outflow, WorkInOrder

places = st.tuples(st.integers(0, 30).map(float), st.integers(1, 10_000))


@given(st.lists(st.one_of(places, st.integers(0, 1000)), max_size=600))
def test_the_work_before_a_key_is_that_of_smaller_and_of_equal_keys(changes: list[tuple[float, int] | int]) -> None:
    work = WorkInOrder()
    there: list[tuple[float, int, int]] = []
    for number, change in enumerate(changes):
        if not isinstance(change, int):
            there.append((change[0], number, change[1]))
            work.add(*there[-1])
        elif there:
            work.remove(*there.pop(change % len(there)))
    assert len(work) == len(there)
    assert bool(work) == bool(there)
    for key in (-1.0, 0.0, 7.0, 7.5, 30.0, inf):
        assert work.before(key) == sum(tokens for k, _, tokens in there if k <= key)
    assert work.tokens == work.before(inf)


def test_many_entries_are_kept_in_short_runs() -> None:
    work = WorkInOrder()
    for number in range(10_000):
        work.add(float(number * 7919 % 10_000), number, 1)
    assert max(map(len, work._runs)) <= 256
    assert len(work._runs) <= 160
    assert work.before(1234.0) == 1235


def test_what_is_not_there_cannot_be_removed() -> None:
    work = WorkInOrder()
    with pytest.raises(KeyError):
        work.remove(1.0, 1, 1)
    work.add(1.0, 1, 5)
    for wrong in ((1.0, 1, 6), (1.0, 2, 5), (2.0, 1, 5)):
        with pytest.raises(KeyError):
            work.remove(*wrong)
    assert work.tokens == 5


def busy_outflow(ageing: float = 0.0, *, rate: float = 1000.0, tokens: int = 500, releases: int = 100) -> Outflow:
    """An outflow that was seen to release ``rate`` tokens per second, somebody always waiting, and is empty now."""
    outflow = Outflow(ageing)
    outflow.wait(0.0, 0, tokens, 0.0)
    for n in range(1, releases + 1):
        now = n * tokens / rate
        outflow.wait(float(n), n, tokens, now)
        outflow.release(float(n - 1), n - 1, tokens, now)
    outflow.leave(float(releases), releases, tokens)
    return outflow


def test_nothing_is_known_before_anybody_waited() -> None:
    outflow = Outflow(0.0)
    assert outflow.tokens_per_second is None
    assert outflow.wait_seconds(1.0, 0.0) is None
    for n in range(100):
        outflow.wait(float(n), n, 500, float(n))
        outflow.release(float(n), n, 500, float(n))
    assert not outflow.trusted, "who was released at once tells nothing about a queue"
    assert outflow.tokens_per_second is None


def test_the_rate_is_what_was_released_while_somebody_waited() -> None:
    outflow = busy_outflow()
    assert outflow.tokens_per_second == pytest.approx(1000.0)
    outflow.wait(0.0, 500, 500, 1000.0)  # after a long time without anybody
    outflow.release(0.0, 500, 500, 1000.5)
    assert outflow.tokens_per_second == pytest.approx(1000.0), "idle time does not count"


def test_the_rate_follows_a_change() -> None:
    outflow = busy_outflow(rate=1000.0)
    began = 1000.0
    outflow.wait(0.0, 1000, 500, began)
    for n in range(1, 150):
        outflow.wait(float(n), 1000 + n, 500, began + 2.0 * n)
        outflow.release(float(n - 1), 999 + n, 500, began + 2.0 * n)
    assert outflow.tokens_per_second == pytest.approx(250.0, rel=0.1)


def test_it_is_trusted_after_some_releases() -> None:
    assert not busy_outflow(releases=10).trusted
    assert busy_outflow(releases=30).trusted


def test_the_wait_is_the_work_before_a_key_at_the_rate_of_release() -> None:
    outflow = busy_outflow()
    for n, key in enumerate((1.0, 2.0, 3.0, 4.0)):
        outflow.wait(key, 200 + n, 1000, 100.0)
    assert [outflow.wait_seconds(key, 100.0) for key in (0.5, 1.5, 2.5, 9.0)] == pytest.approx([0.0, 1.0, 2.0, 4.0])


class TestOvertaking:
    """Shortest first, a prompt counting half as long every 10 s; 500 tokens a second of prompts with 256 tokens."""

    AGEING = 0.1

    def loaded(self, *, arriving: float) -> Outflow:
        outflow = busy_outflow(self.AGEING, rate=1000.0)
        for n in range(200):
            now = 100.0 + n * 300 / arriving
            outflow.arrive(log2(300) + now * self.AGEING, 300, now)
        self.now = now
        outflow.wait(log2(200) + now * self.AGEING, 999, 1000, now)
        return outflow

    def wait(self, outflow: Outflow, tokens: int) -> float:
        found = outflow.wait_seconds(log2(tokens) + self.now * self.AGEING, self.now)
        assert found is not None
        return found

    def test_whoever_comes_later_and_goes_first_counts(self) -> None:
        outflow = self.loaded(arriving=500.0)
        assert self.wait(outflow, 250) == pytest.approx(1.0), "nobody overtakes who is shorter"
        assert self.wait(outflow, 8000) == pytest.approx(2.0, rel=0.05), "half of the rate goes to those who overtake"

    def test_but_only_as_long_as_it_has_not_aged_enough(self) -> None:
        outflow = self.loaded(arriving=1500.0)
        # 6000 tokens are 4.4 halvings more than 279, the middle of the bucket of 300: for 44 s all newcomers go first,
        # and bring 500 tokens a second more than are served.
        until = 10 * log2(6000 / 279)
        assert self.wait(outflow, 6000) == pytest.approx(until + (1000 + 500 * until) / 1000, rel=0.02)

    def test_nobody_overtakes_in_the_order_of_arrival(self) -> None:
        outflow = busy_outflow(1.0, rate=1000.0)
        for n in range(100):
            outflow.arrive(100.0 + n, 5000, 100.0 + n)
        outflow.wait(199.0, 999, 1000, 199.0)
        assert outflow.wait_seconds(200.0, 200.0) == pytest.approx(1.0)


class TestFlows:
    """1000 tokens a second; ``FLOOD`` and ``CALM`` have half of it each."""

    FLOOD, CALM = Flow(1.0, "flood"), Flow(1.0, "calm")

    def flooded(self) -> Outflow:
        outflow = busy_outflow()
        for n in range(20):
            outflow.wait(float(n), 200 + n, 1000, 100.0, self.FLOOD)
        return outflow

    def test_another_s_work_does_not_hold_up_a_flow_without_any(self) -> None:
        outflow = self.flooded()
        assert outflow.wait_seconds(99.0, 100.0, self.CALM, 0.5) == 0.0
        assert outflow.wait_seconds(99.0, 100.0, self.FLOOD, 1.0) == pytest.approx(20.0)

    def test_a_flow_s_own_work_goes_at_its_share_of_the_rate(self) -> None:
        outflow = self.flooded()
        outflow.wait(50.0, 300, 1000, 100.0, self.CALM)
        assert outflow.wait_seconds(99.0, 100.0, self.CALM, 0.5) == pytest.approx(2.0)
        assert outflow.wait_seconds(99.0, 100.0, self.CALM, 0.1) == pytest.approx(10.0)
        assert outflow.wait_seconds(1.5, 100.0, self.CALM, 0.5) == 0.0, "nothing of its own goes before"

    def test_but_what_others_do_not_use_of_theirs_is_used(self) -> None:
        outflow = self.flooded()
        outflow.wait(50.0, 300, 1000, 100.0, self.CALM)
        assert outflow.wait_seconds(99.0, 100.0, self.FLOOD, 0.5) == pytest.approx(21.0), "not 40"

    def test_who_comes_of_another_flow_does_not_overtake(self) -> None:
        outflow = busy_outflow(0.1)
        outflow.wait(log2(300) + 10.0, 500, 100, 100.0, self.CALM)
        outflow.wait(log2(300) + 10.0, 501, 100, 100.0, self.FLOOD)
        for n in range(200):
            now = 100.0 + n
            outflow.arrive(log2(300) + now * 0.1, 900, now, self.FLOOD)
        key = log2(8000) + now * 0.1
        assert outflow.wait_seconds(key, now, self.FLOOD, 0.5) == pytest.approx(2.0, rel=0.05)
        assert outflow.wait_seconds(key, now, self.CALM, 0.5) == pytest.approx(0.2)

    def test_nothing_is_kept_of_a_flow_that_does_not_wait(self) -> None:
        outflow = self.flooded()
        for n in range(20):
            outflow.leave(float(n), 200 + n, 1000, self.FLOOD)
        assert not outflow._flows
