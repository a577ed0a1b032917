"""What a proxy does beside its own work where it is one of several processes behind one port."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, suppress
from shutil import rmtree
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.server.runner import Runner
from proxy.server.scrape import scraped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from proxy.server.app import Proxy
    from proxy.server.workers import Place


@asynccontextmanager
async def be_worker(place: Place, proxy: Proxy, stop: Callable[[], None]) -> AsyncIterator[None]:
    """Tell the other processes what this one counts, and stop when the one that started it is gone."""

    async def tell(request: web.Request) -> web.Response:
        return await scraped(proxy.metrics, request)

    app = web.Application()
    app.router.add_get("/metrics", tell)
    runner = Runner(app)
    await runner.setup()
    place.metrics_socket.unlink(missing_ok=True)
    await web.UnixSite(runner, str(place.metrics_socket)).start()
    proxy.place = place
    alone = False

    def end_alone() -> None:
        nonlocal alone
        alone = True
        stop()

    _end_with_input(end_alone)
    try:
        yield
    finally:
        await runner.cleanup()
        if alone:  # nobody else is there to clear up
            rmtree(place.directory, ignore_errors=True)


def _end_with_input(stop: Callable[[], None]) -> None:
    """Call ``stop`` when the standard input ends, of which the process that started this one holds the other end."""
    loop = asyncio.get_running_loop()

    def on_input() -> None:
        if not os.read(0, 1024):
            loop.remove_reader(0)
            stop()

    with suppress(OSError, ValueError):  # it is no pipe
        loop.add_reader(0, on_input)
