"""What a run's plots are drawn from, small enough to lie in its report: distributions, a scatter, and time series."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.sample import Sample
from loadgen.stability import waiting_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.sample import Floats
    from proxy.sim.records import RequestRecord

_STEPS = 100
_MOST_POINTS = 1500
_BINS = 60


def curves_of(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the curves; times in seconds of the run's own time, shares of one."""
    sample = Sample.of(records)
    names = [str(name) for name in np.unique(sample.classes)]
    return {
        "ttft_cdf": {name: cdf(sample.of_class(name).ttft) for name in names},
        "tbt_cdf": {name: cdf(sample.of_class(name).gaps) for name in names},
        "ttft_by_prompt": _scatter(sample),
        "series": _series(records),
    }


def cdf(values: Floats) -> list[list[float]]:
    """Return ``[value, share]`` at evenly spaced shares, and closer together in the tail.

    A value that never came is not on the curve, which then ends below one.
    """
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return []
    shares = np.unique(np.concatenate([np.linspace(0, 1, _STEPS + 1), 1 - np.geomspace(1e-4, 0.02, 20)]))
    places = np.minimum(len(ordered) - 1, np.ceil(shares * len(ordered)).astype(int).clip(1) - 1)
    return [
        [_short(ordered[place]), _short(share)]
        for place, share in zip(places, shares, strict=True)
        if np.isfinite(ordered[place])
    ]


def _scatter(sample: Sample) -> list[list[float]]:
    """Prompt tokens and TTFT of requests, evenly picked where there are many."""
    came = np.flatnonzero(np.isfinite(sample.ttft))
    picked = came[:: max(1, -(-len(came) // _MOST_POINTS))]
    return [[int(sample.prompt_tokens[i]), _short(sample.ttft[i])] for i in picked]


def _series(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Over time: rates at which requests came, were completed and failed, and how many waited and streamed."""
    arrivals = [r.request.at_seconds for r in records]
    ends = [r.finished_at for r in records if r.finished_at is not None]
    last = max([*arrivals, *ends], default=0.0)
    if last <= 0:
        return {}
    edges = np.linspace(0, last, _BINS + 1)
    width, middle = last / _BINS, (edges[:-1] + edges[1:]) / 2
    done = [r.finished_at or 0.0 for r in records if r.completed]
    failed = [r.finished_at for r in records if r.finished_at is not None and not r.completed]
    begun = np.sort([r.first_token_at for r in records if r.first_token_at is not None])
    over = np.sort([r.finished_at for r in records if r.first_token_at is not None and r.finished_at is not None])
    streaming = np.searchsorted(begun, middle, side="right") - np.searchsorted(over, middle, side="right")
    return {
        "at_s": [_short(at) for at in middle],
        "arrived_per_s": _per_second(arrivals, edges, width),
        "completed_per_s": _per_second(done, edges, width),
        "failed_per_s": _per_second(failed, edges, width),
        "waiting": [float(count) for count in waiting_at(records, middle)],
        "streaming": [float(count) for count in streaming],
    }


def _per_second(times: Sequence[float], edges: Floats, width: float) -> list[float]:
    return [_short(count / width) for count in np.histogram(times, edges)[0]]


def _short(value: float) -> float:
    return float(f"{value:.5g}")
