"""A Redis server of a test's own, on a port of its own, that keeps nothing."""

from __future__ import annotations

import asyncio
import shutil
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
WHY_NOT = "neither redis-server nor valkey-server is installed"


class RedisServer:
    """Start it, kill it, start it again: the address stays."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._directory = directory
        self._first: tuple[str, ...] = ()
        self._options = ("--save", "", "--appendonly", "no", *options)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    def watch(self, name: str, port: int) -> None:
        """Be a sentinel instead, that knows the server on ``port`` by a name."""
        configuration = self._directory / f"sentinel-{self.port}.conf"
        configuration.write_text(f"sentinel monitor {name} 127.0.0.1 {port} 1\n")
        self._first, self._options = (str(configuration), "--sentinel"), ()

    def serve_tls(self, key: Path, chain: Path, root: Path) -> None:
        """Speak TLS only, to anybody with a user's name and password."""
        files = ("--tls-key-file", str(key), "--tls-cert-file", str(chain), "--tls-ca-cert-file", str(root))
        self._options += ("--tls-port", str(self.port), "--port", "0", *files, "--tls-auth-clients", "no")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        assert PROGRAM is not None, WHY_NOT
        command = [PROGRAM, *self._first, "--port", str(self.port), "--bind", "127.0.0.1", *self._options]
        self._process = await asyncio.create_subprocess_exec(
            *command, cwd=self._directory, stdout=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(10):
            while True:
                assert self._process.returncode is None, f"{' '.join(command)} has ended"
                with suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
