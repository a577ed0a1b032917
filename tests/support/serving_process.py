"""``slai-proxy serve`` as a process of its own."""

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Process:
    """A proxy that has said that it listens."""

    process: asyncio.subprocess.Process
    said: list[str]
    url: str = field(init=False)
    curl: list[str] = field(init=False)

    def __post_init__(self) -> None:
        (line,) = [line for line in self.said if line.lstrip().startswith("curl ")]
        self.curl = shlex.split(line)
        (listens,) = [line for line in self.said if "listens on" in line]
        found = re.search(r"http://\S+", listens)
        assert found is not None
        self.url = found[0]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def exit_code(self, seconds: float = 10) -> int:
        async with asyncio.timeout(seconds):
            assert self.process.stderr is not None
            rest = await self.process.stderr.read()
            self.said += rest.decode().splitlines()
            return await self.process.wait()


async def spawn(*arguments: str) -> asyncio.subprocess.Process:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLAI_")}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *arguments, stderr=asyncio.subprocess.PIPE, env=environment
    )


@asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[Process]:
    process = await spawn("serve", "--port", "0", *arguments)
    assert process.stderr is not None
    said: list[str] = []
    try:
        async with asyncio.timeout(30):
            while not said or "Ctrl-C" not in said[-1]:
                line = await process.stderr.readline()
                assert line, said
                said.append(line.decode().rstrip())
        yield Process(process, said)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
