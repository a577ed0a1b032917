"""Policies that a simulation can compare, by name. Each is a way to run the proxy, or to do without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.admission import GateConfig
from proxy.core.ordering import first_come_first_served, shortest_prompt_first
from proxy.core.scheduler import SchedulerConfig

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
