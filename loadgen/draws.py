"""Random draws that come out the same, to the last bit, on every machine and Python.

The C library's ``log`` and ``exp`` differ in their last digit from one system to the next, and what Python's ``random``
makes of its uniform numbers has changed over the versions. So only ``Random.random`` is used, whose sequence is
promised to stay, with arithmetic that IEEE 754 fixes, and ``decimal`` for logarithms, which it rounds correctly.
"""

from __future__ import annotations

from decimal import Context, Decimal
from itertools import accumulate
from math import sqrt
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

_T = TypeVar("_T")

_DECIMALS = Context(prec=20)


def exponential(rng: Random) -> float:
    """Draw from the exponential distribution of mean one.

    By von Neumann's comparison of uniform numbers (1951), which needs no logarithm.
    """
    whole = 0
    while True:
        first = least = rng.random()
        run = 1
        while (following := rng.random()) < least:
            least = following
            run += 1
        if run % 2:
            return whole + first
        whole += 1


def gamma(rng: Random, cv: float) -> float:
    """Draw from the gamma distribution of mean one whose standard deviation is ``cv``.

    By Marsaglia and Tsang's method (2000).
    """
    shape = 1 / (cv * cv)
    boost = 1.0
    a = shape
    if a < 1:
        boost = _exp(_log(_positive(rng)) / a)
        a += 1
    d = a - 1 / 3
    c = 1 / sqrt(9 * d)
    while True:
        x = _normal(rng)
        v = 1 + c * x
        if v <= 0:
            continue
        v = v * v * v
        u = _positive(rng)
        # The first comparison spares two logarithms nearly always.
        if u < 1 - 0.0331 * (x * x) * (x * x) or _log(u) < 0.5 * x * x + d - d * v + d * _log(v):
            return boost * d * v / shape


def shuffled(rng: Random, items: Sequence[_T]) -> list[_T]:
    """Return the items in a random order."""
    order = list(items)
    for last in range(len(order) - 1, 0, -1):
        other = below(rng, last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def below(rng: Random, limit: int) -> int:
    """Draw a whole number from 0 to less than ``limit``."""
    return int(rng.random() * limit)


def weighted(rng: Random, weights: Sequence[float]) -> int:
    """Draw an index with a probability that is proportional to its weight."""
    sums = list(accumulate(weights))
    at = rng.random() * sums[-1]
    return next((i for i, upto in enumerate(sums) if at < upto), len(sums) - 1)


def _normal(rng: Random) -> float:
    # Marsaglia's polar method; its second number is not kept, so that a draw depends on nothing but the stream.
    while True:
        x, y = 2 * rng.random() - 1, 2 * rng.random() - 1
        s = x * x + y * y
        if 0 < s < 1:
            return x * sqrt(-2 * _log(s) / s)


def _positive(rng: Random) -> float:
    return 1 - rng.random()


def _log(value: float) -> float:
    return float(_DECIMALS.ln(Decimal(value)))


def _exp(value: float) -> float:
    return float(_DECIMALS.exp(Decimal(value)))
