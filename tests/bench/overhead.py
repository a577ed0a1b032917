"""CPU per request and per token, of the proxy and of a plain relay, in turns on one machine.

What disturbs a measurement only ever adds to it: so of each, the least over the rounds counts, and their ratio says
what the proxy costs whatever else the machine does.
"""

from __future__ import annotations

import os
import time
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.load import Load
from loadgen.children import running

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from loadgen.children import Child

CONNECTIONS = 32
_STEP_SECONDS = 0.01
"""Long enough for each token to be read by itself: what comes at once costs little more than one of it."""
PATIENT = ("--probe-interval-seconds", "60")
"""However busy the machine is, the server is not to be taken for dead."""
_SHORT = 600
_LONG, _TOKENS = 32, 100


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of CPU, the least over all rounds."""

    per_request: float
    """Of one token."""
    per_token: float
    """Of long answers."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """What either costs."""

    proxy: Costs
    relay: Costs

    @property
    def request_ratio(self) -> float:
        return self.proxy.per_request / self.relay.per_request

    @property
    def token_ratio(self) -> float:
        return self.proxy.per_token / self.relay.per_token

    def __str__(self) -> str:
        lines = [f"{'CPU, us':<12}{'per request':>12}{'per token':>12}"]
        for name, costs in (("relay", self.relay), ("proxy", self.proxy)):
            lines.append(f"{name:<12}{costs.per_request:>12.1f}{costs.per_token:>12.2f}")
        return "\n".join([*lines, f"{'ratio':<12}{self.request_ratio:>12.2f}{self.token_ratio:>12.2f}"])


async def measure(rounds: int, more: Sequence[str] = (), *, share: float = 1.0, tree: Path | None = None) -> Overhead:
    """Measure both; ``more``: arguments for ``slai-proxy serve``; ``share``: of the usual number of requests.

    ``tree``: a checkout whose proxy is measured instead.
    """
    async with AsyncExitStack() as stack:

        async def start(name: str, arguments: Sequence[str], pattern: str) -> Child:
            return await stack.enter_async_context(running(name, arguments, address=pattern))

        upstream = await start("server", ["loadgen.nullserver", "--step", str(_STEP_SECONDS)], r"(http://\S+)")
        relay = await start("relay", ["bench.relay", upstream.address], r"listens on (http://\S+)")
        serve = ["proxy", "serve", "--engines", upstream.address, "--port", "0", *PATIENT, *more]
        with first_on_path(tree):
            proxy = await start("proxy", serve, r"listens on (http://\S+)")
        found: dict[Child, list[Costs]] = {relay: [], proxy: []}
        for turn in range(rounds + 1):
            for child in (relay, proxy) if turn % 2 else (proxy, relay):
                costs = await _measure_once(child, share)
                if turn:  # the first makes connections, and fills caches
                    found[child].append(costs)
        return Overhead(_least(found[proxy]), _least(found[relay]))


async def _measure_once(child: Child, share: float) -> Costs:
    short, long = round(_SHORT * share), max(CONNECTIONS, round(_LONG * share))
    per_request = await _cpu_seconds(child, requests=short, tokens=1) / short
    whole = await _cpu_seconds(child, requests=long, tokens=_TOKENS)
    return Costs(per_request * 1e6, (whole - long * per_request) / (long * (_TOKENS - 1)) * 1e6)


async def _cpu_seconds(child: Child, *, requests: int, tokens: int) -> float:
    load = Load(child.address, requests=requests, tokens=tokens)
    before = process_cpu_seconds(child.process.pid)
    await load.open(CONNECTIONS)
    await load.finish()
    return process_cpu_seconds(child.process.pid) - before


def process_cpu_seconds(pid: int) -> float:
    """CPU time of another process, in all its threads (clock_getcpuclockid(3) has the number)."""
    return time.clock_gettime((~pid << 3) | 2)


@contextmanager
def first_on_path(tree: Path | None) -> Iterator[None]:
    """Let processes started here import what is in ``tree``."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{tree.resolve()}:{before}" if tree is not None else before
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


def _least(costs: Sequence[Costs]) -> Costs:
    return Costs(min(c.per_request for c in costs), min(c.per_token for c in costs))
