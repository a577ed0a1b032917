"""Figures of runs, put side by side."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from proxy.sim.capacity import capacities
from proxy.sim.paper.plan import POLICIES, TTFT_P50_SECONDS
from proxy.sim.study import Study
from proxy.sim.workload import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    Runs = Sequence[dict[str, Any]]

_LABELS = {
    "sarathi": "Sarathi-Serve, FCFS",
    "sarathi-spf": "Sarathi-Serve, SPF",
    "slai-fcfs": "SLAI, FCFS, fixed offset",
    "slai-fixed": "SLAI, SPF, fixed offset",
    "slai-engine": "SLAI, SPF, dynamic offset",
    "slai-priority": "SLAI, paying users first",
    "slai-as-published": "SLAI, with all quirks",
    "gate": "ours: gate (proxy)",
    "tiles": "ours: tiles (proxy)",
    "deadline": "ours: deadline (in the engine)",
    "rad-engine": "RAD",
    "fcfs": "vLLM, FCFS",
}


def label(policy: str) -> str:
    return _LABELS.get(policy, policy)


def of_paper(runs: Runs, arrivals: str = "poisson") -> list[dict[str, Any]]:
    """Those of the paper's evaluation."""
    return [run for run in runs if not run["key"].startswith(("bound ", "fresh ")) and run["arrivals"] == arrivals]


def ttft(runs: Runs, policy: str, rate: float, percentile: str = "p50", arrivals: str = "poisson") -> list[float]:
    """By seed."""
    found = [r for r in of_paper(runs, arrivals) if (r["policy"], r["rate"]) == (policy, rate)]
    values = [r["ttft_s"][percentile] for r in sorted(found, key=lambda r: r["seed"])]
    return [inf if value is None else value for value in values]


def capacities_by_seed(
    runs: Runs, arrivals: str = "poisson", *, as_the_paper: bool = False
) -> dict[str, dict[int, float]]:
    """Up to which rate each policy keeps the limits, by seed.

    Where it lies beyond the rates, it is the highest of them (see ``beyond``), where below them, it is left out.
    """
    needed = ("policy", "rate", "seed", "ttft_s", "tbt_s", "paper")
    chosen = [{name: run[name] for name in needed} for run in of_paper(runs, arrivals)]
    if as_the_paper:
        chosen = [run | {"ttft_s": run["paper"]["ttft_s"], "tbt_s": run["paper"]["tbt_s"]} for run in chosen]
    for run in chosen:
        del run["paper"]
    rates = tuple(sorted({run["rate"] for run in chosen}))
    found: dict[str, dict[int, float]] = {}
    for seed in sorted({run["seed"] for run in chosen}):
        of_seed = [run for run in chosen if run["seed"] == seed]
        names = tuple(p for p in POLICIES if sum(run["policy"] == p for run in of_seed) == len(rates))
        if not names:
            continue
        study = Study(Trace("", (), 0), names, rates, (seed,), 0)
        for policy, capacity in capacities(study, of_seed, TTFT_P50_SECONDS).items():
            rate = capacity.kept_at if capacity.estimate is None else capacity.estimate
            if rate is not None:
                found.setdefault(policy, {})[seed] = rate
    return found
