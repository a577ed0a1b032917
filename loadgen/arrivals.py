"""When requests come: processes at unit rate, and rates that change over time.

A process is drawn at a rate of one and stretched to the rate wanted, so that one seed at two rates gives the same
requests in the same order, only closer together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt
from typing import TYPE_CHECKING

from loadgen.draws import exponential, gamma

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random


class Process(StrEnum):
    """How requests follow each other."""

    POISSON = "poisson"
    """Independent users: exponential intervals."""
    GAMMA = "gamma"
    """Intervals of a chosen coefficient of variation: above 1 bursts, below 1 more even than a Poisson process."""
    CONSTANT = "constant"
    """Equal intervals, the first request at once."""
    TRACE = "trace"
    """The trace's own times."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process, with the CV of its intervals where that is free."""

    process: Process = Process.POISSON
    cv: float = 1.0

    def __str__(self) -> str:
        return f"{self.process}:{self.cv:g}" if self.process is Process.GAMMA else self.process.value

    def unit_times(self, rng: Random) -> Iterator[float]:
        """Yield arrival times at a rate of one, without end."""
        at = -1.0 if self.process is Process.CONSTANT else 0.0
        while True:
            match self.process:
                case Process.POISSON:
                    at += exponential(rng)
                case Process.GAMMA:
                    at += gamma(rng, self.cv)
                case Process.CONSTANT:
                    at += 1
                case Process.TRACE:
                    raise ValueError("a trace's times are not drawn")
            yield at


def parse_arrivals(text: str) -> Arrivals:
    """Read ``poisson``, ``constant``, ``trace`` or ``gamma:CV``.

    Raises:
        ValueError: the text has another form.
    """
    name, colon, cv = text.partition(":")
    try:
        process = Process(name)
        if process is not Process.GAMMA and not colon:
            return Arrivals(process)
        # A CV below a hundredth is a metronome, and above a hundred there is one burst in any run.
        if process is Process.GAMMA and 0.01 <= float(cv) <= 100:
            return Arrivals(process, float(cv))
    except ValueError:
        pass
    raise ValueError(f"arrivals are poisson, constant, trace or gamma:CV with a CV of 0.01 to 100, not {text!r}")


@dataclass(frozen=True, slots=True)
class Stretch:
    """A rate for some time, or a change of rate in that time; in requests per second."""

    first: float
    last: float
    seconds: float

    @property
    def requests(self) -> float:
        return (self.first + self.last) / 2 * self.seconds

    def time_of(self, requests: float) -> float:
        """Return when so many requests have come."""
        slope = (self.last - self.first) / self.seconds
        # The root that stays exact when the slope is small or zero.
        return 2 * requests / (self.first + sqrt(max(0.0, self.first * self.first + 2 * slope * requests)))


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate over time: stretches one after the other, and the last one's end rate ever after."""

    stretches: tuple[Stretch, ...]

    @classmethod
    def constant(cls, per_second: float) -> Rate:
        """Return a rate that does not change."""
        return cls((Stretch(per_second, per_second, inf),))

    @property
    def single(self) -> float | None:
        """The rate where it is one only."""
        only = self.stretches[0]
        return only.first if only.seconds == inf else None

    def __str__(self) -> str:
        def told(s: Stretch) -> str:
            rate = f"{s.first:g}" if s.first == s.last else f"{s.first:g}..{s.last:g}"
            return rate if s.seconds == inf else f"{rate}@{s.seconds:g}"

        return ",".join(map(told, self.stretches))

    def time_of(self, requests: float) -> float:
        """Return when so many requests have come."""
        at = 0.0
        for stretch in self.stretches:
            if stretch.seconds == inf:
                return at + requests / stretch.first
            if requests <= stretch.requests:
                return at + stretch.time_of(requests)
            at += stretch.seconds
            requests -= stretch.requests
        return at + requests / self.stretches[-1].last


_STRETCH = re.compile(r"([^.@]+(?:\.[^.@]+)?)(?:\.\.([^@]+))?(?:@(.+))?")


def parse_rate(text: str) -> Rate:
    """Read ``RATE`` or stretches ``RATE@SECONDS`` (a step) and ``FROM..TO@SECONDS`` (a ramp) with commas between.

    Raises:
        ValueError: the text has another form, or a number is not positive.
    """
    try:
        stretches = [_parse_stretch(part.strip()) for part in text.split(",")]
    except ValueError:
        stretches = []
    if not stretches or (len(stretches) > 1 and any(s.seconds == inf for s in stretches[:-1])):
        raise ValueError(
            "a rate is requests per second, such as 2, or steps and ramps with their seconds, such as 2@60,8@30 or "
            f"1..5@600, not {text!r}"
        )
    return Rate(tuple(stretches))


def _parse_stretch(text: str) -> Stretch:
    found = _STRETCH.fullmatch(text)
    if found is None:
        raise ValueError(text)
    first, last = float(found[1]), float(found[2] or found[1])
    seconds = float(found[3]) if found[3] else inf
    finite = 0 < first < inf and 0 < last < inf and seconds > 0
    if not finite or (first != last and seconds == inf) or (found[3] and seconds == inf):
        raise ValueError(text)
    return Stretch(first, last, seconds)
