"""Stores of both kinds, for tests; the one on a server has a real one."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from redis_server import PROGRAM, WHY_NOT, RedisServer

from proxy.store.memory import MemoryStore
from proxy.store.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from proxy.store.contract import StateStore


@dataclass(slots=True)
class Opened:
    """A store, and a way to let its time pass: a server's passes only by itself."""

    store: StateStore
    advance: Callable[[float], Awaitable[None]]


@asynccontextmanager
async def open_memory() -> AsyncIterator[Opened]:
    now = [1e9]

    async def advance(seconds: float) -> None:
        now[0] += seconds

    yield Opened(MemoryStore(lambda: now[0]), advance)


@asynccontextmanager
async def open_redis(directory: Path) -> AsyncIterator[Opened]:
    if PROGRAM is None:
        pytest.skip(WHY_NOT)
    server = RedisServer(directory)
    await server.start()
    store = RedisStore.from_url(server.url, "tests")
    try:
        yield Opened(store, asyncio.sleep)
    finally:
        await store.close()
        await server.kill()


@asynccontextmanager
async def letters_to(store: StateStore, replica: str) -> AsyncIterator[asyncio.Queue[bytes]]:
    """All letters to a replica, from the first that is sent after entry."""
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(store.listen(replica, heard.put_nowait))
        while True:  # nobody tells when it has begun to listen
            await store.post(replica, b"first")
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await heard.get()
                    break
        await store.post(replica, b"last")
        while await heard.get() != b"last":
            pass
        yield heard
        listening.cancel()
