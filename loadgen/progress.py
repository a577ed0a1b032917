"""What a run shows while it goes on: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from loadgen.runner import Counts, Display


@contextmanager
def open_display(console: Console) -> Iterator[Display]:
    """Choose the display that suits ``console``, and leave the terminal in order afterwards."""
    if not console.is_terminal:
        yield PlainDisplay(console)
        return
    # No refresh thread: it would take the interpreter from the event loop at moments of its own choosing.
    bar = Progress(BarColumn(), TextColumn("{task.description}"), console=console, auto_refresh=False)
    with bar:
        yield LiveDisplay(bar)


class LiveDisplay:
    """A bar over the requests, redrawn in place."""

    interval_seconds = 0.25

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("")

    def show(self, counts: Counts) -> None:
        ended = counts.completed + counts.failed
        self._bar.update(self._task, total=counts.total, completed=ended, description=_line(counts))
        self._bar.refresh()


class PlainDisplay:
    """A line every few seconds, for logs."""

    interval_seconds = 5.0

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, counts: Counts) -> None:
        self._console.print(_line(counts), markup=False, highlight=False, soft_wrap=True)


def _line(counts: Counts) -> str:
    ttft = f"{np.median(counts.ttfts):.3f} s" if counts.ttfts else "-"
    tbt = f"{1000 * np.percentile(counts.gaps, 99):.0f} ms" if counts.gaps else "-"
    return (
        f"{counts.seconds:.0f} s: sent {counts.sent}/{counts.total}, running {counts.running}, "
        f"done {counts.completed}, failed {counts.failed}, median TTFT {ttft}, p99 TBT {tbt}"
    )
