"""The soak itself: what is done in which order, and what must hold at the end."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from soak.load import Clients, Engines, ProxyProcess

if TYPE_CHECKING:
    from collections.abc import Callable


_PROBES_FILES = 6
"""Connections of probes, of which there are now more, now fewer."""


@dataclass
class Result:
    """What a soak has shown."""

    requests: int
    seconds: float = 0.0
    killed: int = 0
    went: dict[str, int] = field(default_factory=dict)
    generations_sent: int = 0
    answered: int = 0
    before: dict[str, Any] = field(default_factory=dict)
    """What the proxy held after some first requests."""
    samples: list[tuple[int, int]] = field(default_factory=list)
    """Requests sent, and the proxy's resident bytes."""
    after: dict[str, Any] = field(default_factory=dict)
    """What it held when all was over."""
    exit_code: int = -1

    def growth_bytes(self) -> float:
        """Growth of memory per request over the later two thirds, by least squares."""
        later = [sample for sample in self.samples if sample[0] >= self.requests / 3]
        mean_x = sum(x for x, _ in later) / len(later)
        mean_y = sum(y for _, y in later) / len(later)
        spread = sum((x - mean_x) ** 2 for x, _ in later)
        return sum((x - mean_x) * (y - mean_y) for x, y in later) / spread if spread else 0.0


def check(result: Result) -> list[str]:
    """Return what does not hold; nothing if all is well."""
    after, went = result.after, result.went
    outcomes: dict[str, int] = after["outcomes"]
    left = sum(count for what, count in went.items() if what.startswith("left"))
    wrong = {
        "requests that were not counted by their clients": sum(went.values()) != result.requests,
        "a request without an end": went.get("hung", 0) > 0,
        "a cut that nobody told of": went.get("incomplete", 0) > 0,
        "a usage report that the client did not ask for": went.get("usage left in", 0) > 0,
        f"held for requests: {after['left_over']}": bool(after["left_over"]),
        f"{after['begun']} begun, outcomes {outcomes}": sum(outcomes.values()) != after["begun"],
        "more or fewer begun than sent": not result.answered <= after["begun"] <= result.generations_sent,
        f"tasks {after['task_names']}, before {result.before['task_names']}": after["tasks"] > result.before["tasks"],
        f"{after['connections']} connections of clients are open": after["connections"] > 0,
        f"{_files(after)} files left open, {_files(result.before)} before": _files(after)
        > _files(result.before) + _PROBES_FILES,
        f"not a third left: {left}": not 0.25 * result.requests < left < 0.4 * result.requests,
        "no engine was killed": result.killed == 0,
        f"the proxy ended with {result.exit_code}": result.exit_code != 0,
    }
    return [what for what, is_wrong in wrong.items() if is_wrong]


def _files(held: dict[str, Any]) -> int:
    """Open files but for the connections of clients, and those to engines that may be used again."""
    return int(held["files"] - held["idle_upstream"] - held["connections"])


async def soak(
    requests: int,
    *,
    at_once: int = 120,
    engines: int = 3,
    kill_seconds: float = 4.0,
    seed: int = 1,
    most_seconds: float = inf,
    tell: Callable[[int, int], None] = lambda _done, _bytes: None,
) -> Result:
    """Run a soak of so many requests, or of as many as can be sent in ``most_seconds``.

    ``tell`` hears now and then how many are done, and how many bytes of memory the proxy takes.
    """
    fleet, proxy, result = Engines(engines), ProxyProcess(), Result(requests)
    killing: asyncio.Task[None] | None = None
    try:
        await fleet.start()
        await proxy.start(fleet.urls)
        begun = time.monotonic()
        warm = max(20, requests // 50)
        clients = Clients(proxy.port, seed)
        await clients.run(warm, min(at_once, warm), lambda _: None)
        await _quiet(proxy)
        result.before = await proxy.held()
        killing = asyncio.get_running_loop().create_task(fleet.kill_by_turns(kill_seconds))
        done, step = warm, max(200, (requests - warm) // 40)
        while done < requests and time.monotonic() - begun < most_seconds:
            count = min(step, requests - done)
            clients.seed += 1
            await clients.run(count, at_once, lambda _: None)
            done += count
            resident = (await proxy.held())["resident_bytes"]
            result.samples.append((done, resident))
            tell(done, resident)
        killing.cancel()
        result.requests = done
        result.after = await _quiet(proxy, result.before["tasks"])
        result.seconds = time.monotonic() - begun
        result.killed, result.went = fleet.killed, dict(clients.went)
        result.generations_sent, result.answered = clients.generations_sent, clients.answered
        result.exit_code = await proxy.stop()
    finally:
        if killing is not None:
            killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing
        proxy.kill()
        await fleet.stop()
    return result


async def _quiet(proxy: ProxyProcess, tasks: int | None = None) -> dict[str, Any]:
    """Wait until nothing is held for requests, at most for some seconds, and return what is held then.

    ``tasks`` are as many as there were; one whose connection has just ended needs a turn of the loop to end as well.
    """
    for _ in range(100):
        held = await proxy.held()
        if not held["left_over"] and not held["connections"] and held["tasks"] <= (tasks or held["tasks"]):
            break
        await asyncio.sleep(0.1)
    return held
