"""The proxy as a process of its own, which tells on request what it holds: a line in, a line of JSON out."""

# ruff: noqa: T201

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, cast

import uvloop
from invariants import check_scheduler
from live_proxy import LiveProxy

from proxy.config import Settings
from proxy.server.app import GENERATOR, PROXY, create_app
from proxy.server.connections import Site
from proxy.server.runner import Runner

if TYPE_CHECKING:
    import aiohttp

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def held(proxy: LiveProxy) -> dict[str, object]:
    """What there is now of requests, tasks, sockets and memory."""
    gc.collect()
    check_scheduler(proxy.scheduler, proxy.driver.now())
    begun = proxy.app[GENERATOR]._numbers.__reduce__()[1][0]
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    return {
        "left_over": proxy.left_over(),
        "begun": begun,
        "outcomes": proxy.outcomes(),
        "tasks": len(asyncio.all_tasks()),
        "task_names": Counter(str(getattr(task.get_coro(), "__qualname__", "")) for task in asyncio.all_tasks()),
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "idle_upstream": sum(map(proxy.app[PROXY].client.idle, proxy.app[PROXY].client._engines)),
        "connections": len(proxy.connections),
        "resident_bytes": resident,
        "objects": len(gc.get_objects()),
    }


async def main(engines: list[str]) -> None:
    loop = asyncio.get_running_loop()
    settings = Settings(
        engines=tuple(engines), probe_interval_seconds=0.2, max_num_seqs=64, max_queue_requests=150, ask_usage=True
    )
    app = create_app(settings)
    runner = Runner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = Site(runner, app[PROXY].connections, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    proxy = LiveProxy(f"http://127.0.0.1:{port}", app, cast("aiohttp.ClientSession", None))
    print(json.dumps({"port": port}), flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(held(proxy)), flush=True)
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
