"""Where the proxy's time goes under load, drawn by py-spy: a flame graph that lies well in a repository."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import uvloop

from bench.load import Load
from bench.overhead import PATIENT, first_on_path
from loadgen.children import running

if TYPE_CHECKING:
    from pathlib import Path

LOADS = {"requests": (64, 1), "tokens": (200, 100_000)}
"""Connections, and tokens of an answer: nearly all is spent on requests, or on tokens."""
_STEP_SECONDS = 0.01
"""Long enough for each token to be read by itself."""
_WARM_UP_SECONDS = 3.0
_FOREVER = 1_000_000_000
_SAMPLES_PER_SECOND = 250


def draw(load: str, out: Path, seconds: float, tree: Path | None = None) -> None:
    """Draw the proxy (that of the checkout ``tree``, if told) under the load of ``LOADS`` that is named.

    Raises:
        RuntimeError: py-spy cannot be run, or does not come to its end.
    """
    uvloop.run(_draw(load, out, seconds, tree))
    out.write_text(_without_place(out.read_text(encoding="utf-8"), f"slai-proxy, {load}"), encoding="utf-8")


async def _draw(load: str, out: Path, seconds: float, tree: Path | None) -> None:
    async with AsyncExitStack() as stack:
        server = running("server", ["loadgen.nullserver", "--step", str(_STEP_SECONDS)], address=r"(http://\S+)")
        upstream = await stack.enter_async_context(server)
        with first_on_path(tree):
            serve = ["proxy", "serve", "--engines", upstream.address, "--port", "0", *PATIENT]
            proxy = await stack.enter_async_context(running("proxy", serve, address=r"listens on (http://\S+)"))
        connections, tokens = LOADS[load]
        client = Load(proxy.address, requests=_FOREVER, tokens=tokens)
        stack.callback(client.close)
        await client.open(connections)
        await asyncio.sleep(_WARM_UP_SECONDS)
        await _record(proxy.process.pid, out, seconds)


async def _record(pid: int, out: Path, seconds: float) -> None:
    flags = [
        "--duration",
        f"{seconds:.0f}",
        "--rate",
        str(_SAMPLES_PER_SECOND),
        "--output",
        str(out),
        "--pid",
        str(pid),
    ]
    try:
        spy = await asyncio.create_subprocess_exec("py-spy", "record", "--function", "--gil", *flags, stdout=sys.stderr)
    except FileNotFoundError:
        raise RuntimeError("there is no py-spy: pip install py-spy") from None
    if status := await spy.wait():
        raise RuntimeError(f"py-spy ended with {status}")


def _without_place(svg: str, title: str) -> str:
    """Leave out what is of this machine: the command line, and where files lie."""
    svg = re.sub(r">py-spy record [^<]*<", f">{title}<", svg)
    svg = re.sub(r"(?<=\()/[^()]*(?:site-packages|lib/python3\.\d+)/", "", svg)
    return re.sub(r"(?<=\()/[^():]*/", "", svg)
