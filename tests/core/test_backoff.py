"""How long an engine that turns requests away is left alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.backoff import MAX_BACK_OFF_SECONDS, BackOff


def test_it_doubles_while_the_engine_refuses_again_and_again() -> None:
    back_off, now = BackOff(), 100.0
    waits = []
    for _ in range(8):
        until = back_off.refused(None, now)
        waits.append(until - now)
        now = until + 0.01
    assert waits == pytest.approx([1, 2, 4, 8, 16, 30, 30, 30])


def test_it_begins_anew_when_the_engine_has_worked_for_as_long() -> None:
    back_off = BackOff()
    back_off.refused(None, 0.0)
    assert back_off.refused(None, 1.5) == 3.5
    assert back_off.refused(None, 5.6) == 6.6


def test_what_the_engine_asks_for_holds_within_bounds() -> None:
    assert BackOff().refused(7.0, 0.0) == 7.0
    assert BackOff().refused(0.0, 0.0) == 0.1
    assert BackOff().refused(3600.0, 0.0) == MAX_BACK_OFF_SECONDS


def test_requests_that_were_on_their_way_tell_nothing_new() -> None:
    back_off = BackOff()
    assert {back_off.refused(None, 0.0 + n / 100) for n in range(20)} == {1.0}
    assert back_off.refused(None, 1.0) == 3.0


@given(st.lists(st.tuples(st.floats(0, 100), st.one_of(st.none(), st.floats(0, 1e9)))))
def test_it_never_ends_before_it_did_and_is_bounded(refusals: list[tuple[float, float | None]]) -> None:
    back_off, now, last = BackOff(), 0.0, 0.0
    for passed, asked in refusals:
        now += passed
        until = back_off.refused(asked, now)
        assert last <= until <= max(last, now + MAX_BACK_OFF_SECONDS)
        assert until > now
        last = until
