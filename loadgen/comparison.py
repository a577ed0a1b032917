"""Two or more sides under the same requests: the order of their runs, and differences with intervals.

What two runs of one schedule have in common (who came when, with how long a prompt) cancels out if the figures are
compared request by request: each draw of the bootstrap takes the same requests on both sides. Sides take turns, round
by round and in another order each time, so that what changes on the machine meanwhile meets all of them.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from loadgen.curves import cdf
from loadgen.intervals import PooledQuantile, bootstrap
from loadgen.metrics import json_number, measure
from loadgen.sample import Sample
from proxy.sim.records import summarise

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from loadgen.intervals import Weights
    from proxy.sim.records import RequestRecord
    from proxy.sim.workload import ScheduledRequest

Records: TypeAlias = "Sequence[RequestRecord]"
Serve: TypeAlias = "Callable[[Sequence[ScheduledRequest]], Awaitable[Records]]"
Round: TypeAlias = "Mapping[str, Records]"
"""The records of each side, by its name."""


def order_of(names: Sequence[str], number: int) -> list[str]:
    """Return who comes first in a round: each side once in every place over as many rounds as there are sides."""
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


async def run_rounds(
    sides: Mapping[str, Serve],
    rounds: Sequence[Sequence[ScheduledRequest]],
    *,
    stop: asyncio.Event,
    on_run: Callable[[int, str], None] = lambda _number, _side: None,
) -> list[dict[str, Records]]:
    """Let every side serve the requests of each round in turn; once ``stop`` is set the last round may be incomplete.

    ``on_run`` is told before each run.
    """
    done: list[dict[str, Records]] = []
    for number, workload in enumerate(rounds):
        done.append({})
        for name in order_of(list(sides), number):
            on_run(number, name)
            done[-1][name] = await sides[name](workload)
            if stop.is_set():
                return done
    return done


def compare_rounds(rounds: Sequence[Round], names: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """Compare all sides with the first, over the rounds that are complete.

    Returns ``sides``, the figures of each; ``ratios``, for each other side by figure ``value`` (its figure over the
    first side's; of shares the difference), ``interval`` (95 %) and ``rounds`` (the same of each round alone); and
    ``curves``.
    """
    pooled = {name: _in_order(rounds, name) for name in names}
    samples = {name: Sample.of(records) for name, records in pooled.items()}
    per_round = [{name: Sample.of(_in_order([one], name)) for name in names} for one in rounds]
    base = names[0]
    return {
        "base": base,
        "sides": {name: _figures(pooled[name], [one[name] for one in rounds]) for name in names},
        "ratios": {
            name: {
                label: {
                    **_difference(samples[base], samples[name], label, seed),
                    "rounds": [json_number(_point(one[base], one[name], label)) for one in per_round],
                }
                for label in _labels(samples[base])
            }
            for name in names[1:]
        },
        "curves": {
            "ttft_cdf": {name: cdf(sample.ttft) for name, sample in samples.items()},
            "tbt_cdf": {name: cdf(sample.gaps) for name, sample in samples.items()},
        },
    }


def _in_order(rounds: Sequence[Round], name: str) -> list[RequestRecord]:
    """The records of one side, so that those of two sides correspond."""
    return [r for one in rounds for r in sorted(one[name], key=lambda r: r.request.index)]


def _figures(pooled: Records, rounds: Sequence[Records]) -> dict[str, Any]:
    """The figures of one side: of all its requests, and rates as means over the rounds."""
    measured = measure(pooled)
    each = [summarise(records) for records in rounds]
    rates = {
        key: fmean(known) if (known := [one[key] for one in each if one[key] is not None]) else None
        for key in ("completed_per_s", "tokens_per_s", "attained_per_s")
    }
    kept = ("errors", "schedule_delay_s", "by_class")
    return {**measured["all"], **{key: measured[key] for key in kept}, **rates}


def _labels(sample: Sample) -> list[str]:
    classes = [str(name) for name in np.unique(sample.classes)]
    of_class = (
        [f"{figure} {name}" for name in classes for figure in ("TBT p99", "attainment")] if len(classes) > 1 else []
    )
    return ["TTFT p50", "TTFT p90", "TTFT p99", "TBT p50", "TBT p99", "end-to-end p50", "attainment", *of_class]


def _statistic(sample: Sample, label: str) -> Callable[[Weights], float]:
    figure, _, name = label.replace("end-to-end", "e2e").partition(" ")
    percent, _, group = name.partition(" ") if figure != "attainment" else ("", "", name)
    chosen = sample.classes == group if group else np.ones(len(sample), dtype=bool)
    if figure == "attainment":
        attained = (sample.attained & chosen).astype(float)
        return lambda weights: float(weights @ attained) / max(1, int(weights @ chosen))
    if figure == "TBT":
        kept = chosen[sample.owners]
        values, owners = sample.gaps[kept], sample.owners[kept]
    else:
        values = (sample.ttft if figure == "TTFT" else sample.e2e)[chosen]
        owners = np.flatnonzero(chosen)
    return PooledQuantile(values, owners, len(sample), int(percent[1:]) / 100)


def is_share(label: str) -> bool:
    """Whether a figure is compared by its difference."""
    return label.startswith("attainment")


def _point(base: Sample, other: Sample, label: str) -> float:
    everybody = np.ones(len(base), dtype=np.int64)
    return _relation(_statistic(base, label)(everybody), _statistic(other, label)(everybody), label)


def _relation(first: float, second: float, label: str) -> float:
    if is_share(label):
        return second - first
    # Of two figures that never came neither is the larger.
    return second / first if first > 0 and np.isfinite(first) else float("nan")


def _difference(base: Sample, other: Sample, label: str, seed: int) -> dict[str, Any]:
    ours, theirs = _statistic(base, label), _statistic(other, label)
    found = bootstrap(lambda weights: _relation(ours(weights), theirs(weights), label), len(base), seed)
    return {
        "value": json_number(_point(base, other, label)),
        "interval": None if found is None else [json_number(found.low), json_number(found.high)],
    }
