"""CSV traces, whose columns are found by their names and never by their places.

Lines are rows: none of these formats has a value with a line break in it, and so a stray quote spoils one row only.
Empty lines are no rows.
"""

from __future__ import annotations

import csv
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from loadgen.traces.rows import MISSING, NO_TIME, NOT_A_NUMBER, Format, Row, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_PROMPT, _OUTPUT, _TIME = "prompt", "output", "time"

_COLUMNS = (
    (Format.AZURE, {_PROMPT: ("ContextTokens",), _OUTPUT: ("GeneratedTokens",), _TIME: ("TIMESTAMP",)}),
    (Format.BURSTGPT, {_PROMPT: ("Request tokens",), _OUTPUT: ("Response tokens",), _TIME: ("Timestamp",)}),
    (
        Format.LENGTHS,
        {
            _PROMPT: ("num_prefill_tokens", "prompt_tokens", "ContextTokens"),
            _OUTPUT: ("num_decode_tokens", "output_tokens", "GeneratedTokens"),
        },
    ),
)
_OWN_TIMES = ("arrived_at", "time_s")
"""Columns by which a table of lengths may tell times; in seconds."""
_SESSION, _ELAPSED = "Session ID", "Elapsed time"

HEADERS = "; ".join(
    f"{kind}: {', '.join(name for names in columns.values() for name in names)}" for kind, columns in _COLUMNS
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the columns of a table are."""

    format: Format
    width: int
    prompt: int
    output: int
    time: int | None = None
    session: int | None = None
    elapsed: int | None = None


def find_layout(header: str) -> Layout | None:
    """Recognise a table by its first line."""
    names = [name.strip() for name in _cells(header)]
    for kind, columns in _COLUMNS:
        found = {use: next((names.index(n) for n in wanted if n in names), None) for use, wanted in columns.items()}
        prompt, output = found[_PROMPT], found[_OUTPUT]
        if prompt is None or output is None or None in found.values():
            continue
        time = found.get(_TIME)
        if kind is Format.LENGTHS:
            time = next((names.index(n) for n in _OWN_TIMES if n in names), None)
        session, elapsed = (names.index(n) if n in names else None for n in (_SESSION, _ELAPSED))
        return Layout(kind, len(names), prompt, output, time, session, elapsed)
    return None


def read_table(lines: Iterable[str], layout: Layout) -> Iterator[Row | str]:
    """Yield each row, or why it is not usable; ``lines`` begins after the header."""
    time = _dates() if layout.format is Format.AZURE else float
    sessions = _Sessions()
    for line in lines:
        cells = _cells(line)
        if not any(cells):
            continue
        row = _row(cells, layout, time)
        if isinstance(row, Row) and layout.session is not None and (name := _cell(cells, layout.session)):
            row = sessions.link(row, name, _cell(cells, layout.elapsed))
        yield row


def _row(cells: Sequence[str], layout: Layout, time: Callable[[str], float]) -> Row | str:
    needed = [at for at in (layout.prompt, layout.output, layout.time) if at is not None]
    if len(cells) <= max(needed):
        return MISSING
    prompt, output = _size(cells[layout.prompt]), _size(cells[layout.output])
    if isinstance(prompt, str) or isinstance(output, str):
        return prompt if isinstance(prompt, str) else str(output)
    if layout.time is None:
        return Row(prompt, output)
    try:
        at_seconds = time(cells[layout.time])
    except ValueError:
        return NO_TIME
    return Row(prompt, output, at_seconds) if abs(at_seconds) < 1e12 else NO_TIME  # false for nan, too


def _size(text: str) -> int | str:
    try:
        return tokens(float(text))
    except ValueError:
        return NOT_A_NUMBER


def _cells(line: str) -> list[str]:
    with suppress(csv.Error):  # a byte that no table has
        for cells in csv.reader((line,)):
            return cells
    return []


def _cell(cells: Sequence[str], at: int | None) -> str:
    return "" if at is None or at >= len(cells) else cells[at].strip()


def _dates() -> Callable[[str], float]:
    """Return a reader of dates that gives seconds since the midnight before the first: small numbers keep 100 ns."""
    midnight: datetime | None = None

    def seconds(text: str) -> float:
        nonlocal midnight
        main, dot, rest = text.strip().partition(".")
        digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        at = datetime.fromisoformat(main + rest[len(digits) :])
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
        if midnight is None:
            midnight = at.replace(hour=0, minute=0, second=0)
        return (at - midnight).total_seconds() + (int(digits) / 10 ** len(digits) if dot and digits else 0.0)

    return seconds


class _Sessions:
    """Links each turn of a conversation to the one before it."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float]] = {}

    def link(self, row: Row, name: str, elapsed: str) -> Row:
        """Return the row as the next turn of the conversation ``name``."""
        turn, ended_at = self._last.get(name, (0, 0.0))
        at = row.time_s or 0.0
        try:
            took = max(0.0, float(elapsed))
        except ValueError:
            took = 0.0
        self._last[name] = (turn + 1, at + took)
        return Row(
            row.prompt_tokens,
            row.output_tokens,
            row.time_s,
            session=name,
            think_s=max(0.0, at - ended_at) if turn else None,
            key=f"{name} {turn + 1}",
            parent=f"{name} {turn}" if turn else "",
        )
