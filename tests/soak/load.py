"""The soak's clients, and what kills its engines."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.client import Connection, request
from conformance.proxies import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

_HERE = Path(__file__).parent
_STAGES = ("head", "body", "sent", "waiting", "streaming")
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")


def environment() -> dict[str, str]:
    """This process's, with the folders of the tests to import from."""
    root = _HERE.parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "support"), str(root.parent)))}


async def python(*arguments: str, **more: Any) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, env=environment(), **more)


class Engines:
    """Engine processes, each killed and started again by turns."""

    def __init__(self, count: int) -> None:
        self.ports = free_ports(count)
        self.killed = 0
        self._processes: list[asyncio.subprocess.Process] = []

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    async def start(self) -> None:
        for port in self.ports:
            self._processes.append(await self._begin(port))

    async def kill_by_turns(self, seconds: float) -> None:
        """Kill one after the other, and start it again a moment later, until cancelled."""
        turn = 0
        while True:
            await asyncio.sleep(seconds)
            number = turn % len(self.ports)
            turn += 1
            self._processes[number].kill()
            self.killed += 1
            await self._processes[number].wait()
            await asyncio.sleep(seconds / 4)
            self._processes[number] = await self._begin(self.ports[number])

    async def stop(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _begin(self, port: int) -> asyncio.subprocess.Process:
        process = await python("-m", "soak.engine", str(port))
        for _ in range(200):
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.05)
        return process


class ProxyProcess:
    """The proxy, and the way to ask it what it holds."""

    def __init__(self) -> None:
        self.port = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, engines: list[str]) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await python("-m", "soak.proxy", *engines, stdin=pipe, stdout=pipe)
        self.port = (await self._line())["port"]

    async def held(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self._line()

    async def stop(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        return await self._process.wait()

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def _line(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the proxy has ended: {await self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


@dataclass
class Clients:
    """Requests of random shape; a third of them is broken off at a random stage."""

    port: int
    seed: int = 0
    went: Counter[str] = field(default_factory=Counter)
    """How requests went, as their clients saw it."""
    generations_sent: int = 0
    """Requests for a generation whose head was sent whole."""
    answered: int = 0
    """Those of them that got an answer's head."""
    _idle: list[Connection] = field(default_factory=list)

    async def run(self, count: int, at_once: int, tell: Callable[[int], None]) -> None:
        """Send so many requests, with so many under way at a time."""
        numbers = iter(range(count))

        async def one_after_the_other() -> None:
            for number in numbers:
                went = await self._one(random.Random(self.seed * 1_000_003 + number))
                self.went[went] += 1
                tell(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(one_after_the_other())
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _one(self, rng: random.Random) -> str:
        path = rng.choices(_PATHS, (6, 6, 1))[0]
        leaves = rng.choice(_STAGES) if rng.random() < 1 / 3 else ""
        how = rng.random() < 0.5
        try:
            async with asyncio.timeout(60):
                return await self._exchange(rng, path, leaves, reset=how)
        except TimeoutError:
            return "hung"
        except (EOFError, ConnectionError, asyncio.IncompleteReadError):
            return "cut"

    async def _exchange(self, rng: random.Random, path: str, leaves: str, *, reset: bool) -> str:
        stream = rng.random() < 0.7 and path != _PATHS[2]
        text = "x" * (4 * rng.randint(1, 800))
        content = {"messages": [{"role": "user", "content": text}]} if path == _PATHS[1] else {"prompt": text}
        body = json.dumps({"model": "m", "stream": stream, "max_tokens": rng.randint(1, 12), **content}).encode()
        whole = request("POST", path, ["Content-Type: application/json", f"X-Request-Id: r{rng.getrandbits(40)}"], body)
        head = len(whole) - len(body)
        connection = await self._connection(fresh=bool(leaves))

        def leave() -> str:
            (connection.reset if reset else connection.close)()
            return f"left ({leaves})"

        if leaves == "head":
            await connection.send(whole[: rng.randint(0, head - 1)])
            return leave()
        self.generations_sent += path != _PATHS[2]
        if leaves == "body":
            await connection.send(whole[: rng.randint(head, len(whole) - 1)])
            await asyncio.sleep(rng.choice((0, 0.005)))
            return leave()
        await connection.send(whole)
        if leaves == "sent":
            return leave()
        if leaves == "waiting":
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0, 0.05)):
                    await connection.reader.read(1)
            return leave()
        answer = await connection.head()
        self.answered += path != _PATHS[2]
        if leaves == "streaming":
            for _ in range(rng.randint(1, 4)):
                if not await connection.piece(answer):
                    break
            return leave()
        await connection.rest(answer)
        if not answer.whole:
            connection.close()
            return "cut"
        if "close" in ",".join(answer.header("connection")):
            connection.close()
        else:
            self._idle.append(connection)
        if answer.status != 200:
            return str(answer.status)
        if not stream:
            return "done"
        if answer.body.endswith(b"data: [DONE]\n\n"):
            return "usage left in" if b'"usage"' in answer.body else "done"
        return "error event" if b'"error"' in answer.body else "incomplete"

    async def _connection(self, *, fresh: bool) -> Connection:
        if self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.reader.at_eof():
                return connection
            connection.close()
        return await Connection.open("127.0.0.1", self.port)
