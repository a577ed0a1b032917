"""The load of a search for a capacity: the same requests at any rate, drawn so that seeds differ little."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loadgen.arrivals import Rate
from loadgen.planning import plan
from loadgen.schedule import quantised

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.planning import Demand
    from loadgen.traces import RowTrace
    from proxy.sim.workload import ScheduledRequest


@dataclass(frozen=True, slots=True)
class SearchedLoad:
    """All but the rate and the seed. It may go to another process."""

    trace: RowTrace
    demand: Demand
    even: bool = True
    """Whether each draw has the trace's lengths in equal parts and exactly the asked rate; see ``at_exact_rate``."""

    def draw(self, rate: float, seed: int) -> Sequence[ScheduledRequest]:
        """Draw the requests.

        Raises:
            PlanError: as from ``plan``.
        """
        demand = replace(self.demand, rate=Rate.constant(rate), seed=seed)
        if not self.even:
            return plan(self.trace, demand).schedule.requests
        return at_exact_rate(plan(evenly(self.trace, demand.requests or 1, seed), demand).schedule.requests, rate)


def evenly(trace: RowTrace, requests: int, seed: int) -> RowTrace:
    """Draw as many rows as there are requests so that every part of the trace has its share: stratified sampling.

    By prompt length the trace is cut into ``requests`` equal parts, and one row is drawn of each. The mean length of
    1,500 rows drawn freely differs by two percent from seed to seed, and with it the work that a rate stands for. A
    trace whose rows share text is left as it is, since there the order says who was first.
    """
    if any(row.blocks for row in trace.rows):
        return trace
    rng = random.Random(f"{seed}:even")
    ordered = sorted(trace.rows, key=lambda row: row.prompt_tokens)
    parts = [(number + rng.random()) / requests for number in range(requests)]
    return replace(trace, rows=tuple(ordered[min(len(ordered) - 1, int(at * len(ordered)))] for at in parts))


def at_exact_rate(workload: Sequence[ScheduledRequest], rate: float) -> list[ScheduledRequest]:
    """Stretch the times of ``workload`` so that its ``n`` requests take exactly ``n / rate`` seconds.

    ``n`` Poisson arrivals come at a rate that differs by ``1 / sqrt(n)`` from the asked one, which is noise of the draw
    and says nothing of the server. For searching a capacity; a run that shows what users would see is not stretched.
    """
    last = workload[-1].at_seconds if workload else 0.0
    if not last:
        return list(workload)
    factor = len(workload) / rate / last
    return [replace(request, at_seconds=quantised(request.at_seconds * factor)) for request in workload]
