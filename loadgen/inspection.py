"""What a trace is like, before anything is sent: its lengths, its arrivals, and what its prompts have in common."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.schedule import Schedule
from loadgen.traces import Format, Row, RowTrace

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA_VERSION = 1

_QUANTILES = (10, 25, 50, 75, 90, 99)
_HISTOGRAM_BARS = 20
_TIMELINE_BARS = 60
_DISPERSION_SECONDS = (1.0, 10.0, 60.0)
_FEWEST_WINDOWS = 10


def inspect(trace: RowTrace | Schedule, name: str) -> dict[str, Any]:
    """Describe a trace as it goes to JSON; parts that the format does not tell of are ``None``."""
    if isinstance(trace, Schedule):
        trace = _as_rows(trace, name)
    rows = trace.rows
    return {
        "schema_version": SCHEMA_VERSION,
        "name": trace.name,
        "format": trace.format.value,
        "sha256": trace.sha256,
        "rows_read": trace.rows_read,
        "rows_emitted": trace.emitted,
        "rows_dropped": dict(trace.dropped),
        "notes": list(trace.notes),
        "requests": len(rows),
        "prompt_tokens": _lengths([r.prompt_tokens for r in rows]),
        "output_tokens": _lengths([r.output_tokens for r in rows]),
        "arrivals": arrivals([r.time_s or 0.0 for r in rows]) if trace.timed else None,
        "sharing": _sharing(rows) if trace.shares else None,
        "sessions": _sessions(rows) if any(r.session for r in rows) else None,
    }


def arrivals(times: Sequence[float]) -> dict[str, Any]:
    """Describe a sequence of ascending times in seconds.

    ``interval_cv`` is the standard deviation of the intervals over their mean: 1 for a Poisson process, 0 for a
    metronome. ``dispersion`` is, for windows of several lengths, the variance of the number of arrivals in a window
    over its mean: 1 for a Poisson process at every length; above it, there are bursts at least so long.
    """
    at = np.asarray(times, dtype=float)
    intervals = np.diff(at)
    seconds = float(at[-1] - at[0])
    mean = float(intervals.mean()) if intervals.size else 0.0
    bar = _round_up(seconds / _TIMELINE_BARS) if seconds else 1.0
    counts = np.histogram(at - at[0], bins=np.arange(0, seconds + 1.5 * bar, bar))[0]
    return {
        "seconds": seconds,
        "mean_per_s": len(intervals) / seconds if seconds else None,
        "interval_cv": float(intervals.std() / mean) if mean else None,
        "longest_interval_s": float(intervals.max()) if intervals.size else None,
        "same_time_as_before": int((intervals == 0).sum()),
        "dispersion": {f"{w:g}s": _dispersion(at - at[0], w) for w in _DISPERSION_SECONDS},
        "timeline": {"window_s": bar, "requests": counts.tolist()},
    }


def _dispersion(at: np.ndarray[Any, np.dtype[np.float64]], window: float) -> float | None:
    whole = int(at[-1] // window)
    if whole < _FEWEST_WINDOWS:
        return None
    counts = np.bincount((at[at < whole * window] // window).astype(int), minlength=whole)
    return float(counts.var() / counts.mean())


def _lengths(values: Sequence[int]) -> dict[str, Any]:
    data = np.asarray(values)
    counts, edges = np.histogram(data, bins=_edges(int(data.max())))
    return {
        "mean": float(data.mean()),
        **{f"p{q}": float(np.percentile(data, q)) for q in _QUANTILES},
        "max": int(data.max()),
        "sum": int(data.sum()),
        "histogram": [
            {"from": int(low), "below": int(high), "requests": int(n)}
            for (low, high), n in zip(pairwise(edges), counts, strict=True)
        ],
    }


def _edges(largest: int) -> list[int]:
    step = int(_round_up(max(1.0, (largest + 1) / _HISTOGRAM_BARS)))
    return list(range(0, largest + step + 1, step))


def _round_up(value: float) -> float:
    """Return the next larger of 1, 2 and 5 times a power of ten."""
    if not (value > 0 and isfinite(value)):
        return 1.0
    power = 10.0 ** np.floor(np.log10(value))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-12)))


def _sharing(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how much a prefix cache without limit would find, each prompt after all those above it.

    A cache finds whole blocks, and a block only after all those before it in the prompt.
    """
    seen: dict[tuple[int, int], int] = {}
    hit = blocks = 0
    for row in rows:
        if row.grows and row.after is not None:
            hit += min(rows[row.after].prompt_tokens, row.prompt_tokens)
        place, found = 0, True
        for name in row.blocks[: row.prompt_tokens // row.block_tokens if row.block_tokens else 0]:
            blocks += 1
            known = seen.get((place, name))
            if known is None:
                found = False
                known = seen[place, name] = len(seen) + 1
            elif found:
                hit += row.block_tokens
            place = known
    total = sum(r.prompt_tokens for r in rows)
    return {
        "prompt_tokens": total,
        "found_tokens": hit,
        "found_share": hit / total,
        "blocks": blocks,
        "distinct_blocks": len(seen),
    }


def _sessions(rows: Sequence[Row]) -> dict[str, Any]:
    turns: dict[str, int] = {}
    for row in rows:
        if row.session:
            turns[row.session] = turns.get(row.session, 0) + 1
    thinks = [r.think_s for r in rows if r.think_s is not None]
    sizes = np.asarray(list(turns.values()))
    return {
        "sessions": len(turns),
        "turns_mean": float(sizes.mean()),
        "turns_p50": float(np.percentile(sizes, 50)),
        "turns_max": int(sizes.max()),
        "with_several_turns": int((sizes > 1).sum()),
        "think_s": {f"p{q}": float(np.percentile(thinks, q)) for q in (50, 90)} if thinks else None,
    }


def _as_rows(schedule: Schedule, name: str) -> RowTrace:
    sessions = {(r.session, r.content_seed) for r in schedule.requests if r.session and r.after is None}
    rows = tuple(
        Row(
            r.prompt_tokens,
            r.output_tokens,
            r.at_seconds,
            r.blocks,
            r.block_tokens,
            r.session,
            grows=(r.session, r.content_seed) in sessions and not r.blocks,
            after=r.after,
            think_s=None if r.after is None else r.think_seconds,
        )
        for r in schedule.requests
    )
    return RowTrace(name, Format.SCHEDULE, rows, len(rows), len(rows))


def bars(counts: Sequence[int], width: int) -> list[str]:
    """Draw counts as bars of at most ``width`` characters, to an eighth of a character."""
    largest = max(counts, default=0)
    eighths = [ceil(8 * width * n / largest) if largest else 0 for n in counts]
    return ["█" * (n // 8) + " ▏▎▍▌▋▊▉"[n % 8].strip() for n in eighths]


def heights(counts: Sequence[int], rows: int = 4) -> list[str]:
    """Draw counts as columns of so many lines, the top one first."""
    largest = max(counts, default=0)
    eighths = [ceil(8 * rows * n / largest) if largest else 0 for n in counts]
    return ["".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, n - 8 * line))] for n in eighths) for line in reversed(range(rows))]
