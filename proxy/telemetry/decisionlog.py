"""The decision log on disk: files of bounded size, written beside the event loop.

On the path of a token there is one ``list.append``. A thread makes lines of what was appended (see
``wire.decisions``) and writes them, a few at a time, so that it never keeps the interpreter to itself for long.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from proxy.wire.decisions import Head, is_head, line_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from proxy.core.config import SchedulerConfig
    from proxy.core.recording import Record

_log = logging.getLogger(__name__)

PARTS = 8
"""Files of one log at most, the current one included: ``PATH``, and ``PATH.1`` (younger) to ``PATH.7``."""

_BATCH = 50
"""Records made into lines at a time: a millisecond or two at most, of which the event loop may have to wait."""
_INTERVAL_SECONDS = 0.25
_LONGEST_HEAD = 1 << 20
_MOST_RECORDS = 500_000
"""Records that may wait for a slow disk; then the log ends, as one with a gap is good for nothing."""


class DecisionLogError(Exception):
    """The log cannot be written; the message says why."""


class LogFile:
    """The files of one run's log; not for an event loop, as it waits for the disk."""

    def __init__(self, path: Path, config: SchedulerConfig, *, most_bytes: int) -> None:
        """Begin a log at ``path``; those of former runs move on as its own parts will.

        Raises:
            DecisionLogError: the file cannot be made, or something else has its place.
        """
        self._path = path
        self._head = Head(config, uuid.uuid4().hex, unix_seconds=round(time.time(), 3))
        self._part_bytes = most_bytes // PARTS
        self._parts = count()
        try:
            for number in range(PARTS):
                _check_is_log(part_path(path, number))
            self._begin_part()
        except OSError as error:
            raise DecisionLogError(f"cannot write the decision log {path}: {error.strerror}") from None

    def write(self, records: Sequence[Record]) -> None:
        """Append ``records``.

        Raises:
            OSError: the disk does not take them.
        """
        for start in range(0, len(records), _BATCH):
            data = b"".join(map(line_of, records[start : start + _BATCH]))
            if self._size and self._size + len(data) > self._part_bytes:
                self._file.close()
                self._begin_part()
            self._file.write(data)
            self._file.flush()
            self._size += len(data)

    def close(self) -> None:
        self._file.close()

    def _begin_part(self) -> None:
        for number in reversed(range(PARTS - 1)):
            part = part_path(self._path, number)
            if part.exists():
                part.replace(part_path(self._path, number + 1))
        # Only for whoever runs the proxy: it tells who asked when, and how much.
        self._file = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        self._file.write(replace(self._head, part=next(self._parts)).line())
        self._size = 0
        self._file.flush()


class DecisionLog:
    """Takes records on the event loop and has them written beside it."""

    def __init__(self, file: LogFile, *, interval_seconds: float = _INTERVAL_SECONDS) -> None:
        self._file = file
        self._interval_seconds = interval_seconds
        self._records: list[Record] = []
        self._writing: asyncio.Future[None] | None = None
        self._failed = False
        self.record = self._records.append
        """Take down a record."""

    async def run(self) -> None:
        """Write until cancelled; ``close`` must follow."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            self.flush()

    def flush(self) -> None:
        """Have all records written, if the last ones are by now."""
        if self._writing is not None and self._writing.done():
            self._settle(self._writing)
        if self._failed:
            self._records.clear()
        elif self._writing is None and self._records:
            batch = self._records[:]
            self._records.clear()  # and not a new list: ``record`` belongs to this one
            self._writing = asyncio.get_running_loop().run_in_executor(None, self._file.write, batch)
        elif len(self._records) > _MOST_RECORDS:
            self._fail("the disk is too slow for it")

    async def close(self) -> None:
        """Write what is left and close the file."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        self.flush()
        if self._writing is not None:
            await asyncio.wait([self._writing])
            self._settle(self._writing)
        try:
            await asyncio.to_thread(self._file.close)
        except OSError as error:  # what the disk did not take before is tried once more
            if not self._failed:
                self._fail(error.strerror or str(error))

    def _settle(self, writing: asyncio.Future[None]) -> None:
        self._writing = None
        error = writing.exception()
        if isinstance(error, OSError):
            self._fail(error.strerror or str(error))
        elif error is not None:
            _log.error("the decision log failed through a fault of the proxy", exc_info=error)
            self._fail("see above")

    def _fail(self, why: str) -> None:
        _log.error("the decision log ends here: %s", why)
        self._failed = True
        self._records.clear()


def _check_is_log(path: Path) -> None:
    """Make sure that nothing but former logs is moved away, and deleted in the end."""
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            if is_head(file.readline(_LONGEST_HEAD)) or not path.stat().st_size:
                return
    raise DecisionLogError(f"cannot write the decision log: {path} is there, and is something else")


def part_path(path: Path, number: int) -> Path:
    """Where the part lies after which ``number`` others were begun."""
    return path.with_name(f"{path.name}.{number}") if number else path
