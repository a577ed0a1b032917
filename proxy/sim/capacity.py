"""Capacity: up to which rate a policy keeps a limit on the median TTFT and every class's TBT deadline.

A study knows its own rates only, so the answer is an interval: the last rate at which all is kept, and the first at
which something is not. The estimate within it is drawn by a straight line between the two, which is a guess.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proxy.sim.study import Study


@dataclass(frozen=True, slots=True)
class Capacity:
    """One policy's, in requests per second; by the medians over the seeds."""

    kept_at: float | None
    """The last rate of the study up to which all is kept; ``None``: not even at the first."""
    broken_at: float | None
    """The first rate at which something is not; ``None``: the capacity lies beyond the study."""
    estimate: float | None
    broken: str | None
    """What breaks first: ``TTFT``, or ``TBT`` and the class."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def capacities(
    study: Study, summary: Mapping[str, Mapping[str, Mapping[str, Any]]], ttft_p50_seconds: float
) -> dict[str, Capacity]:
    """Return every policy's capacity; policies that were not run at all rates, after an early stop, are left out."""
    found: dict[str, Capacity] = {}
    for policy in study.policies:
        rows = [(rate, summary[f"{rate:g}"].get(policy)) for rate in sorted(study.rates)]
        loads = [(rate, dict(_loads(study, row["median"], ttft_p50_seconds))) for rate, row in rows if row is not None]
        if len(loads) == len(rows):
            found[policy] = _capacity(loads)
    return found


def _loads(study: Study, figures: Mapping[str, Any], ttft_p50_seconds: float) -> Iterator[tuple[str, float | None]]:
    """Yield figure over limit for all that is limited; up to one, the limit is kept. ``None``: it never came."""
    ttft = figures["ttft_s"]["p50"]
    yield "TTFT", None if ttft is None else ttft / ttft_p50_seconds
    for share in study.classes:
        kind = share.request_class
        p99 = figures["tbt_s"].get(kind.name, {}).get("p99")
        if kind.tbt_seconds is not None and p99 is not None:
            yield f"TBT {kind.name}", p99 / kind.tbt_seconds


def _capacity(loads: list[tuple[float, dict[str, float | None]]]) -> Capacity:
    def broken(limits: Mapping[str, float | None]) -> list[str]:
        return [name for name, load in limits.items() if load is None or load > 1]

    first, at_first = loads[0]
    if names := broken(at_first):
        return Capacity(None, first, None, names[0])
    for (rate, kept), (next_rate, limits) in pairwise(loads):
        if not (names := broken(limits)):
            continue
        crossings = [(_crossing(rate, kept.get(name), next_rate, limits[name]), name) for name in names]
        estimate, name = min(crossings)
        return Capacity(rate, next_rate, estimate, name)
    return Capacity(loads[-1][0], None, None, None)


def _crossing(rate: float, load: float | None, next_rate: float, next_load: float | None) -> float:
    """Where the straight line between two rates' loads crosses one; the first rate if it has no other end."""
    if load is None or next_load is None:
        return rate
    return rate + (next_rate - rate) * (1 - load) / (next_load - load)
