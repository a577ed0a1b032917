"""The store of replicas that share a process: for tests of whatever uses a store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.core.fleet import Register, Standing

if TYPE_CHECKING:
    from collections.abc import Callable


class MemoryStore:
    """Keeps everything in the process. ``clock`` tells the time in seconds, as Redis's would."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._register = Register()
        self._listeners: dict[str, Callable[[bytes], None]] = {}
        self._shared: dict[str, bytes] = {}

    async def beat(self, replica: str, life_seconds: float, *, willing: bool = True) -> Standing:
        return self._register.beat(replica, life_seconds, self._clock(), willing=willing)

    async def resign(self, replica: str) -> None:
        led = self._register.resign(replica)
        for other in self._listeners if led else ():
            if other != replica:
                await self.post(other, b"")

    async def post(self, to: str, letter: bytes) -> None:
        if (listener := self._listeners.get(to)) is not None:
            asyncio.get_running_loop().call_soon(listener, letter)

    async def post_as_leader(self, to: str, letter: bytes, replica: str, epoch: int) -> bool:
        if not self._register.leads(replica, epoch, self._clock()):
            return False
        await self.post(to, letter)
        return True

    async def listen(self, replica: str, on_letter: Callable[[bytes], None]) -> None:
        self._listeners[replica] = on_letter
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            if self._listeners.get(replica) is on_letter:
                del self._listeners[replica]

    async def share(self, name: str, value: bytes) -> bytes:
        return self._shared.setdefault(name, value)

    async def close(self) -> None:
        self._listeners.clear()
