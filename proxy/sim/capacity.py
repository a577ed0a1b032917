"""Capacity of policies of a study: up to which rate each keeps limits on the median TTFT and on TBT by class.

The rules are those of ``slai-loadgen capacity`` (``search``); but a study knows its own rates only, so its answer is as
wide as they lie apart.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf, log
from typing import TYPE_CHECKING, Any

from proxy.sim.search import Finding, Margin, Trial, outcome_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proxy.sim.study import RunFigures, Study


@dataclass(frozen=True, slots=True)
class Capacity:
    """One policy's, in requests per second; by the means over the seeds."""

    kept_at: float | None
    """The last rate of the study up to which all is kept; ``None``: not even at the first."""
    broken_at: float | None
    """The first rate at which something is not; ``None``: the capacity lies beyond the study."""
    estimate: float | None
    interval: tuple[float, float] | None
    """95 %, from the seeds' differences; ``None`` where there are too few seeds or rates near it."""
    broken: str | None
    """What breaks first: ``TTFT``, or ``TBT`` and the class."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def capacities(study: Study, runs: Sequence[RunFigures], ttft_p50_seconds: float) -> dict[str, Capacity]:
    """Return every policy's capacity; policies without all of their runs, after an early stop, are left out."""
    found: dict[str, Capacity] = {}
    for policy in study.policies:
        own = [run for run in runs if run["policy"] == policy]
        if len(own) < len(study.rates) * len(study.seeds):
            continue
        limited = [dict(_margins(study, run, ttft_p50_seconds)) for run in own]
        # A class that none of whose requests came in some run is not held against any.
        names = [name for name in limited[0] if all(name in margins for margins in limited)]
        trials = [Trial(run["rate"], run["seed"]) for run in own]
        findings = [
            Finding(trial, {name: margins[name] for name in names})
            for trial, margins in zip(trials, limited, strict=True)
        ]
        outcome = outcome_of({finding.trial: finding for finding in findings})
        first = outcome.breaks[0] if outcome.breaks else None
        found[policy] = Capacity(outcome.kept_at, outcome.broken_at, outcome.estimate, outcome.interval, first)
    return found


def _margins(study: Study, run: RunFigures, ttft_p50_seconds: float) -> Iterator[tuple[str, Margin]]:
    """Yield by how much each limit is exceeded; a TTFT of ``None`` never came."""
    yield "TTFT", _margin(run["ttft_s"]["p50"], ttft_p50_seconds)
    for share in study.classes:
        kind = share.request_class
        p99 = run["tbt_s"].get(kind.name, {}).get("p99")
        if kind.tbt_seconds is not None and p99 is not None:
            yield f"TBT {kind.name}", _margin(p99, kind.tbt_seconds)


def _margin(seconds: float | None, limit: float) -> Margin:
    if seconds is None:
        return Margin(None, inf, 0.0)
    return Margin(seconds, log(seconds / limit) if seconds > 0 else -inf, 0.0)
