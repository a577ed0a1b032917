"""What every format of trace comes down to: rows, and an account of those that were not usable."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from math import inf, isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_TOKENS = 10_000_000
"""No model's context holds more, so a row with more is a mistake."""

# Reasons, in words that repeat and so can be counted.
NOT_A_NUMBER = "not a number"
NOT_WHOLE = "not a whole number"
NO_TIME = "no usable time"
EMPTY = "empty prompt or output"
TOO_LONG = f"more than {MOST_TOKENS:,} tokens"
MISSING = "a field is missing"
NOT_JSON = "not JSON"
WRONG_FIELD = "a field is missing or of a wrong kind"
OUTSIDE = "outside the window"


class Format(StrEnum):
    """What a file was recognised as."""

    LENGTHS = "lengths CSV"
    AZURE = "Azure CSV"
    BURSTGPT = "BurstGPT CSV"
    MOONCAKE = "Mooncake JSON lines"
    BAILIAN = "Qwen-Bailian JSON lines"
    SHAREGPT = "ShareGPT JSON"
    SERVEGEN = "ServeGen clients"
    SCHEDULE = "schedule"
    BUILT_IN = "built in"


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace."""

    prompt_tokens: int
    output_tokens: int
    time_s: float | None = None
    """When it came, in seconds since the trace's beginning; ``None`` where the format does not tell."""
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    """As in a schedule: the prompt begins with these blocks, and the same name is the same text."""
    session: str = ""
    """The conversation that it is a turn of."""
    grows: bool = False
    """Whether its prompt begins with all of the previous turn's."""
    after: int | None = None
    """Index among the trace's rows of the turn before it."""
    think_s: float | None = None
    """From the end of the answer before to this request; ``None`` where the format does not tell."""
    key: str = ""
    parent: str = ""
    """While reading: what rows of a session are called, and which of them came before this one."""


@dataclass(frozen=True, slots=True)
class RowTrace:
    """A trace in the order of its times, with an account of the rows that were not usable."""

    name: str
    format: Format
    rows: tuple[Row, ...]
    rows_read: int
    emitted: int
    """Rows of the file that were usable: as many as ``rows``, but for ServeGen, whose rows are times of many requests.

    ``rows_read == emitted + dropped.total()``.
    """
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason."""
    notes: tuple[str, ...] = ()
    """What was put right, in sentences."""
    sha256: str | None = None
    """Of the file's bytes as they lie on the disk."""

    @property
    def timed(self) -> bool:
        """Whether the trace has times of its own."""
        return self.rows[0].time_s is not None

    @property
    def shares(self) -> bool:
        """Whether it tells which prompts have their beginnings in common."""
        return any(r.blocks or r.grows for r in self.rows)


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a trace, in seconds since its first request."""

    start: float = 0.0
    end: float = inf

    def __contains__(self, seconds: object) -> bool:
        return isinstance(seconds, float) and self.start <= seconds < self.end


def tokens(value: float) -> int | str:
    """Return a number of tokens, or the reason why it is none."""
    if not isfinite(value):
        return NOT_A_NUMBER
    if value != int(value):
        return NOT_WHOLE
    if value < 1:
        return EMPTY
    return TOO_LONG if value > MOST_TOKENS else int(value)


def in_order(rows: Iterable[Row | str], window: Window) -> tuple[list[Row], Counter[str], list[str]]:
    """Sort rows by their times, which begin at zero, link the turns, and count what is left out and put right."""
    good, dropped = list[Row](), Counter[str]()
    for row in rows:
        if isinstance(row, str):
            dropped[row] += 1
        else:
            good.append(row)
    notes: list[str] = []
    if good and good[0].time_s is not None:
        times = [r.time_s or 0.0 for r in good]
        late = sum(second < first for first, second in pairwise(times))
        if late:
            notes.append(f"{late} rows came earlier than the row above them; the rows were sorted by time")
            good.sort(key=lambda r: r.time_s or 0.0)
        first = good[0].time_s or 0.0
        good = [replace(r, time_s=(r.time_s or 0.0) - first) for r in good]
        kept = [r for r in good if r.time_s in window]
        if len(kept) < len(good):
            dropped[OUTSIDE] += len(good) - len(kept)
        if kept:
            start = kept[0].time_s if window.start == 0 else window.start
            good = [replace(r, time_s=(r.time_s or 0.0) - (start or 0.0)) for r in kept]
        else:
            good = []
    linked, orphans = _linked(good)
    if orphans:
        notes.append(f"{orphans} turns follow one that is not in the trace; they begin their conversation")
    return linked, dropped, notes


def _linked(rows: list[Row]) -> tuple[list[Row], int]:
    places: dict[str, int] = {}
    linked, orphans = list[Row](), 0
    for index, row in enumerate(rows):
        after = places.get(row.parent) if row.parent else None
        orphans += bool(row.parent) and after is None
        linked.append(row if after is None and not row.key else replace(row, after=after, key="", parent=""))
        if row.key:
            places[row.key] = index
    return linked, orphans
