"""Reading a decision log, and deciding everything in it anew."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from proxy.core.scheduler import Scheduler
from proxy.telemetry.decisionlog import PARTS, part_path
from proxy.wire.decisions import DecisionLineError, Head, Step, read_head, read_step

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from proxy.core.actions import Action
    from proxy.telemetry.chronicle import Observe

_LONGEST_LINE = 16 << 20
_CONTEXT = 5
"""Lines that are shown before a difference."""


class LogError(Exception):
    """The log cannot be read; the message says where and why."""


@dataclass(slots=True)
class Log:
    """A decision log with all its parts, oldest first."""

    head: Head
    """Of the youngest part."""
    parts: list[Path]
    truncated: bool = False
    """Whether its last line was cut off, as by a crash; known when it has been read to the end."""

    def steps(self) -> Iterator[tuple[str, Step]]:
        """Give everything in it, in order, each with its place (file and line).

        Raises:
            LogError: a line makes no sense.
        """
        for path in self.parts:
            with _open(path) as file:
                _line_from(file)
                number = 1
                while line := _line_from(file):
                    number += 1
                    if not line.endswith(b"\n") and path == self.parts[-1]:
                        self.truncated = True
                        return
                    try:
                        yield f"{path}:{number}", read_step(line)
                    except DecisionLineError as error:
                        raise LogError(f"{path}:{number}: {error}") from None


@dataclass(slots=True)
class Difference:
    """The first event after which something else is decided than was."""

    where: str
    step: Step
    actions: list[Action]
    """What is decided now."""
    error: str | None = None
    """Of the scheduler, if it cannot take the event at all."""
    before: list[tuple[str, Step]] = field(default_factory=list)
    """What came right before it."""


@dataclass(slots=True)
class Replay:
    """What came of deciding a log anew."""

    events: int = 0
    actions: int = 0
    """Actions that were reproduced."""
    difference: Difference | None = None


def open_log(path: Path) -> Log:
    """Find all parts of the log that ``path`` is the youngest of.

    Raises:
        LogError: it is no decision log that this version can read, or its beginning is gone.
    """
    head = _head_of(path)
    parts = {head.part: path}
    for number in range(1, PARTS):
        candidate = part_path(path, number)
        with suppress(LogError):  # no part, or not of ours: then one is missing, or none
            if (other := _head_of(candidate)).run == head.run:
                parts[other.part] = candidate
    missing = [number for number in range(head.part) if number not in parts]
    if missing:
        raise LogError(
            f"{path} is part {head.part + 1} of a log whose part {missing[0] + 1} is gone: what is decided depends "
            "on all that came before (a larger --decision-log-bytes keeps more)"
        )
    return Log(head, [parts[number] for number in sorted(parts)])


def replay(log: Log, observe: Observe | None = None) -> Replay:
    """Feed a fresh scheduler what is in the log, up to the first difference.

    Raises:
        LogError: a line makes no sense.
    """
    scheduler, found = Scheduler(log.head.config), Replay()
    before: deque[tuple[str, Step]] = deque(maxlen=_CONTEXT)
    for where, step in log.steps():
        error = None
        try:
            actions = scheduler.tick(step.now) if step.event is None else scheduler.handle(step.event, step.now)
        except Exception as raised:  # noqa: BLE001 - a log may hold anything; this is what came of it
            actions, error = [], f"{type(raised).__name__}: {raised}"
        if error is not None or actions != step.actions:
            found.difference = Difference(where, step, actions, error, list(before))
            break
        if observe is not None:
            observe(step.event, actions, step.now)
        found.events += 1
        found.actions += len(actions)
        before.append((where, step))
    return found


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror}") from None


def _line_from(file: BinaryIO) -> bytes:
    try:
        line = file.readline(_LONGEST_LINE)
    except OSError as error:
        raise LogError(f"cannot read {file.name}: {error.strerror}") from None
    if len(line) == _LONGEST_LINE:
        raise LogError(f"{file.name}: a line is longer than {_LONGEST_LINE:,} bytes")
    return line


def _head_of(path: Path) -> Head:
    with _open(path) as file:
        line = _line_from(file)
    try:
        return read_head(line)
    except DecisionLineError as error:
        raise LogError(f"{path}: {error}") from None
