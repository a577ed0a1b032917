"""What other tools would have called TTFT, TBT and throughput, from the same run.

Never mixed with our own figures: definitions of one name differ by a factor of two and more between tools.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.intervals import quantile
from loadgen.metrics import json_number
from loadgen.results import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from loadgen.sample import Floats
    from proxy.sim.records import RequestRecord


class Compat(StrEnum):
    """Whose definitions."""

    VLLM = "vllm"
    """``vllm bench serve``."""
    SLAI = "slai"
    """The evaluation scripts of the SLAI paper, and of Sarathi-Serve."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A figure as somebody else defines it."""

    name: str
    meaning: str
    compute: Callable[[Sequence[RequestRecord]], dict[str, float | None]]
    """Figures in seconds, or per second."""


def compat_figures(compat: Compat, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return their figures, each with what it means; only of the requests that completed, as they do."""
    done = [r for r in records if r.completed]
    return {d.name: {"meaning": d.meaning, **d.compute(done)} for d in _DEFINITIONS[compat]}


def _linear(values: Iterable[float]) -> dict[str, float | None]:
    data = np.fromiter(values, dtype=float)
    mean = float(data.mean()) if len(data) else np.nan
    return {
        "mean": json_number(mean),
        "p50": json_number(quantile(data, 0.5)),
        "p99": json_number(quantile(data, 0.99)),
    }


def _first_with_cdf(values: Iterable[float]) -> dict[str, float | None]:
    """Return the first value whose cumulative share is large enough, as they read their exported CDFs."""
    data = np.fromiter(values, dtype=float)
    if not len(data):
        return {"mean": None, "p50": None, "p99": None}
    p50, p99 = np.percentile(data, (50, 99), method="inverted_cdf")
    return {"mean": float(data.mean()), "p50": float(p50), "p99": float(p99)}


def _sent(record: RequestRecord) -> float:
    return record.request.at_seconds if record.sent_at is None else record.sent_at


def _first_chunk(record: RequestRecord) -> float:
    at = record.first_byte_at if isinstance(record, Result) else None
    return (record.first_token_at or 0.0) if at is None else at


def _chunk_gaps(record: RequestRecord) -> Floats:
    """Every chunk ends a gap, also one that came in the same read as the chunk before it."""
    times = np.asarray(record.chunk_times) if isinstance(record, Result) else np.array([])
    return np.diff(times) if len(times) else np.asarray(record.gaps)


def _vllm_tpot(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    return _linear(((r.last_token_at or 0.0) - _first_chunk(r)) / (r.tokens - 1) for r in records if r.tokens > 1)


def _vllm_throughput(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    if not records:
        return {"requests": None, "output_tokens": None}
    seconds = max(r.finished_at or 0.0 for r in records) - min(_sent(r) for r in records)
    tokens = sum(r.tokens for r in records)
    return {"requests": json_number(len(records) / seconds), "output_tokens": json_number(tokens / seconds)}


def _slai_gaps(record: RequestRecord) -> Iterable[float]:
    # No gap ends with the first decoded token, and the token before it and itself are taken down as zeros.
    yield from (0.0, 0.0)
    yield from _chunk_gaps(record)[1:]


_DEFINITIONS = {
    Compat.VLLM: (
        Definition(
            "ttft_s",
            "first chunk of any content minus the moment of sending; completed requests only",
            lambda rs: _linear(_first_chunk(r) - _sent(r) for r in rs),
        ),
        Definition("tpot_s", "(last chunk - first chunk) / (tokens - 1), of each completed request", _vllm_tpot),
        Definition(
            "itl_s",
            "gaps between chunks, pooled over completed requests; chunks that came at once are gaps of zero",
            lambda rs: _linear(gap for r in rs for gap in _chunk_gaps(r)),
        ),
        Definition("per_s", "completed requests, and their tokens, over first sending to last end", _vllm_throughput),
    ),
    Compat.SLAI: (
        Definition(
            "ttft_s",
            "first token minus intended arrival; finished requests only, so a scheduler that finishes few looks good",
            lambda rs: _first_with_cdf(r.ttft_seconds or 0.0 for r in rs),
        ),
        Definition(
            "tbt_s",
            "gaps between tokens, pooled; the first gap of each request hidden, and two zeros per request instead",
            lambda rs: _first_with_cdf(gap for r in rs for gap in _slai_gaps(r)),
        ),
    ),
}
