"""A study: every policy at every rate on every seed, and what the runs say when they are put side by side.

All policies meet the same requests at the same instants, so their figures are compared seed by seed and the median is
taken of the ratios, not the ratio of the medians: most of what differs from seed to seed cancels out.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

from proxy.core.actions import describe
from proxy.core.recording import RecordedScheduler
from proxy.sim.policies import PolicyOptions, find_policy
from proxy.sim.records import quantiles, summarise
from proxy.sim.simulator import SimulationConfig, simulate
from proxy.sim.workload import PAPER_CLASSES, ClassShare, ScheduledRequest, Surge, Trace, draw_workload
from proxy.wire.decisions import Head, line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from proxy.core.actions import Action
    from proxy.core.config import SchedulerConfig
    from proxy.core.scheduler import Scheduler

SCHEMA_VERSION = 1

RunFigures = dict[str, Any]
"""One run as it goes to JSON; see ``perform``."""


@dataclass(frozen=True, slots=True)
class Study:
    """What to compare, and on which workload. The first policy is the one that the others are measured by."""

    trace: Trace
    policies: tuple[str, ...]
    rates: tuple[float, ...]
    """Requests per second over all engines."""
    seeds: tuple[int, ...]
    requests: int
    classes: tuple[ClassShare, ...] = PAPER_CLASSES
    surge: Surge | None = None
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    options: PolicyOptions = field(default_factory=PolicyOptions)
    tenants: Mapping[str, float] | None = None
    """Parts of the rate, by tenant."""
    decision_log: Path | None = None
    """Where to write all that the scheduler is told and decides; for a study of one run."""

    def __len__(self) -> int:
        return len(self.policies) * len(self.rates) * len(self.seeds)

    def tasks(self) -> Iterator[RunTask]:
        """Yield the runs, each with its requests; policies alternate, so that an early stop leaves whole pairs.

        Raises:
            ValueError: as from ``draw_workload``.
        """
        for rate in self.rates:
            for seed in self.seeds:
                drawn = draw_workload(
                    self.trace,
                    rate=rate,
                    requests=self.requests,
                    seed=seed,
                    classes=self.classes,
                    surge=self.surge,
                    tenants=self.tenants,
                )
                for policy in self.policies:
                    yield RunTask(policy, rate, seed, drawn, self.simulation, self.options, self.decision_log)


@dataclass(frozen=True, slots=True)
class RunTask:
    """One simulation, complete in itself: it may go to another process."""

    policy: str
    rate: float
    seed: int
    workload: Sequence[ScheduledRequest]
    simulation: SimulationConfig
    options: PolicyOptions
    decision_log: Path | None = None


def perform(task: RunTask) -> RunFigures:
    """Simulate and return the figures: those of ``summarise``, what the engines saw, and a hash of all decisions.

    ``decisions_sha256`` is taken over the lines of ``core.actions.describe``; ``None`` where no proxy decides.
    """
    policy = find_policy(task.policy)
    simulation = policy.simulation(task.simulation, task.seed)
    scheduler = policy.scheduler(task.options)
    workload = [_with_limit(r) for r in task.workload] if policy.limits_ttft else task.workload
    decisions = hashlib.sha256()

    def log(action: Action, now: float) -> None:
        decisions.update(f"{describe(action, now)}\n".encode())

    with ExitStack() as stack:
        make_scheduler: Callable[[SchedulerConfig], Scheduler] | None = None
        if task.decision_log is not None and scheduler is not None:
            file = stack.enter_context(task.decision_log.open("wb"))
            file.write(Head(scheduler, "simulation").line())
            make_scheduler = partial(RecordedScheduler, record=lambda record: file.write(line_of(record)))
        result = simulate(workload, simulation, scheduler, log, make_scheduler=make_scheduler)
    return {
        "policy": task.policy,
        "rate": task.rate,
        "seed": task.seed,
        **summarise(result.records),
        "preemptions": result.preemptions,
        "steps": result.steps,
        "step_s": result.step_seconds,
        "starved_steps": result.starved_steps,
        "letters": result.letters,
        "engine_queue_s": quantiles(result.engine_queue_seconds, 50, 95),
        "decisions_sha256": None if scheduler is None else decisions.hexdigest(),
    }


def _with_limit(request: ScheduledRequest) -> ScheduledRequest:
    kind = request.request_class
    return replace(request, request_class=replace(kind, ttft_limit_seconds=kind.ttft_seconds))


def summarise_study(study: Study, runs: Sequence[RunFigures]) -> dict[str, dict[str, dict[str, Any]]]:
    """Put the runs side by side: ``{rate: {policy: {"seeds", "median", "spread", "ratio"}}}``.

    The last three have the runs' own form. ``median`` and ``spread`` (least, greatest) go over the seeds; ``ratio`` is
    the median over the seeds of this policy's figure over the first policy's on the same seed, ``None`` where no seed
    has both. Policies without a run, after an early stop, are left out.
    """
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for rate in study.rates:
        rows = {
            policy: {run["seed"]: _figures(run) for run in runs if (run["policy"], run["rate"]) == (policy, rate)}
            for policy in study.policies
        }
        first = rows[study.policies[0]]
        summary[f"{rate:g}"] = {
            policy: {
                "seeds": sorted(of_seed),
                "median": _combine(list(of_seed.values()), _median),
                "spread": _combine(list(of_seed.values()), _spread),
                "ratio": _median_ratio([(figures, first[seed]) for seed, figures in of_seed.items() if seed in first]),
            }
            for policy, of_seed in rows.items()
            if of_seed
        }
    return summary


def _figures(run: RunFigures) -> RunFigures:
    # Errors are counted by whatever reasons occurred; "completed" says what a median can say of them.
    left_out = ("policy", "rate", "seed", "errors", "decisions_sha256")
    return {name: value for name, value in run.items() if name not in left_out}


def _combine(values: Sequence[Any], combine: Callable[[Sequence[Any]], Any]) -> Any:
    """Combine figures of one form leaf by leaf. A class or length bucket that a run lacks is not held against it."""
    if not any(isinstance(value, dict) for value in values):
        return combine(values)
    names = dict.fromkeys(name for value in values for name in value)
    return {name: _combine([value[name] for value in values if name in value], combine) for name in names}


def _median(values: Sequence[float | None]) -> float | None:
    # What never came took for ever.
    return _finite(median(inf if value is None else value for value in values))


def _spread(values: Sequence[float | None]) -> list[float | None]:
    ordered = sorted(inf if value is None else value for value in values)
    return [_finite(ordered[0]), _finite(ordered[-1])]


def _median_ratio(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Return the median of ``value / base`` over pairs, leaf by leaf."""
    if any(isinstance(part, dict) for pair in pairs for part in pair):
        names = dict.fromkeys(name for value, base in pairs for name in value if name in base)
        return {
            name: _median_ratio([(value[name], base[name]) for value, base in pairs if name in value and name in base])
            for name in names
        }
    ratios = [(inf if value is None else value) / base for value, base in pairs if base]
    return _finite(median(ratios)) if ratios else None


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
