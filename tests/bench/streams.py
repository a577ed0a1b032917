"""Very many streams at once, for a while: what gets through, how late, and who takes the CPU for it.

Upstream, proxy and client share the machine, so the answer is of the machine as a whole: it tells the part of each.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from bench.overhead import PATIENT, process_cpu_seconds
from bench.stampload import BIN_NANOSECONDS, StampedLoad
from loadgen.children import running
from proxy.server.connections import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PER_ENGINE = 250
"""Streams: an engine of ``--max-num-seqs 256`` has about as many."""
_STARTS_PER_SECOND = 250
_SPARE_SECONDS = 20.0
"""For which all may take longer than it should: streams begin or end so much later, at most."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What was measured over ``seconds``, from when all streams had their first token."""

    streams: int
    rate: float
    seconds: float
    tokens: int
    errors: int
    why: str
    """Of the first error."""
    relayed: Mapping[float, float]
    """Seconds from the write of a token at the upstream to its read at the client, by quantile (1: the longest)."""
    lag: Mapping[float, float]
    """Seconds by which the event loops of the proxy were late, by quantile, from its own histogram."""
    cpu: Mapping[str, float]
    """Cores in use, by process."""

    @property
    def share(self) -> float:
        """Of the tokens that are due."""
        return self.tokens / (self.streams * self.rate * self.seconds)

    def __str__(self) -> str:
        def told(quantiles: Mapping[float, float]) -> str:
            return ", ".join(
                f"p{q * 100:g} {s * 1e3:.2f}" if q < 1 else f"longest {s * 1e3:.1f}" for q, s in quantiles.items()
            )

        used = ", ".join(f"{name} {cores:.2f}" for name, cores in self.cpu.items())
        errors = f"errors {self.errors}{f' ({self.why})' if self.why else ''}"
        lines = [
            f"{self.streams} streams at {self.rate:g} tokens/s for {self.seconds:.0f} s",
            f"  came through   {self.tokens / self.seconds:,.0f} tokens/s, {self.share:.1%} of what is due; {errors}",
            f"  relay, ms      {told(self.relayed)}",
            f"  cores          {used}; all {sum(self.cpu.values()):.2f} of {os.cpu_count()}",
        ]
        if self.lag:
            lines.insert(3, f"  loop lag, ms   {told(self.lag)}")
        return "\n".join(lines)


async def measure(
    streams: int, rate: float, seconds: float, *, workers: int, direct: bool = False, more: Sequence[str] = ()
) -> Carried:
    """Measure; ``direct``: without a proxy; ``more``: arguments for ``slai-proxy serve``."""
    raise_file_limit()
    engines = -(-streams // PER_ENGINE)
    async with AsyncExitStack() as stack:
        server = ["bench.stepserver", "--engines", str(engines), "--rate", str(rate)]
        upstream = await stack.enter_async_context(running("upstream", server, address=r"(http://\S+)"))
        processes = {"upstream": upstream.process.pid}
        urls, metrics = upstream.address.split(","), None
        if not direct:
            serve = ["proxy", "serve", "--engines", upstream.address, "--port", "0", "--workers", str(workers)]
            serve += ["--max-num-seqs", str(2 * PER_ENGINE), *PATIENT, *more]
            proxy = await stack.enter_async_context(running("proxy", serve, address=r"listens on (http://\S+)"))
            urls, metrics = [proxy.address], f"{proxy.address}/metrics"
            processes |= _tree(proxy.process.pid)
        ramp = streams / _STARTS_PER_SECOND
        patience = 2 * ramp + _SPARE_SECONDS
        load = StampedLoad(urls, streams, round(rate * (patience + seconds)))
        stack.callback(load.close)
        processes["client"] = os.getpid()
        await load.open(ramp, patience)
        before = await _scrape(metrics)
        cpu, began = {name: process_cpu_seconds(pid) for name, pid in processes.items()}, monotonic()
        bins, tokens = load.begin(), load.tokens
        await asyncio.sleep(seconds)
        took, tokens = monotonic() - began, load.tokens - tokens
        bins = list(bins)  # as it is now
        cpu = {name: (process_cpu_seconds(pid) - cpu[name]) / took for name, pid in processes.items()}
        after = await _scrape(metrics)
        await load.finish(2 * patience)
    quantiles = (0.5, 0.99, 0.999, 1.0)
    return Carried(
        streams,
        rate,
        took,
        tokens,
        load.errors,
        load.why,
        {q: _of_bins(bins, q) for q in quantiles} if any(bins) else {},
        _lag(before, after, quantiles[:2]),
        cpu,
    )


def _tree(pid: int) -> dict[str, int]:
    """The processes of a proxy, by names."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((directory / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[1]) == pid:
                found[int(directory.name)] = b"proxy\0serve" not in (directory / "cmdline").read_bytes()
    if not found:
        return {"proxy": pid}
    workers = sorted(child for child, is_store in found.items() if not is_store)
    named = {f"worker {number}": child for number, child in enumerate(workers)}
    named |= {"store": child for child, is_store in found.items() if is_store}  # noqa: B035 - there is one at most
    return named | {"supervisor": pid}


async def _scrape(url: str | None) -> str:
    if url is None:
        return ""
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return await answer.text()


def _lag(before: str, after: str, quantiles: Sequence[float]) -> dict[float, float]:
    """Quantiles of what came between two scrapes, of all workers; within a bucket, evenly as Prometheus takes them."""
    counts: Counter[float] = Counter()
    for text, sign in ((before, -1), (after, 1)):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "slai_loop_lag_seconds_bucket":
                    counts[float(sample.labels["le"])] += round(sign * sample.value)
    edges = sorted(counts)
    if not edges or not counts[edges[-1]]:
        return {}
    up_to = [counts[edge] for edge in edges]
    return {q: float(np.interp(q * up_to[-1], [0, *up_to], [0.0, *edges[:-1], edges[-2]])) for q in quantiles}


def _of_bins(bins: Sequence[int], quantile: float) -> float:
    """Seconds; the upper edge of the bin."""
    up_to = np.cumsum(bins)
    return float(np.searchsorted(up_to, quantile * up_to[-1]) + 1) * BIN_NANOSECONDS / 1e9
