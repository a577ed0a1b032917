from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.arrivals import Arrivals, Process, Rate, parse_arrivals, parse_rate


def test_a_constant_process_is_really_constant() -> None:
    assert list(islice(Arrivals(Process.CONSTANT).unit_times(Random(1)), 4)) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("text", ["poisson", "constant", "trace", "gamma:0.5", "gamma:4"])
def test_arrivals_are_told_as_they_are_read(text: str) -> None:
    assert str(parse_arrivals(text)) == text


@pytest.mark.parametrize("text", ["", "gamma", "gamma:0", "gamma:nan", "gamma:x", "poisson:1", "weibull"])
def test_other_arrivals_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="arrivals are"):
        parse_arrivals(text)


@pytest.mark.parametrize("text", ["2", "0.25", "2@60,8@30,2@60", "1..5@600", "0.5..2.5@10,3"])
def test_rates_are_told_as_they_are_read(text: str) -> None:
    assert str(parse_rate(text)) == text


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "x", "1..2", "1,2@3", "1@0", "1@-1", "1@inf", "1..0@5", "inf", "1@2@3", "1..2..3@4"]
)
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a rate is"):
        parse_rate(text)


def test_a_single_rate_is_known_as_one() -> None:
    assert Rate.constant(2.0).single == parse_rate("2").single == 2.0
    assert parse_rate("2@5").single is None


def test_steps_and_ramps_bring_the_requests_of_their_area() -> None:
    steps = parse_rate("2@10,8@5")
    assert [steps.time_of(n) for n in (0, 10, 20, 28, 60, 68)] == pytest.approx([0, 5, 10, 11, 15, 16])
    ramp = parse_rate("1..5@4,5")
    assert [ramp.time_of(n) for n in (0, 1.5, 12, 17)] == pytest.approx([0, 1, 4, 5])
    down = parse_rate("5..1@4,1")
    assert [down.time_of(n) for n in (4.5, 12, 13)] == pytest.approx([1, 4, 5])


rates = st.floats(0.1, 50)


@settings(deadline=None)
@given(
    st.lists(st.tuples(rates, rates, st.floats(0.1, 100)), min_size=1, max_size=4),
    st.lists(st.floats(0, 5000), min_size=2, max_size=8),
)
def test_more_requests_never_come_sooner(stretches: list[tuple[float, float, float]], counts: list[float]) -> None:
    text = ",".join(f"{a}..{b}@{s}" if a != b else f"{a}@{s}" for a, b, s in stretches)
    rate = parse_rate(text)
    times = [rate.time_of(n) for n in sorted(counts)]
    assert all(b >= a - 1e-9 for a, b in pairwise(times))
