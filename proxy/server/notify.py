"""Telling systemd how it goes, by datagrams to the socket that it names (sd_notify(3)); elsewhere it does nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Notifier:
    """``address``: systemd's socket, ``""`` if there is none; ``watchdog_seconds``: how often it wants to hear."""

    address: str = ""
    watchdog_seconds: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], pid: int | None = None) -> Notifier:
        """Read what systemd has put into the environment of the process ``pid`` (by default this one)."""
        address = environment.get("NOTIFY_SOCKET", "")
        try:
            microseconds = int(environment.get("WATCHDOG_USEC", "0"))
            meant = int(environment.get("WATCHDOG_PID", "0")) in (0, os.getpid() if pid is None else pid)
        except ValueError:
            return cls(address)
        return cls(address, microseconds / 1e6 if microseconds > 0 and meant else None)

    def ready(self, status: str) -> None:
        """All is up: requests are served."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """The configuration is read anew; ``ready`` follows."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """The end has begun."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    async def run(self) -> None:
        """Show systemd's watchdog that the event loop turns, until cancelled."""
        while self.address and self.watchdog_seconds is not None:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / 2)

    def _send(self, state: str) -> None:
        if not self.address:
            return
        name = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as end:
                end.sendto(state.encode(), name)
        except OSError as error:
            _log.warning("systemd cannot be notified at %s: %s", self.address, error.strerror)
