"""One run at one rate, judged by an SLO: what a search for a capacity is told."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.intervals import quantile
from loadgen.metrics import json_number
from loadgen.sample import Sample
from loadgen.stability import growth_of
from proxy.sim.search import Finding, Margin, Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.slo import Limit, Slo
    from proxy.sim.records import RequestRecord

_MOST = 99.0
"""In JSON there is no infinity; the logarithm of a ratio is never this large otherwise."""


def find(
    trial: Trial, records: Sequence[RequestRecord], slo: Slo, *, warmup: float = 0.0, ended_early: str | None = None
) -> Finding:
    """Judge a run by its requests after the first ``warmup`` (a share of the time in which requests come)."""
    since = warmup * max((r.request.at_seconds for r in records), default=0.0)
    measured = [r for r in records if r.request.at_seconds >= since]
    sample = Sample.of(measured)
    growth = growth_of(records, since)
    return Finding(
        trial,
        {limit.name: _margin(limit, sample, trial.seed) for limit in slo.limits},
        growth.unstable,
        growth.share,
        ended_early,
        _figures(sample, measured),
    )


def _margin(limit: Limit, sample: Sample, seed: int) -> Margin:
    value = limit.value(sample)
    margin = max(-_MOST, min(_MOST, limit.margin(value)))
    deviation = min(_MOST, limit.deviation(sample, seed))
    return Margin(None if value is None else json_number(value), margin, deviation, limit.is_share)


def _figures(sample: Sample, records: Sequence[RequestRecord]) -> dict[str, Any]:
    ends = [r.finished_at for r in records if r.finished_at is not None]
    span = max(ends, default=0.0) - min((r.request.at_seconds for r in records), default=0.0)
    done, attained = int(sample.completed.sum()), int(sample.attained.sum())
    delays = np.array([r.sent_at - r.request.at_seconds for r in records if r.sent_at is not None], dtype=float)
    return {
        "requests": len(sample),
        "completed": done,
        "attainment": attained / len(sample) if len(sample) else None,
        "completed_per_s": done / span if span > 0 else None,
        "attained_per_s": attained / span if span > 0 else None,
        "ttft_p50_s": json_number(quantile(sample.ttft, 0.5)),
        "ttft_p99_s": json_number(quantile(sample.ttft, 0.99)),
        "tbt_p99_s": {
            str(name): json_number(quantile(sample.of_class(name).gaps, 0.99)) for name in np.unique(sample.classes)
        },
        "schedule_delay_p99_s": json_number(quantile(delays, 0.99)),
    }


def broken_for_sure(slo: Slo, records: Sequence[RequestRecord], now: float, planned: Sequence[str]) -> str | None:
    """Return the limit that is broken whatever is still to come, or ``None``.

    ``records`` are those of the measured requests that have been sent by ``now``; ``planned`` are the classes of all
    measured requests. A request that still waits counts only where it has waited too long already.
    """
    for limit in slo.limits:
        if limit.metric == "ttft":
            known = [r for r in records if r.first_token_at is not None or _age(r, now) > limit.limit]
        else:
            known = [r for r in records if r.finished_at is not None]
        count = planned.count(limit.group) if limit.group else len(planned)
        if known and limit.hopeless(Sample.of(known), count):
            return limit.name
    return None


def _age(record: RequestRecord, now: float) -> float:
    return now - record.request.at_seconds if record.finished_at is None else inf
