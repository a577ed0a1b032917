"""Several processes behind one port: each is a proxy of its own, and all of them are one queue (``core.fleet``).

The kernel deals connections out to the processes (SO_REUSEPORT). They meet at the server that ``--redis`` names, or at
one of their own on a socket in a directory that nobody else can enter. Here they are started, started anew when they
die, and brought to their end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.server.fleet import open_store
from proxy.server.notify import Notifier
from proxy.server.tasks import Tasks
from proxy.store.contract import StoreError
from proxy.store.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from proxy.config import Settings

WORKER = "_SLAI_WORKER"
"""Environment variable that tells a worker its number and the directory of all: ``NUMBER:DIRECTORY``."""
_FIRST_BACK_OFF_SECONDS, _LONGEST_BACK_OFF_SECONDS = 0.5, 30.0
_UNUSABLE = (1, 2)
"""Exit statuses of a process that cannot listen, and of one whose settings do not hold."""
_AS_TOLD = (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT)
"""Those of one that was told to end while it started."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands among the others."""

    number: int
    directory: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Place | None:
        """``None`` in a process that is no worker."""
        number, _, directory = environment.get(WORKER, "").partition(":")
        return cls(int(number), Path(directory)) if directory else None

    @property
    def metrics_socket(self) -> Path:
        """Where it tells the other workers what it counts."""
        return self.directory / f"metrics-{self.number}.sock"

    @property
    def notify_socket(self) -> Path:
        """Where it tells how it goes, as it would tell systemd."""
        return self.directory / f"notify-{self.number}.sock"

    @property
    def greeting(self) -> Path:
        """Where it leaves what is told to whoever started all of them."""
        return self.directory / f"greeting-{self.number}"

    def others(self) -> dict[int, Path]:
        """The sockets where the other workers tell what they count, by their numbers."""
        found = {int(path.stem.partition("-")[2]): path for path in self.directory.glob("metrics-*.sock")}
        return {number: found[number] for number in sorted(found) if number != self.number}


@dataclass(slots=True, eq=False)
class _Worker:
    place: Place
    process: asyncio.subprocess.Process | None = None
    ready: bool = False
    reloading: bool = False
    heard_at: float = 0.0
    """When it last said that its event loop turns."""
    back_off_seconds: float = _FIRST_BACK_OFF_SECONDS

    def send_signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


@dataclass(slots=True, eq=False)
class Supervisor:
    """Keeps the workers running until it is told to stop."""

    settings: Settings
    arguments: Sequence[str]
    """Those of the command line, which all of them get."""
    _workers: list[_Worker] = field(init=False, default_factory=list)
    _stopping: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _notifier: Notifier = field(init=False, default_factory=Notifier)
    _were_ready: bool = field(init=False, default=False)
    _status: int = field(init=False, default=0)

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT and all have ended, and return the exit status: 0, or that of one that failed.

        Raises:
            ConfigError: there is no server for the processes to meet at.
            OSError: the address is not free or not ours.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._notifier = Notifier.from_environment(os.environ)
        tasks = Tasks()
        # For its owner alone: who reaches the sockets in it reaches the queue. The port is kept bound, and not
        # listening, so that it stays ours while workers come and go, and one that is chosen is the same for all.
        with tempfile.TemporaryDirectory(prefix="slai-") as directory, _reserve(self.settings) as reserved:
            flags = ["--port", str(reserved.getsockname()[1])]
            if self.settings.redis is None:
                server = EmbeddedServer(Path(directory))
                flags += ["--redis", server.url]
                await server.start()
                await _open_unused(server.url, self.settings.redis_pool)
                tasks.spawn(server.keep(), "store")
            tasks.spawn(self._notifier.run(), "watchdog")
            tasks.spawn(self._watch(), "watchdog of the workers")
            self._workers = [_Worker(Place(number, Path(directory))) for number in range(self.settings.workers)]
            try:
                async with asyncio.TaskGroup() as group:
                    for worker in self._workers:
                        group.create_task(self._keep(worker, flags), name=f"worker {worker.place.number}")
            finally:
                await tasks.end()
        return self._status

    async def _keep(self, worker: _Worker, flags: Sequence[str]) -> None:
        """Run one worker, again and again until the end."""
        number, place = worker.place.number, worker.place
        environment = os.environ | {WORKER: f"{number}:{place.directory}", "NOTIFY_SOCKET": str(place.notify_socket)}
        environment.pop("WATCHDOG_PID", None)  # what systemd wants to see of us, we want to see of them
        own = [] if not self.settings.debug_port else ["--debug-port", str(self.settings.debug_port + number)]
        command = (sys.executable, "-m", "proxy", "serve", *self.arguments, *flags, *own)
        with _hearing(place.notify_socket, lambda word: self._on_word(worker, word)):
            while not self._stopping.is_set():
                # In a session of its own, so that Ctrl-C comes once, and from here. It ends with its standard input.
                worker.process = await asyncio.create_subprocess_exec(
                    *command, env=environment, stdin=asyncio.subprocess.PIPE, start_new_session=True
                )
                if self._stopping.is_set():
                    worker.send_signal(signal.SIGTERM)
                status = await worker.process.wait()
                place.metrics_socket.unlink(missing_ok=True)
                if self._stopping.is_set():
                    self._status = self._status or (0 if status in _AS_TOLD else abs(status))
                elif status in _UNUSABLE and not self._were_ready:  # it has said why, and so would the next one
                    self._status = status
                    self._stop(signal.SIGTERM)
                else:
                    await self._pause(worker, status)

    async def _pause(self, worker: _Worker, status: int) -> None:
        if worker.ready:
            worker.back_off_seconds = _FIRST_BACK_OFF_SECONDS
        worker.ready = worker.reloading = False
        _log.error("worker %d has ended (%d); again in %g s", worker.place.number, status, worker.back_off_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(worker.back_off_seconds):
                await self._stopping.wait()
        worker.back_off_seconds = min(_LONGEST_BACK_OFF_SECONDS, 2 * worker.back_off_seconds)

    async def _watch(self) -> None:
        """Kill a worker that stands still, where systemd would do so with a proxy of one process."""
        loop, seconds = asyncio.get_running_loop(), self._notifier.watchdog_seconds
        while seconds is not None:
            await asyncio.sleep(seconds / 2)
            for worker in self._workers:
                if worker.ready and loop.time() - worker.heard_at > seconds:
                    _log.error("worker %d stands still, and is killed", worker.place.number)
                    worker.send_signal(signal.SIGKILL)

    def _on_word(self, worker: _Worker, word: str) -> None:
        worker.heard_at = asyncio.get_running_loop().time()
        if "READY=1" in word:
            worker.ready, was_reloading = True, worker.reloading
            worker.reloading = False
            if was_reloading and not any(other.reloading for other in self._workers):
                self._notifier.ready(f"{len(self._workers)} workers have read the settings anew")
        if not self._were_ready and all(worker.ready for worker in self._workers):
            self._were_ready = True
            self._notifier.ready(f"{len(self._workers)} workers")
            print(self._workers[0].place.greeting.read_text(), file=sys.stderr, flush=True)  # noqa: T201 - as without workers

    def _stop(self, number: signal.Signals) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            self._notifier.stopping("draining")
        self._pass_on(number)

    def _reload(self) -> None:
        """Have all read the settings anew; whoever asked hears when the last one has."""
        self._notifier.reloading()
        for worker in self._workers:
            worker.reloading = worker.ready
        self._pass_on(signal.SIGHUP)
        if not any(worker.reloading for worker in self._workers):  # they are about to start, with the new ones
            self._notifier.ready("the workers start")

    def _pass_on(self, number: signal.Signals) -> None:
        for worker in self._workers:
            worker.send_signal(number)


async def _open_unused(url: str, pool: str) -> None:
    """Let the first worker lead at once. Not where the server starts anew: then one may lead that it has forgotten."""
    store = open_store(url, pool)
    try:
        await store.open_unused()
    except StoreError as error:
        _log.warning("the first request may wait for two seconds: %s", error)
    finally:
        await store.close()


def _reserve(settings: Settings) -> socket.socket:
    """Bind the port for several processes, without listening."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # First as one that shares it with nobody: another supervisor's workers would, and have a queue of their own.
    for shared in (0, 1):
        reserved = socket.socket(family, kind, protocol)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
            reserved.bind(address)
        except OSError:
            reserved.close()
            raise
        if not shared:
            reserved.close()
    return reserved


@contextmanager
def _hearing(path: Path, on_word: Callable[[str], None]) -> Iterator[None]:
    """Take in what a worker tells."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as ear:
        ear.bind(str(path))
        loop.add_reader(ear, lambda: on_word(ear.recv(4096).decode(errors="replace")))
        try:
            yield
        finally:
            loop.remove_reader(ear)
