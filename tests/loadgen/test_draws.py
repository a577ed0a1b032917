from itertools import pairwise
from math import exp
from random import Random
from statistics import fmean, pstdev

import pytest

from loadgen.draws import below, exponential, gamma, shuffled, weighted


def test_exponential_draws_follow_their_distribution() -> None:
    rng = Random("exponential")
    drawn = [exponential(rng) for _ in range(50_000)]
    assert fmean(drawn) == pytest.approx(1.0, abs=0.02)
    assert pstdev(drawn) == pytest.approx(1.0, abs=0.03)
    for at in (0.1, 1.0, 3.0):
        assert fmean(x > at for x in drawn) == pytest.approx(exp(-at), abs=0.01)
    correlation = fmean((x - 1) * (y - 1) for x, y in pairwise(drawn))
    assert correlation == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gamma_draws_have_mean_one_and_the_deviation_asked_for(cv: float) -> None:
    rng = Random("gamma")
    drawn = [gamma(rng, cv) for _ in range(8_000)]
    assert fmean(drawn) == pytest.approx(1.0, abs=0.05 * max(1.0, cv))
    assert pstdev(drawn) == pytest.approx(cv, rel=0.08)
    if cv == 1.0:
        assert fmean(x > 1 for x in drawn) == pytest.approx(exp(-1), abs=0.025)


def test_draws_are_the_same_everywhere_to_the_last_bit() -> None:
    rng = Random("golden")
    found = [
        exponential(rng).hex(),
        gamma(rng, 0.5).hex(),
        gamma(rng, 3.0).hex(),
        below(rng, 1000),
        weighted(rng, [1, 2]),
    ]
    assert found == ["0x1.fa4342fe97a41p+0", "0x1.8afd89edf62b6p-1", "0x1.a057ef20926a0p+2", 575, 1]
    assert shuffled(rng, range(8)) == [2, 1, 4, 3, 5, 0, 7, 6]


def test_a_shuffle_keeps_everything() -> None:
    assert sorted(shuffled(Random(1), range(100))) == list(range(100))
    firsts = {shuffled(Random(seed), range(4))[0] for seed in range(100)}
    assert firsts == {0, 1, 2, 3}


def test_weights_decide_how_often() -> None:
    rng = Random("weights")
    drawn = [weighted(rng, [1.0, 0.0, 3.0]) for _ in range(10_000)]
    assert fmean(i == 2 for i in drawn) == pytest.approx(0.75, abs=0.02)
    assert 1 not in drawn
