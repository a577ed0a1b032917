"""The load that a command line asks for: drawn once, before anything is sent."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proxy.sim.workload import PAPER_CLASSES, ClassShare, ScheduledRequest, Trace, draw_workload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Load:
    """All but the rate and the seed."""

    trace: Trace
    requests: int
    classes: tuple[ClassShare, ...] = PAPER_CLASSES
    tenants: Mapping[str, float] | None = None
    scale_lengths: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    even: bool = False
    """Whether each draw has the trace's lengths in equal parts and exactly the asked rate; see ``at_exact_rate``."""

    def __post_init__(self) -> None:
        if len({c.request_class.name for c in self.classes}) < len(self.classes):
            raise ValueError("--class: two classes have the same name")

    def draw(self, rate: float, seed: int) -> list[ScheduledRequest]:
        """Draw the requests.

        Raises:
            ValueError: as from ``draw_workload``.
        """
        return [self._clip(self._scale(request)) for request in self._drawn(rate, seed)]

    def clipped(self, rate: float, seed: int) -> int:
        """Return how many requests of a draw had a length over the limit."""
        scaled = list(map(self._scale, self._drawn(rate, seed)))
        return sum(self._clip(request) != request for request in scaled)

    def _drawn(self, rate: float, seed: int) -> Sequence[ScheduledRequest]:
        trace = evenly(self.trace, self.requests, seed) if self.even else self.trace
        drawn = draw_workload(
            trace, rate=rate, requests=self.requests, seed=seed, classes=self.classes, tenants=self.tenants
        )
        return at_exact_rate(drawn, rate) if self.even else drawn

    def _scale(self, request: ScheduledRequest) -> ScheduledRequest:
        if self.scale_lengths == 1:
            return request
        return replace(
            request,
            prompt_tokens=max(1, round(request.prompt_tokens * self.scale_lengths)),
            output_tokens=max(1, round(request.output_tokens * self.scale_lengths)),
        )

    def _clip(self, request: ScheduledRequest) -> ScheduledRequest:
        if not self.max_prompt_tokens and not self.max_output_tokens:
            return request
        return replace(
            request,
            prompt_tokens=min(request.prompt_tokens, self.max_prompt_tokens or request.prompt_tokens),
            output_tokens=min(request.output_tokens, self.max_output_tokens or request.output_tokens),
        )


def evenly(trace: Trace, requests: int, seed: int) -> Trace:
    """Draw as many rows as there are requests so that every part of the trace has its share: stratified sampling.

    By prompt length the trace is cut into ``requests`` equal parts, and one row is drawn of each. The mean length of
    1,500 rows drawn freely differs by two percent from seed to seed, and with it the work that a rate stands for.
    """
    rng = random.Random(f"{seed}:even")
    ordered = sorted(trace.lengths, key=lambda size: size.prompt_tokens)
    parts = [(number + rng.random()) / requests for number in range(requests)]
    return replace(trace, lengths=tuple(ordered[min(len(ordered) - 1, int(at * len(ordered)))] for at in parts))


def at_exact_rate(workload: Sequence[ScheduledRequest], rate: float) -> list[ScheduledRequest]:
    """Stretch the times of ``workload`` so that its ``n`` requests take exactly ``n / rate`` seconds.

    ``n`` Poisson arrivals come at a rate that differs by ``1 / sqrt(n)`` from the asked one, which is noise of the draw
    and says nothing of the server. For searching a capacity; a run that shows what users would see is not stretched.
    """
    last = workload[-1].at_seconds if workload else 0.0
    if not last:
        return list(workload)
    factor = len(workload) / rate / last
    return [replace(request, at_seconds=request.at_seconds * factor) for request in workload]
