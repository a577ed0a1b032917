"""ServeGen: for each client of a service, its rate in every ten minutes of some days, and histograms of its lengths.

``chunk-N-trace.csv`` has no header; a row is a stretch of time: start in seconds, requests per second, CV of the
intervals, the name of their distribution and its two parameters. ``chunk-N-dataset.json`` beside it has, for some of
these starts, histograms of input and output tokens as the text of a Python dictionary; they hold until the next.

Requests are drawn: intervals from the gamma distribution of the stretch's rate and CV (a Weibull's two, too),
lengths from the histograms, independently of each other.
"""

from __future__ import annotations

import ast
import json
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

from loadgen.draws import gamma
from loadgen.traces.rows import NO_TIME, NOT_A_NUMBER, Row, Window, tokens
from proxy.sim.workload import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_IDLE = "a stretch of time without requests"
_NO_LENGTHS = "no lengths known for a stretch of time"
_OUT = "a stretch of time outside the window"
_FIELDS = 6

_MOST_REQUESTS = 20_000_000
_LAST_STRETCH_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Histogram:
    values: tuple[int, ...]
    sums: tuple[float, ...]

    def draw(self, rng: Random) -> int:
        return self.values[min(bisect_right(self.sums, rng.random() * self.sums[-1]), len(self.values) - 1)]


@dataclass(frozen=True, slots=True)
class _Lengths:
    prompt: _Histogram
    output: _Histogram


def recognise(line: str) -> bool:
    """Recognise a client's file by its first line."""
    cells = line.strip().split(",")
    if len(cells) != _FIELDS or cells[3] not in ("Gamma", "Weibull", "Exponential", ""):
        return False
    with suppress(ValueError):
        float(cells[0])
        return True
    return False


def clients_in(folder: Path) -> list[Path]:
    """Return the files of all clients in a folder of ServeGen's data."""
    return sorted(folder.glob("chunk-*-trace.csv"))


def read_clients(paths: Sequence[Path], seed: int, window: Window) -> Iterator[list[Row] | str]:
    """Yield for each stretch of time its requests, or why it is left out.

    ``window`` counts from time zero of the files.

    Raises:
        TraceError: a file of lengths is missing or cannot be read, or the requests are too many for the memory.
    """
    drawn = 0
    for path in paths:
        lengths = _read_lengths(path.with_name(path.name.removesuffix("-trace.csv") + "-dataset.json"))
        rng = Random(f"{seed}:servegen:{path.name}")
        lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        stretches = [_stretch(line) for line in lines]
        ends = dict(pairwise(s[0] for s in stretches if not isinstance(s, str)))
        for stretch in stretches:
            if isinstance(stretch, str) or not (stretch[1] and stretch[2]):
                yield stretch if isinstance(stretch, str) else _IDLE
                continue
            found = _draw(stretch, ends.get(stretch[0], stretch[0] + _LAST_STRETCH_SECONDS), lengths, rng, window)
            if not isinstance(found, str):
                drawn += len(found)
                if drawn > _MOST_REQUESTS:
                    raise TraceError(
                        f"{path.parent}: over {_MOST_REQUESTS:,} requests; take a part of it with --window"
                    )
            yield found


def _stretch(line: str) -> tuple[float, float, float] | str:
    """Return start, rate and CV; the last two are zero where no requests come."""
    cells = [cell.strip() for cell in line.split(",")]
    try:
        start, rate, cv = float(cells[0]), float(cells[1] or 0), float((cells[2:3] or [""])[0] or 0)
    except (ValueError, IndexError):
        return NOT_A_NUMBER
    if not 0 <= start < 1e12:
        return NO_TIME
    if not (0 <= rate < inf and 0 <= cv < inf):
        return NOT_A_NUMBER
    return start, rate, cv


def _draw(
    stretch: tuple[float, float, float], end: float, lengths: dict[float, _Lengths], rng: Random, window: Window
) -> list[Row] | str:
    start, rate, cv = stretch
    known = [at for at in lengths if at <= start]
    if not known:
        return _NO_LENGTHS
    if end <= window.start or start >= window.end:
        return _OUT
    sizes = lengths[max(known)]
    rows: list[Row] = []
    # From anywhere in an interval: a client is not reset when a stretch begins.
    at = start + rng.random() * gamma(rng, cv) / rate
    while at < end:
        if at in window:
            rows.append(Row(sizes.prompt.draw(rng), sizes.output.draw(rng), at))
        at += gamma(rng, cv) / rate
        if len(rows) > _MOST_REQUESTS:
            break
    return rows


def _read_lengths(path: Path) -> dict[float, _Lengths]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"the lengths of a ServeGen client are needed from {str(path)!r}: {error}") from error
    lengths: dict[float, _Lengths] = {}
    if isinstance(found, dict):
        for start, fields in found.items():
            with suppress(ValueError, AttributeError):
                prompt, output = (_histogram(fields.get(name)) for name in ("input_tokens", "output_tokens"))
                if prompt and output:
                    lengths[float(start)] = _Lengths(prompt, output)
    return lengths


def _histogram(text: Any) -> _Histogram | None:
    """Read ``"{123: 0.5, ...}"``; entries of no length are left out of it."""
    try:
        found = ast.literal_eval(text) if isinstance(text, str) else text
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    pairs = [
        (size, float(share))
        for key, share in sorted(found.items())
        if isinstance(key, int | float) and isinstance(share, int | float) and 0 < share < inf
        if isinstance(size := tokens(float(key)), int)
    ]
    return _Histogram(tuple(s for s, _ in pairs), tuple(accumulate(p for _, p in pairs))) if pairs else None
