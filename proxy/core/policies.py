"""Policies by name: each is a few rules over the one mechanism of queue, gate and placement."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, assert_never

from proxy.core.ordering import first_come_first_served, shortest_prompt_first
from proxy.core.rad import RadConfig

if TYPE_CHECKING:
    from proxy.core.config import SchedulerConfig


class PolicyName(StrEnum):
    """What the proxy may be told to do with the prompts that wait."""

    FCFS = "fcfs"
    SPF = "spf"
    SLAI = "slai"
    RAD = "rad"

    @property
    def summary(self) -> str:
        """What it is, and what it is good for."""
        return _SUMMARIES[self]


_SUMMARIES = {
    PolicyName.FCFS: "order of arrival, held back until an engine can begin the prompt",
    PolicyName.SPF: "the shortest waiting prompt first, and each counts for less the longer it waits",
    PolicyName.SLAI: "as spf, but a prompt waits for a step or an engine whose TBT deadlines it spares, if that helps",
    PolicyName.RAD: "throughput: order of arrival, and engines are kept just full enough; no TBT promise",
}


def configure(policy: PolicyName, base: SchedulerConfig, aging_seconds: float) -> SchedulerConfig:
    """Return ``base`` with the policy's rules.

    Where length counts, that of a waiting prompt halves with every ``aging_seconds``.

    Raises:
        ValueError: the policy does not go together with what ``base`` asks for.
    """
    shortest_first = replace(base, ordering=shortest_prompt_first(aging_seconds))
    in_turn = replace(base, ordering=first_come_first_served())
    match policy:
        case PolicyName.FCFS:
            return in_turn
        case PolicyName.SPF:
            return shortest_first
        case PolicyName.SLAI:
            return replace(shortest_first, gate=replace(base.gate, keep_tbt=True))
        case PolicyName.RAD:
            return replace(in_turn, rad=RadConfig())
        case _:
            assert_never(policy)
