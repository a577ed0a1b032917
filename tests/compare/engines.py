"""The engines that are compared: which each side needs, how it is started, and what it has counted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import tempfile
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING
from urllib.request import urlopen

from plugin_path import PATH, SCHEDULER

from loadgen.children import ChildError
from loadgen.runner import wait_until_ready

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

PLUGINS = {"plugin-slai": "slai", "plugin-deadline": "deadline", "gate-plugin": "deadline"}
"""Sides whose engine has our scheduler; SLAI leaves the budget as it is, so it gets the small one."""
SMALL = {"direct-small", "gate", "plugin-slai"}
_PATIENCE_SECONDS = 30.0


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@asynccontextmanager
async def engine_for(side: str, args: argparse.Namespace) -> AsyncIterator[tuple[str, int]]:
    """The address and the token budget of the engine that a side talks to."""
    budget = args.small_budget if side in SMALL else args.large_budget
    url = args.small if side in SMALL else args.large
    if url is not None:
        yield url.rstrip("/"), budget
        return
    port = _free_port()
    command = [word.replace("{port}", str(port)).replace("{budget}", str(budget)) for word in shlex.split(args.engine)]
    environment = dict(os.environ)
    with tempfile.TemporaryFile() as said:
        if side in PLUGINS:
            settings = json.dumps({"slai": {"policy": PLUGINS[side]}})
            command += ["--scheduler-cls", SCHEDULER, "--additional-config", settings]
            environment["PYTHONPATH"] = PATH
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            env=environment,
        )
        try:
            ready = asyncio.ensure_future(wait_until_ready([f"http://127.0.0.1:{port}"], patience_seconds=args.wait))
            ended = asyncio.ensure_future(process.wait())
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done() or ready.exception() is not None:
                ready.cancel()
                said.seek(0)
                raise ChildError(
                    f"the engine did not come up; its last words:\n{said.read()[-3000:].decode('utf-8', 'replace')}"
                )
            yield f"http://127.0.0.1:{port}", budget
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End an engine with all the processes that it started, which are of its session."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await process.wait()
    await process.wait()


def engine_counts(url: str) -> dict[str, float]:
    """What an engine has counted since its start: preemptions, and with our scheduler steps and decodes held back."""
    with urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    found = (
        re.fullmatch(r"(?:vllm:)?(num_preemptions|slai_plugin_(?:steps|held))(?:_total)?(?:\{.*\})? (\S+)", line)
        for line in lines
    )
    return {matched[1]: float(matched[2]) for matched in found if matched}
