"""Policies that a simulation can compare, by name. Each is a way to run the proxy, or to do without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
from proxy.core.ordering import first_come_first_served, shortest_prompt_first
from proxy.core.tiles import TileConfig

if TYPE_CHECKING:
    from collections.abc import Callable


_GATE = GateConfig()


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What can be turned on a policy; one that has no use for an option ignores it."""

    backlog_factor: float = _GATE.backlog_factor
    aging_seconds: float = 10.0
    """A waiting prompt counts half as long with every such time."""
    feedback_seconds: float = _GATE.feedback_seconds

    def gate(self) -> GateConfig:
        return GateConfig(backlog_factor=self.backlog_factor, feedback_seconds=self.feedback_seconds)


@dataclass(frozen=True, slots=True)
class Policy:
    """A named policy. ``scheduler`` makes the proxy's settings; ``None`` from it means that there is no proxy."""

    name: str
    summary: str
    scheduler: Callable[[PolicyOptions], SchedulerConfig | None]
    token_budget: int | None = None
    """Token budget of the engines where the policy wants another than the rest of the study has."""


_TILES_BUDGET = 8192
"""More than any tile: the proxy sizes the steps, not the engine."""

POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fcfs", "no proxy: straight to the engines, in turn if there are several", lambda _: None),
        Policy(
            "gate",
            "the proxy: the shortest waiting prompt first, and each counts for less the longer it waits",
            lambda o: SchedulerConfig(ordering=shortest_prompt_first(o.aging_seconds), gate=o.gate()),
        ),
        Policy(
            "tiles",
            f"the proxy sends prompts ahead in tiles, one per step (engine budget {_TILES_BUDGET}; experimental)",
            lambda o: SchedulerConfig(
                ordering=shortest_prompt_first(o.aging_seconds), gate=o.gate(), tiles=TileConfig()
            ),
            _TILES_BUDGET,
        ),
        Policy(
            "fcfs-large",
            f"no proxy over engines as tiles has them (budget {_TILES_BUDGET}): what such steps do to streams",
            lambda _: None,
            _TILES_BUDGET,
        ),
        Policy(
            "gate-fcfs",
            "the proxy in order of arrival: shows what holding prompts back costs by itself",
            lambda o: SchedulerConfig(ordering=first_come_first_served(), gate=o.gate()),
        ),
    )
}


def find_policy(name: str) -> Policy:
    """Return the policy of that name.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}") from None
