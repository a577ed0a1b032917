"""What happened to each request of a run, and the figures drawn from it.

One definition of every metric for the simulator and the load generator:

TTFT
    first token minus the *intended* arrival, so that a late sender or a queue counts.
TBT
    gap between two arrivals of tokens in one stream, pooled over the streams of a class. Tokens that arrive
    together, in one chunk or in several chunks of one read, end one gap; no zeros are added.
attainment
    share of all requests that completed with TTFT and every TBT within their class's deadlines. A failed
    or refused request has missed. Goodput (``attained_per_s``) is their number per second of the run.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from proxy.core.request import RequestClass
    from proxy.sim.kvcache import Produced
    from proxy.sim.workload import ScheduledRequest

LENGTH_BUCKETS = (0, 256, 1024, 2048, 4096, 8192)
"""Lower edges of the prompt-length buckets, in tokens."""


@dataclass(slots=True)
class RequestRecord:
    """The life of one request; times in seconds since the run's start."""

    request: ScheduledRequest
    sent_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    tokens: int = 0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    refusals: int = 0
    retries: int = 0
    """How often its client came back after a refusal."""
    queue_seconds: float | None = None
    """How long it was held back by proxy and engine, as far as they tell."""
    error: str | None = None
    """What went wrong, in a few words that repeat ("http 503"); ``None`` while running and on success."""

    def on_tokens(self, now: float, count: int = 1) -> None:
        """Note that a chunk with ``count`` tokens arrived at ``now``."""
        if self.last_token_at is None:
            self.first_token_at = now
        elif now > self.last_token_at:
            self.gaps.append(now - self.last_token_at)
        self.last_token_at = now
        self.tokens += count

    def on_queued(self, seconds: float) -> None:
        """Note that it waited in one more queue."""
        self.queue_seconds = (self.queue_seconds or 0.0) + seconds

    @property
    def completed(self) -> bool:
        return self.finished_at is not None and self.error is None and self.first_token_at is not None

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.request.at_seconds

    @property
    def retries_let_in(self) -> int:
        """How many of its retries were not refused."""
        return self.retries - max(0, self.refusals - 1)

    @property
    def attained(self) -> bool:
        """Whether it completed within all its class's deadlines."""
        kind, ttft = self.request.request_class, self.ttft_seconds
        if not self.completed or ttft is None:
            return False
        in_time = kind.ttft_seconds is None or ttft <= kind.ttft_seconds
        return in_time and (kind.tbt_seconds is None or max(self.gaps, default=0.0) <= kind.tbt_seconds)


def note_tokens(records: Mapping[str, RequestRecord], produced: Iterable[Produced], now: float) -> int:
    """Note one token of each sequence at ``now``; return how many ended. As ``on_tokens``, but without its calls.

    Most of the time of a simulation without a proxy goes by here.
    """
    ended = 0
    for request_id, finished in produced:
        record = records[request_id]
        last = record.last_token_at
        if last is None:
            record.first_token_at = now
        elif now > last:
            record.gaps.append(now - last)
        record.last_token_at = now
        record.tokens += 1
        if finished:
            record.finished_at = now
            ended += 1
    return ended


def quantiles(values: Iterable[float], *percents: int) -> dict[str, float | None]:
    """Return ``{"p50": ...}`` by linear interpolation; ``None`` where there is no value or it is infinite."""
    data = np.fromiter(values, dtype=float)
    if not data.size:
        return {f"p{p}": None for p in percents}
    # A censored value (inf) next to a finite one must give inf and not nan, hence no interpolation there.
    found = [np.percentile(data, p, method="linear" if np.isfinite(data).all() else "higher") for p in percents]
    return {f"p{p}": float(v) if np.isfinite(v) else None for p, v in zip(percents, found, strict=True)}


def summarise(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Draw the figures of a run from its records.

    TTFT of a request that never began counts as infinite, so that refusing requests cannot improve it.
    """
    classes: dict[str, RequestClass] = {r.request.request_class.name: r.request.request_class for r in records}
    done = [r for r in records if r.completed]
    ends = [r.finished_at for r in records if r.finished_at is not None]
    arrivals = [r.request.at_seconds for r in records]
    span = max(ends, default=0.0) - min(arrivals, default=0.0)
    last = max(arrivals, default=0.0)
    arrival_span = last - min(arrivals, default=0.0)
    by_class = {name: [r for r in records if r.request.request_class.name == name] for name in sorted(classes)}
    return {
        "requests": len(records),
        "completed": len(done),
        "refusals": sum(r.refusals for r in records),
        "retries": sum(r.retries for r in records),
        "retries_let_in": sum(r.retries_let_in for r in records),
        "errors": _count(r.error for r in records if r.error),
        "offered_per_s": (len(records) - 1) / arrival_span if arrival_span else None,
        "completed_per_s": len(done) / span if span > 0 else None,
        "attained_per_s": sum(r.attained for r in records) / span if span > 0 else None,
        "tokens_per_s": sum(r.tokens for r in records) / span if span > 0 else None,
        "ttft_s": quantiles(map(_ttft, records), 50, 90, 99),
        "ttft_s_by_class": {name: quantiles(map(_ttft, rs), 50, 90, 99) for name, rs in by_class.items()},
        "ttft_s_by_tenant": {
            name: {
                "requests": len(rs),
                "completed_per_s": sum(r.completed and (r.finished_at or inf) < last for r in rs) / arrival_span
                if arrival_span
                else None,
                **quantiles(map(_ttft, rs), 50, 90, 99),
            }
            for name in sorted({r.request.tenant for r in records} - {""})
            if (rs := [r for r in records if r.request.tenant == name])
        },
        "ttft_s_by_prompt_tokens": {
            (f"{low}-{high - 1}" if high < inf else f"{low}+"): {
                "requests": len(rs),
                **quantiles(map(_ttft, rs), 50, 99),
            }
            for low, high in pairwise((*LENGTH_BUCKETS, inf))
            if (rs := [r for r in records if low <= r.request.prompt_tokens < high])
        },
        "tbt_s": {name: quantiles((g for r in rs for g in r.gaps), 50, 99) for name, rs in by_class.items()},
        "attainment": {name: sum(r.attained for r in rs) / len(rs) for name, rs in by_class.items()},
    }


def _ttft(record: RequestRecord) -> float:
    ttft = record.ttft_seconds
    return inf if ttft is None else ttft


def _count(items: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts
