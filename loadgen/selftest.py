"""What this client can do on this machine, before anybody believes what it says about a server.

A server without a model (``loadgen.nullserver``) takes a process of its own, and this one is the client:

requests
    Users who each send the next request when the one before is answered by its single token, for some seconds.
tokens
    More and more streams, each with a token every 20 ms, until the client's core is busy or falls behind. The ceiling
    is how many tokens it takes per second of CPU time: where it has a core to itself, that is per second.
at half
    Poisson arrivals at half of each ceiling, and how late the requests leave then.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import count, islice
from random import Random
from typing import TYPE_CHECKING, Any

from loadgen.children import running
from loadgen.draws import exponential
from loadgen.report import tolerated_delay
from loadgen.runner import run_workload
from proxy.core.request import RequestClass
from proxy.sim.records import quantiles
from proxy.sim.workload import ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from loadgen.results import Result

SCHEMA_VERSION = 1

_STEP_SECONDS = 0.02
_QUICK_STEP_SECONDS = 0.001
_PROMPT_TOKENS = 500
_USERS = 64
_FEWEST_STREAMS, _MOST_STREAMS = 64, 16_384
_TOKENS_PER_REQUEST = 50
_BUSY = 0.85
"""Of the client's core: beyond it, the streams are too many."""
_KEPT_UP = 0.9
"""Of the tokens that the streams' pace gives: below it, somebody is behind."""
_FAR_BEHIND = 0.5
_KIND = RequestClass("selftest")


@dataclass(frozen=True, slots=True)
class Phase:
    """What one part of the test has measured."""

    requests: int
    tokens: int
    failed: int
    seconds: float
    cpu_seconds: float
    delay_s: dict[str, float | None]
    """How late requests left, p50 and p99 and the latest."""
    reads: int
    """Chunks that did not share their read with another."""
    offered_per_s: float | None = None
    """Requests per second while they came; of open loops."""

    @property
    def cpu_share(self) -> float:
        return self.cpu_seconds / self.seconds

    @property
    def offered_tokens_per_s(self) -> float:
        return (self.offered_per_s or 0.0) * self.tokens / max(1, self.requests)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The client's ceilings, and how it does at half of them."""

    requests_per_s: float
    """Per second of CPU time."""
    requests_per_s_reached: float
    tokens_per_s: float
    """Per second of CPU time."""
    tokens_per_s_reached: float
    streams: int
    """In the phase that gave the tokens."""
    at_half_requests: Phase
    at_half_tokens: Phase

    @property
    def fit(self) -> bool:
        """Whether requests leave in time at half of either ceiling, by the rule by which a run is valid."""
        delays = (phase.delay_s["p99"] for phase in (self.at_half_requests, self.at_half_tokens))
        return all(delay is not None and delay <= tolerated_delay(None) for delay in delays)

    def document(self) -> dict[str, Any]:
        """Return the result as it goes to JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "requests_per_cpu_s": self.requests_per_s,
            "requests_per_s_reached": self.requests_per_s_reached,
            "tokens_per_cpu_s": self.tokens_per_s,
            "tokens_per_s_reached": self.tokens_per_s_reached,
            "streams": self.streams,
            "tolerated_delay_s": tolerated_delay(None),
            "fit": self.fit,
            "at_half": {
                name: {
                    "requests_per_s": phase.offered_per_s,
                    "tokens_per_s": phase.offered_tokens_per_s,
                    "failed": phase.failed,
                    "schedule_delay_s": phase.delay_s,
                    "tokens_read_alone": phase.reads / phase.tokens if phase.tokens else None,
                }
                for name, phase in (("requests", self.at_half_requests), ("tokens", self.at_half_tokens))
            },
        }


async def measure(seconds: float, tell: Callable[[str], None]) -> SelfTest:
    """Measure the client, each part for so many seconds; ``tell`` hears of the progress.

    Raises:
        ChildError: the null server did not come up.
    """
    async with AsyncExitStack() as stack:
        quick, paced = [
            (
                await stack.enter_async_context(
                    running("the null server", ["loadgen.nullserver", "--step", str(step)], address=r"(http://\S+)$")
                )
            ).address
            for step in (_QUICK_STEP_SECONDS, _STEP_SECONDS)
        ]
        await _phase(quick, list(islice(_closed(8), 64)), seconds)  # what is slow the first time only
        tell(f"requests of one token, {_USERS} users")
        requests = await _phase(quick, list(islice(_closed(_USERS), int(40_000 * seconds))), seconds)
        most, tokens = await _most_tokens(paced, seconds, tell)
        per_cpu = (requests.requests / requests.cpu_seconds, tokens.tokens / tokens.cpu_seconds)
        tell("Poisson arrivals at half the requests")
        half_requests = await _at_half(quick, per_cpu[0] / 2, seconds, 1)
        tell("Poisson arrivals at half the tokens")
        rate = per_cpu[1] / 2 / _TOKENS_PER_REQUEST
        half_tokens = await _at_half(paced, rate, seconds, _TOKENS_PER_REQUEST)
    return SelfTest(
        per_cpu[0],
        requests.requests / requests.seconds,
        per_cpu[1],
        tokens.tokens / tokens.seconds,
        most,
        half_requests,
        half_tokens,
    )


async def _most_tokens(url: str, seconds: float, tell: Callable[[str], None]) -> tuple[int, Phase]:
    """Double the streams until the client is busy or somebody is behind; return the last that were borne."""
    each = max(2, int(seconds / _STEP_SECONDS))
    best: tuple[int, Phase] | None = None
    streams = _FEWEST_STREAMS
    while streams <= _MOST_STREAMS:
        tell(f"{streams} streams of a token per {1000 * _STEP_SECONDS:g} ms")
        workload = [_request(index, 0.0, each) for index in range(streams)]
        phase = await _phase(url, workload, 4 * seconds)
        kept_up = phase.tokens / phase.seconds * _STEP_SECONDS / streams
        if best is None or kept_up >= _KEPT_UP:
            best = streams, phase
        if kept_up < _FAR_BEHIND or phase.cpu_share > _BUSY:
            break
        streams *= 2
    assert best is not None
    return best


async def _at_half(url: str, rate: float, seconds: float, output: int) -> Phase:
    """Send at a rate for so many seconds from when as many streams end as begin."""
    lasts = output * _STEP_SECONDS if output > 1 else 0.0
    rng, at, workload = Random("selftest"), 0.0, list[ScheduledRequest]()
    while (at := at + exponential(rng) / rate) < lasts + seconds:
        workload.append(_request(len(workload), at, output))
    phase = await _phase(url, workload, 4 * (lasts + seconds), after=lasts)
    return replace(phase, offered_per_s=len(workload) / (lasts + seconds))


async def _phase(url: str, workload: Sequence[ScheduledRequest], limit_seconds: float, after: float = 0.0) -> Phase:
    """Send a workload until it ends, or for so long; delays count of the requests ``after`` a time."""
    stop = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(limit_seconds, stop.set)
    cpu, began = time.process_time(), time.monotonic()
    results = await run_workload(workload, [url], model="null", nonce=1, stop=stop)
    cpu, wall = time.process_time() - cpu, time.monotonic() - began
    timer.cancel()
    return _measured(results, wall, cpu, after)


def _measured(results: Sequence[Result], seconds: float, cpu_seconds: float, after: float) -> Phase:
    done = [r for r in results if r.completed]
    counted = [r for r in results if r.request.at_seconds >= after]
    delays = [d for r in counted if (d := r.schedule_delay_seconds) is not None]
    return Phase(
        len(done),
        sum(len(r.chunk_times) for r in results),
        sum(r.error not in (None, "unfinished") for r in results),
        seconds,
        cpu_seconds,
        {**quantiles(delays, 50, 99), "max": max(delays, default=None)},
        sum(len(set(r.chunk_times)) for r in results),
    )


def _request(index: int, at: float, output: int, after: int | None = None) -> ScheduledRequest:
    return ScheduledRequest(index, at, _PROMPT_TOKENS, output, _KIND, index, after=after)


def _closed(users: int) -> Iterator[ScheduledRequest]:
    for index in count():
        yield _request(index, 0.0, 1, index - users if index >= users else None)
