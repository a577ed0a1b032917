"""Whether a server keeps up: a queue that only grows breaks every limit in the end, whatever a short run has seen."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.sample import Floats
    from proxy.sim.records import RequestRecord

_LOOKS = 64
_LEAST_SHARE = 0.03
"""Of the arrivals; a queue that grows by less may as well be the ordinary ups and downs of a loaded one."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How the number of requests that wait for their first token went on while requests came."""

    per_second: float
    """Slope of a straight line through it."""
    share: float
    """The same as a share of the arrivals: what the server does not manage."""
    at_end: float
    unstable: bool
    """Whether the server is not up to the load."""


def waiting_at(records: Sequence[RequestRecord], times: Floats) -> Floats:
    """Return how many requests had come and had neither a token nor an end at each of ``times``."""
    arrivals = np.sort([r.request.at_seconds for r in records])
    begins = np.sort([_begun(r) for r in records])
    return (np.searchsorted(arrivals, times, side="right") - np.searchsorted(begins, times, side="right")).astype(float)


def _begun(record: RequestRecord) -> float:
    if record.first_token_at is not None:
        return record.first_token_at
    return inf if record.finished_at is None else record.finished_at


def growth_of(records: Sequence[RequestRecord], since_seconds: float = 0.0) -> Growth:
    """Judge the queue from ``since_seconds`` to the last arrival.

    It is unstable if at least 3 % of the arrivals stay in it, more than chance explains (a random walk of as many
    steps), quarter by quarter.
    """
    arrivals = [r.request.at_seconds for r in records if r.request.at_seconds >= since_seconds]
    if len(arrivals) < 20:  # too few to tell
        return Growth(0.0, 0.0, 0.0, unstable=False)
    start, end = min(arrivals), max(arrivals)
    if end <= start:
        return Growth(0.0, 0.0, 0.0, unstable=False)
    times = np.linspace(start, end, _LOOKS)
    waiting = waiting_at(records, times)
    slope = float(np.polyfit(times - start, waiting, 1)[0])
    quarters = waiting.reshape(4, -1).mean(axis=1)
    share = slope * (end - start) / len(arrivals)
    grows = bool((np.diff(quarters) > 0).all())
    unstable = grows and share >= _LEAST_SHARE and quarters[-1] - quarters[0] > sqrt(len(arrivals))
    return Growth(slope, share, float(waiting[-1]), unstable=bool(unstable))
