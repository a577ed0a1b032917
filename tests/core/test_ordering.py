from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.ordering import first_come_first_served, shortest_prompt_first

quick = settings(max_examples=200, derandomize=True, database=None, deadline=None)
tokens = st.integers(1, 1_000_000)
halvings = st.floats(0.5, 100)
arrivals = st.tuples(tokens, st.floats(0, 500))


def test_first_come_first_served_looks_at_nothing_but_the_arrival() -> None:
    key = first_come_first_served()
    assert key(1_000_000, 1.0) < key(1, 2.0)
    assert key(7, 3.0) == key(9_000, 3.0)


def test_of_two_that_came_together_the_shorter_prompt_goes_first() -> None:
    key = shortest_prompt_first(10.0)
    assert key(10, 5.0) < key(11, 5.0)


def test_of_two_equally_long_prompts_the_one_that_waited_longer_goes_first() -> None:
    key = shortest_prompt_first(10.0)
    assert key(500, 1.0) < key(500, 1.001)


def test_a_prompt_counts_half_after_one_halving_time() -> None:
    key = shortest_prompt_first(10.0)
    assert key(2048, 0.0) == key(1024, 10.0)
    assert key(2048, 0.0) == key(512, 20.0)


@quick
@given(tokens, tokens, st.floats(0, 1000), halvings)
def test_a_request_is_overtaken_by_a_fresh_one_just_while_its_wait_is_under_the_bound(
    long: int, short: int, wait: float, halving: float
) -> None:
    key = shortest_prompt_first(halving)
    bound = halving * log2(long / short)
    overtaken = key(short, wait) < key(long, 0.0)
    if abs(wait - bound) > 1e-6:
        assert overtaken == (wait < bound)


@quick
@given(arrivals, arrivals, st.floats(500, 600), halvings)
def test_the_fixed_key_orders_as_the_aged_length_does_at_any_later_time(
    one: tuple[int, float], other: tuple[int, float], now: float, halving: float
) -> None:
    key = shortest_prompt_first(halving)
    aged, aged_other = (log2(prompt_tokens) - (now - came) / halving for prompt_tokens, came in (one, other))
    if abs(aged - aged_other) > 1e-6:
        assert (key(*one) < key(*other)) == (aged < aged_other)


@pytest.mark.parametrize("halving", [0.0, -1.0, float("nan")])
def test_a_halving_time_that_is_not_positive_is_refused(halving: float) -> None:
    with pytest.raises(ValueError, match="halving_seconds"):
        shortest_prompt_first(halving)
