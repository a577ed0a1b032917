"""The figures of a run. What each of them means, and why it is so and not otherwise: docs/loadgen-metrics.md."""

from __future__ import annotations

from itertools import pairwise
from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.intervals import PooledQuantile, bootstrap, quantile
from loadgen.results import Result
from loadgen.sample import Sample
from proxy.sim.records import LENGTH_BUCKETS, summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.sample import Floats, Integers
    from proxy.sim.records import RequestRecord

_PERCENTS = (50, 90, 99)

_WILSON_Z = 1.96


def measure(records: Sequence[RequestRecord], *, seed: int = 0) -> dict[str, Any]:
    """Return all figures of a run's measured requests; times in seconds of the run's own time.

    ``seed`` draws the intervals. ``None`` stands for what never came, or is not known.
    """
    sample = Sample.of(records)
    return {
        **summarise(records),
        "all": _group(sample, seed),
        "by_class": {str(name): _group(sample.of_class(name), seed) for name in np.unique(sample.classes)},
        "by_tenant": {
            str(name): _group(sample.where(sample.tenants == name), seed) for name in np.unique(sample.tenants) if name
        },
        "by_prompt_tokens": {
            bucket: _group(group, None)
            for bucket, low, high in length_buckets()
            if len(group := sample.where((sample.prompt_tokens >= low) & (sample.prompt_tokens < high)))
        },
        "chunks": _chunks(records),
        "schedule_delay_s": _told(_delays(records), 50, 99),
    }


def length_buckets() -> list[tuple[str, float, float]]:
    """Name, least and first excluded length of each prompt-length bucket."""
    return [
        (f"{low}-{high - 1}" if high < inf else f"{low}+", low, high) for low, high in pairwise((*LENGTH_BUCKETS, inf))
    ]


def _group(sample: Sample, seed: int | None) -> dict[str, Any]:
    """The figures of some requests; with a ``seed`` also how far chance would move the ones that decide."""
    size = len(sample)
    figures: dict[str, Any] = {
        "requests": size,
        "completed": int(sample.completed.sum()),
        "attainment": float(sample.attained.mean()) if size else None,
        "ttft_s": _told(sample.ttft),
        "first_byte_s": _told(sample.first_byte),
        "tbt_s": _told(sample.gaps),
        "tpot_s": _told(sample.tpot),
        "e2e_s": _told(sample.e2e),
    }
    if not np.isnan(sample.queue).all():
        figures["server_queue_s"] = _told(sample.queue)
    if seed is not None:
        own = np.arange(size)
        figures["intervals"] = {
            "ttft_s": {f"p{p}": _interval(sample.ttft, own, size, p, seed) for p in (50, 99)},
            "tbt_s": {f"p{p}": _interval(sample.gaps, sample.owners, size, p, seed) for p in (50, 99)},
            "attainment": wilson(int(sample.attained.sum()), size),
        }
    return figures


def _told(values: Floats, *percents: int) -> dict[str, float | None]:
    known = values[~np.isnan(values)]
    found = {f"p{p}": json_number(quantile(known, p / 100)) for p in percents or _PERCENTS}
    return found if percents else {"mean": json_number(float(known.mean()) if len(known) else np.nan), **found}


def _interval(values: Floats, owners: Integers, requests: int, percent: int, seed: int) -> list[float | None] | None:
    found = bootstrap(PooledQuantile(values, owners, requests, percent / 100), requests, seed)
    return None if found is None else [json_number(found.low), json_number(found.high)]


def wilson(successes: int, of: int) -> list[float] | None:
    """Return the 95 % interval of a share after Wilson: at 100 % the bootstrap would see no chance at work."""
    if not of:
        return None
    z2, share = _WILSON_Z**2, successes / of
    middle, half = share + z2 / (2 * of), _WILSON_Z * sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return [max(0.0, (middle - half) / (1 + z2 / of)), min(1.0, (middle + half) / (1 + z2 / of))]


def _chunks(records: Sequence[RequestRecord]) -> dict[str, Any] | None:
    """How many tokens came at a time; a TBT that ends with a chunk of five tokens is one gap, and not five."""
    sizes = [np.asarray(r.chunk_tokens) for r in records if isinstance(r, Result) and r.chunk_tokens]
    if not sizes:
        return None
    pooled = np.concatenate(sizes)
    return {
        "chunks": len(pooled),
        "tokens_per_chunk": float(pooled.mean()),
        "with_several": float((pooled > 1).mean()),
    }


def _delays(records: Sequence[RequestRecord]) -> Floats:
    return np.array([r.sent_at - r.request.at_seconds for r in records if r.sent_at is not None], dtype=float)


def json_number(value: float) -> float | None:
    """Return what JSON can hold: ``None`` for what is infinite or no number."""
    return float(value) if isfinite(value) else None
