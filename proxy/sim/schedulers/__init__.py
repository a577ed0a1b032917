"""Schedulers inside a simulated engine: each chooses the batch of the next step, and is named after its source.

They share the sequences and the KV cache with the engine, which does the rest: it runs the batch, counts and tells them
when the step is over.
"""

from __future__ import annotations

from enum import StrEnum

from proxy.core.plugin import PluginPolicy
from proxy.sim.schedulers.base import Batch, EngineScheduler, Scheduler
from proxy.sim.schedulers.deadline import DeadlineScheduler
from proxy.sim.schedulers.orca import OrcaScheduler
from proxy.sim.schedulers.plugin import PluginDeadlineScheduler, PluginRadScheduler, PluginSlaiScheduler
from proxy.sim.schedulers.rad import RadScheduler
from proxy.sim.schedulers.sarathi import (
    PayingUsersFirst,
    SarathiScheduler,
    ShortestPromptFirst,
    ShortestRemainingFirst,
)
from proxy.sim.schedulers.slai import (
    SlaiAsPublishedScheduler,
    SlaiFcfsScheduler,
    SlaiFixedScheduler,
    SlaiMendedScheduler,
    SlaiPriorityScheduler,
    SlaiScheduler,
)
from proxy.sim.schedulers.vllm import VllmPriorityScheduler, VllmScheduler

__all__ = ["ENGINE_SCHEDULERS", "Batch", "EngineScheduler", "EngineSchedulerName", "Scheduler", "plugin_of"]


class EngineSchedulerName(StrEnum):
    """Which scheduler an engine has."""

    VLLM = "vllm"
    VLLM_PRIORITY = "vllm-priority"
    SARATHI = "sarathi"
    SARATHI_SPF = "sarathi-spf"
    SARATHI_PRIORITY = "sarathi-priority"
    SRPF = "srpf"
    ORCA = "orca"
    SLAI = "slai"
    SLAI_FIXED = "slai-fixed"
    SLAI_FCFS = "slai-fcfs"
    SLAI_PRIORITY = "slai-priority"
    SLAI_AS_PUBLISHED = "slai-as-published"
    SLAI_MENDED = "slai-mended"
    RAD = "rad"
    DEADLINE = "deadline"
    PLUGIN_DEADLINE = "plugin-deadline"
    PLUGIN_SLAI = "plugin-slai"
    PLUGIN_RAD = "plugin-rad"


ENGINE_SCHEDULERS: dict[EngineSchedulerName, type[EngineScheduler]] = {
    EngineSchedulerName.VLLM: VllmScheduler,
    EngineSchedulerName.VLLM_PRIORITY: VllmPriorityScheduler,
    EngineSchedulerName.SARATHI: SarathiScheduler,
    EngineSchedulerName.SARATHI_SPF: ShortestPromptFirst,
    EngineSchedulerName.SARATHI_PRIORITY: PayingUsersFirst,
    EngineSchedulerName.SRPF: ShortestRemainingFirst,
    EngineSchedulerName.ORCA: OrcaScheduler,
    EngineSchedulerName.SLAI: SlaiScheduler,
    EngineSchedulerName.SLAI_FIXED: SlaiFixedScheduler,
    EngineSchedulerName.SLAI_FCFS: SlaiFcfsScheduler,
    EngineSchedulerName.SLAI_PRIORITY: SlaiPriorityScheduler,
    EngineSchedulerName.SLAI_AS_PUBLISHED: SlaiAsPublishedScheduler,
    EngineSchedulerName.SLAI_MENDED: SlaiMendedScheduler,
    EngineSchedulerName.RAD: RadScheduler,
    EngineSchedulerName.DEADLINE: DeadlineScheduler,
    EngineSchedulerName.PLUGIN_DEADLINE: PluginDeadlineScheduler,
    EngineSchedulerName.PLUGIN_SLAI: PluginSlaiScheduler,
    EngineSchedulerName.PLUGIN_RAD: PluginRadScheduler,
}

_PLUGINS = {
    EngineSchedulerName.PLUGIN_DEADLINE: PluginPolicy.DEADLINE,
    EngineSchedulerName.PLUGIN_SLAI: PluginPolicy.SLAI,
    EngineSchedulerName.PLUGIN_RAD: PluginPolicy.RAD,
}


def plugin_of(scheduler: EngineSchedulerName | type[EngineScheduler]) -> PluginPolicy | None:
    """What an engine with this scheduler would tell of our plugin; ``None``: it has another."""
    return _PLUGINS.get(scheduler) if isinstance(scheduler, EngineSchedulerName) else None
