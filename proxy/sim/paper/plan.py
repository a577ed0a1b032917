"""What is simulated: the paper's users on its GPU, policies at rates on seeds; and policies against the bound."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np

from proxy.sim.bound import Limits, Needs, bound
from proxy.sim.engine import EngineConfig
from proxy.sim.policies import PolicyOptions, find_policy
from proxy.sim.profiles import PROFILES
from proxy.sim.records import quantiles, summarise
from proxy.sim.simulator import SimulationConfig, simulate
from proxy.sim.workload import Lengths, Trace, draw_workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proxy.sim.records import RequestRecord
    from proxy.sim.workload import ScheduledRequest

BASELINE = "sarathi"
POLICIES = (
    BASELINE,
    "sarathi-spf",
    "slai-fcfs",
    "slai-fixed",
    "slai-engine",
    "slai-priority",
    "slai-as-published",
    "gate",
    "tiles",
    "deadline",
    "rad-engine",
)
MEASURED_AS_THE_PAPER_DOES = (BASELINE, "sarathi-spf", "slai-engine")
"""Run with its arrivals, too."""
BOUND_POLICIES = ("fcfs", "sarathi-spf", "gate", "tiles", "slai-engine", "deadline", "rad-engine")
BOUND_PROFILES = ("rtx6000ada", "a100", "h100")
FRESH_POLICIES = (BASELINE, "slai-engine", "deadline")
"""Run on seeds that no default was chosen on, too."""
FRESH_RATE = 1.7
TTFT_P50_SECONDS = 0.5
_TIME_LIMIT_SECONDS = 2100.0
"""After which the paper's benchmark stops; requests that are not done then are left out of its figures."""
_TBT_POINTS = 200


@dataclass(frozen=True, slots=True)
class Size:
    """How much is simulated."""

    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    requests: int
    bound_requests: int
    fresh_seeds: tuple[int, ...] = ()


FULL = Size((1.0, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8), (1, 2, 3), 1200, 600, (11, 12, 13))
QUICK = Size((1.2, 1.4, 1.5, 1.6, 1.7), (1,), 1200, 600)
"""All of it is part of the full size: nothing is simulated twice."""


@dataclass(frozen=True, slots=True)
class Task:
    """One simulation; its ``key`` says all that its figures depend on, but for the version of the simulator."""

    key: str
    policy: str
    trace: Trace
    rate: float
    seed: int
    requests: int
    arrivals: str
    """``poisson``; ``capped``, as the paper draws them; or ``bursty``."""
    profile: str = "rtx6000ada"


def tasks(size: Size, trace: Trace, azure: Trace | None) -> Iterator[Task]:
    """Yield all simulations, policies within seeds within rates, so that an early stop leaves whole comparisons."""
    for seed in size.seeds:
        for rate in size.rates:
            for policy in POLICIES:
                yield _paper_task(trace, policy, rate, seed, size)
            for policy in MEASURED_AS_THE_PAPER_DOES:
                yield _paper_task(trace, policy, rate, seed, size, arrivals="capped")
    for profile in BOUND_PROFILES:
        for name, lengths in workloads(trace, azure).items():
            for policy in BOUND_POLICIES:
                arrivals = "bursty" if name == "bursty" else "poisson"
                rate = round(1.15 * bound_of(lengths, profile, policy)[0], 3)
                key = f"bound {profile} {name} {lengths.name} {policy} {rate} {size.bound_requests}"
                yield Task(key, policy, lengths, rate, 1, size.bound_requests, arrivals, profile)
    for seed in size.fresh_seeds:
        for policy in FRESH_POLICIES:
            key = f"fresh {trace.name} {policy} {FRESH_RATE} {seed} {size.requests}"
            yield Task(key, policy, trace, FRESH_RATE, seed, size.requests, "poisson")


def _paper_task(trace: Trace, policy: str, rate: float, seed: int, size: Size, *, arrivals: str = "poisson") -> Task:
    key = f"{trace.name} {arrivals} {policy} {rate} {seed} {size.requests}"
    return Task(key, policy, trace, rate, seed, size.requests, arrivals)


def workloads(trace: Trace, azure: Trace | None) -> dict[str, Trace]:
    """The kinds of traffic for which the bound is told."""
    return {
        "ShareGPT": trace,
        "Azure conversation": azure or _lognormal("azure-like", (1020, 0.9, 14_000), (129, 1.0, 1000)),
        "long prompts": _lognormal("long-prompts", (6000, 0.4, 16_000), (150, 0.6, 600)),
        "long answers": _lognormal("long-answers", (200, 0.6, 1000), (800, 0.4, 2000)),
        "bursty": trace,
    }


def bound_of(trace: Trace, profile: str, policy: str) -> tuple[float, str]:
    """The bound of an engine as a policy has it, and what binds."""
    config = find_policy(policy).simulation(_simulation(profile), 1).engine
    found = bound(config.profile.step, Limits.of(config), Needs.of(trace.lengths))
    return found.requests_per_second, found.binds


def _simulation(profile: str) -> SimulationConfig:
    budget, seqs = (512, 128) if profile == "rtx6000ada" else (2048, 256)
    return SimulationConfig(EngineConfig(PROFILES[profile], budget, seqs))


def _lognormal(name: str, prompt: tuple[float, float, int], output: tuple[float, float, int]) -> Trace:
    rng = random.Random(name)

    def draw(median: float, sigma: float, most: int) -> int:
        return max(2, min(most, round(median * exp(rng.gauss(0, sigma)))))

    lengths = tuple(Lengths(draw(*prompt), draw(*output)) for _ in range(5000))
    return Trace(name, lengths, len(lengths))


def perform(task: Task) -> dict[str, Any]:
    """Simulate and return the figures, by correct definitions and by the paper's."""
    drawn = draw_workload(task.trace, rate=task.rate, requests=task.requests, seed=task.seed)
    requests = _with_arrivals(drawn, task)
    policy = find_policy(task.policy)
    config = policy.simulation(_simulation(task.profile), task.seed)
    result = simulate(requests, config, policy.scheduler(PolicyOptions()))
    by_class: dict[str, list[RequestRecord]] = {}
    for record in result.records:
        by_class.setdefault(record.request.request_class.name, []).append(record)
    found = {
        "key": task.key,
        "policy": task.policy,
        "rate": task.rate,
        "seed": task.seed,
        "arrivals": task.arrivals,
        "profile": task.profile,
        "trace": task.trace.name,
        **summarise(result.records),
        "preemptions": result.preemptions,
        "steps": result.steps,
        "paper": _as_the_paper_counts(result.records),
        "tbt_quantiles": {name: _tbt_quantiles(records) for name, records in sorted(by_class.items())},
    }
    return found | {"errors": None}


def _with_arrivals(requests: Sequence[ScheduledRequest], task: Task) -> list[ScheduledRequest]:
    if task.arrivals == "poisson":
        return list(requests)
    if task.arrivals == "capped":  # its generator takes no gap longer than three times the mean
        gaps = [min(b.at_seconds - a.at_seconds, 3 / task.rate) for a, b in pairwise(requests)]
    else:
        rng, shape = random.Random(f"{task.seed}:gaps"), 1 / 9  # coefficient of variation: 3
        gaps = [rng.gammavariate(shape, 1 / (shape * task.rate)) for _ in requests[1:]]
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    return [replace(request, at_seconds=float(at)) for request, at in zip(requests, times, strict=True)]


def _as_the_paper_counts(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Its definitions: the gap after the first token does not count, two zeros per request do; survivors only."""
    began = min(r.request.at_seconds for r in records)
    done = [r for r in records if r.completed and (r.finished_at or 0.0) - began <= _TIME_LIMIT_SECONDS]
    by_class: dict[str, list[float]] = {}
    for record in done:
        by_class.setdefault(record.request.request_class.name, []).extend((0.0, 0.0, *record.gaps[1:]))
    return {
        "requests": len(done),
        "ttft_s": quantiles((r.ttft_seconds or 0.0 for r in done), 50, 99),
        "tbt_s": {name: quantiles(gaps, 99) for name, gaps in sorted(by_class.items())},
    }


def _tbt_quantiles(records: Sequence[RequestRecord]) -> list[float]:
    gaps = np.fromiter((g for r in records for g in r.gaps), dtype=float)
    return [round(float(v), 5) for v in np.percentile(gaps, np.linspace(0, 100, _TBT_POINTS + 1))] if gaps.size else []
