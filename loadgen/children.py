"""Processes that a command starts beside itself, and that do not outlive it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import deque
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

# From the polite request to end until the end that cannot be refused. The proxy would let streams finish for longer,
# but whoever ends the command that started it waits for none of them.
_PATIENCE_SECONDS = 3.0

_KEPT_LINES = 12
_LONGEST_LINE_BYTES = 1 << 20


class ChildError(Exception):
    """A process did not come up, or ended by itself; the message names it and has the last that it said."""


class Child:
    """A process that is up; everything it prints is read, so that it never blocks on a full pipe."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.address = ""
        """What it told when it had come up."""
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self.ended = asyncio.get_running_loop().create_task(process.wait(), name=f"end of {name}")
        """Done when the process has ended, with its exit status, which is negative for a signal."""
        self._tasks: list[asyncio.Task[Any]] = [self.ended]

    async def come_up(self, pattern: str, patience_seconds: float) -> None:
        """Wait for a line that ``pattern`` matches and take its first group for the address.

        Raises:
            ChildError: the process ended before, or was silent for too long.
        """
        try:
            async with asyncio.timeout(patience_seconds):
                while (line := await self._line()) is not None:
                    if found := re.search(pattern, line):
                        self.address = found[1]
                        break
                else:
                    raise await self.failure()
        except TimeoutError:
            raise ChildError(f"{self.name} did not come up in {patience_seconds:g} s{self._last_words()}") from None
        self._tasks.append(asyncio.get_running_loop().create_task(self._read_on(), name=f"output of {self.name}"))

    async def failure(self) -> ChildError:
        """Describe the end of a process that should not have ended."""
        status = await self.ended
        await asyncio.wait(self._tasks, timeout=1.0)  # its last words may still be in the pipe
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return ChildError(f"{self.name} {how}{self._last_words()}")

    async def stop(self) -> None:
        """End the process, by force if it does not hurry, and return when it is gone."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            if self.ended.done():
                break
            with suppress(ProcessLookupError):
                # Process.terminate() would collect the exit status, if there is one already, before asyncio does.
                os.kill(self.process.pid, how)
            await asyncio.wait((self.ended,), timeout=_PATIENCE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def _last_words(self) -> str:
        return "\n  ".join(("; the last that it said:", *self._said)) if self._said else " and said nothing"

    async def _line(self) -> str | None:
        assert self.process.stdout is not None
        try:
            raw = await self.process.stdout.readline()
        except ValueError:  # it is thrown away, and reading goes on behind it
            raw = b"(a very long line)"
        if not raw:
            return None
        line = raw.decode(errors="replace").rstrip()
        self._said.append(line)
        return line

    async def _read_on(self) -> None:
        while await self._line() is not None:
            pass


@asynccontextmanager
async def running(
    name: str, arguments: Sequence[str], *, address: str, patience_seconds: float = 20.0
) -> AsyncIterator[Child]:
    """Run ``python -m`` with ``arguments``, from when it tells its ``address`` (a pattern) to the end of the context.

    Ctrl-C in the terminal does not reach the process: only this context ends it, after whatever used it.

    Raises:
        ChildError: it does not come up.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # a folder of the same name in the working directory is not meant
        "-m",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # What the caller has set for a proxy of its own does not hold for this one.
        env={name: value for name, value in os.environ.items() if not name.startswith("SLAI_")},
        start_new_session=True,  # uvloop knows no process groups
        limit=_LONGEST_LINE_BYTES,
    )
    child = Child(name, process)
    try:
        await child.come_up(address, patience_seconds)
        yield child
    finally:
        await child.stop()
