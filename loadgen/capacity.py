"""Carrying a search for a capacity out: runs one after the other on servers, or several at once in the simulator."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadgen.trials import broken_for_sure, find
from proxy.sim.parallel import run_parallel
from proxy.sim.search import Outcome, judged, next_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from loadgen.load import SearchedLoad
    from loadgen.results import Result
    from loadgen.runner import Display
    from loadgen.servers import LiveServer
    from loadgen.simulated import SimulatedServer
    from loadgen.slo import Slo
    from proxy.sim.search import Finding, SearchPlan, Trial
    from proxy.sim.workload import ScheduledRequest

_LOOK_SECONDS = 1.0
_LOOKING_SHARE = 0.02
"""Of the client's time; it has streams to read."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """How each run is made and judged."""

    load: SearchedLoad
    slo: Slo
    warmup: float = 0.1
    """Share of the time in which requests come that is left out at the beginning."""


@dataclass(frozen=True, slots=True)
class SimulatedTrial:
    """A run in the simulator, complete in itself: it may go to another process."""

    trial: Trial
    measurement: Measurement
    server: SimulatedServer


def simulate_trial(task: SimulatedTrial) -> Finding:
    """Carry out a run in virtual time."""
    how = task.measurement
    records = task.server.serve(how.load.draw(task.trial.rate, task.trial.seed), task.trial.seed)
    return find(task.trial, records, how.slo, warmup=how.warmup)


def search_simulated(
    plan: SearchPlan,
    findings: dict[Trial, Finding],
    measurement: Measurement,
    server: SimulatedServer,
    on_finding: Callable[[Finding], None],
) -> Outcome:
    """Search in virtual time; what has been found so far is in ``findings`` at any moment."""
    while not isinstance(step := next_step(plan, findings), Outcome):
        tasks = [SimulatedTrial(trial, measurement, server) for trial in step]
        with closing(run_parallel(simulate_trial, tasks, min(plan.at_once, len(tasks)))) as results:
            for finding in results:
                findings[finding.trial] = finding
                on_finding(finding)
    return step


async def search_live(
    plan: SearchPlan,
    findings: dict[Trial, Finding],
    measurement: Measurement,
    server: LiveServer,
    on_finding: Callable[[Finding], None],
    *,
    stop: asyncio.Event,
    display: Callable[[], AbstractContextManager[Display]],
) -> Outcome | None:
    """Search on servers; ``None`` if ``stop`` was set before the end, with ``findings`` of the runs that are complete.

    A run ends as soon as a limit is broken for sure.
    """
    while not isinstance(step := next_step(plan, findings), Outcome):
        for trial in step:
            with display() as progress:
                finding = await _measure(trial, measurement, server, progress, stop)
            if stop.is_set():
                return None
            findings[trial] = finding
            on_finding(finding)
    return step


async def _measure(
    trial: Trial, how: Measurement, server: LiveServer, progress: Display, stop: asyncio.Event
) -> Finding:
    workload = how.load.draw(trial.rate, trial.seed)
    records: list[Result] = []
    ended = asyncio.Event()
    watcher = _Watcher(how, workload, records, server.time_scale)
    loop = asyncio.get_running_loop()
    tasks = [
        loop.create_task(watcher.watch(ended), name="early end"),
        loop.create_task(_pass_on(stop, ended), name="stop"),
    ]
    try:
        await server.serve(workload, progress=progress, stop=ended, records=records)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return find(trial, records, how.slo, warmup=how.warmup, ended_early=watcher.broken)


async def _pass_on(stop: asyncio.Event, ended: asyncio.Event) -> None:
    await stop.wait()
    ended.set()


class _Watcher:
    """Looks now and then whether a run can still keep the limits."""

    def __init__(
        self, how: Measurement, workload: Sequence[ScheduledRequest], records: list[Result], time_scale: float
    ) -> None:
        self.broken: str | None = None
        self._slo = how.slo
        self._since = how.warmup * workload[-1].at_seconds
        self._planned = [r.request_class.name for r in workload if r.at_seconds >= self._since]
        self._records = records
        self._scale = time_scale
        self._started = time.monotonic()

    async def watch(self, ended: asyncio.Event) -> None:
        """Set ``ended`` when a limit is broken for sure."""
        pause = _LOOK_SECONDS
        while not ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await ended.wait()
            began = time.monotonic()
            now = (began - self._started) * self._scale
            measured = [r for r in self._records if r.request.at_seconds >= self._since]
            self.broken = broken_for_sure(self._slo, measured, now, self._planned)
            if self.broken is not None:
                ended.set()
            pause = max(_LOOK_SECONDS, (time.monotonic() - began) / _LOOKING_SHARE)


def capacity_figures(plan: SearchPlan, findings: dict[Trial, Finding], outcome: Outcome | None) -> dict[str, Any]:
    """Return the result as it goes to JSON: the capacity, and every rate that was judged."""
    points: list[dict[str, Any]] = [
        {
            "rate": judgement.rate,
            "kept": judgement.kept,
            "certain": judgement.certain,
            "breaks": list(judgement.breaks),
            "margins": {
                name: {"mean": mean, "half_width": half, "share": judgement.findings[0].margins[name].share}
                for name, (mean, half) in judgement.means.items()
            },
            "runs": [_run(finding) for finding in judgement.findings],
        }
        for judgement in (judged(plan, findings) if outcome is None else outcome.judgements)
    ]
    kept = [point["rate"] for point in points if point["kept"]]
    broken = [point["rate"] for point in points if not point["kept"]]
    return {
        "complete": outcome is not None,
        "kept_at": outcome.kept_at if outcome else max(kept, default=None),
        "broken_at": outcome.broken_at if outcome else min(broken, default=None),
        "estimate": outcome.estimate if outcome else None,
        "interval": outcome and outcome.interval and list(outcome.interval),
        "breaks": list(outcome.breaks) if outcome else [],
        "runs": len(findings),
        "points": points,
    }


def _run(finding: Finding) -> dict[str, Any]:
    return {
        "seed": finding.trial.seed,
        "values": {name: margin.value for name, margin in finding.margins.items()},
        "unstable": finding.unstable,
        "queue_growth_share": finding.growth,
        "ended_early": finding.ended_early,
        **finding.figures,
    }
