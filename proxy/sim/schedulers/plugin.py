"""The vLLM plugin in a simulated engine: its very policies (``proxy.core.stepplan``), carried out as vLLM does."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from proxy.core.stepmodel import OnlineStepModel, StepLoad
from proxy.core.stepplan import Deadline, Decode, EngineState, Prompt, Rad, Slai
from proxy.sim.schedulers.base import load_of
from proxy.sim.schedulers.vllm import VllmScheduler

if TYPE_CHECKING:
    from proxy.core.stepplan import StepPlan, StepPolicy
    from proxy.sim.engine import EngineConfig
    from proxy.sim.kvcache import KvCache, Sequence
    from proxy.sim.schedulers.base import Batch

_MEAN_WEIGHT = 0.05
_DEFAULT_TBT_SECONDS = 0.5
_NOTHING_HELD: frozenset[str] = frozenset()


class PluginScheduler(VllmScheduler):
    """vLLM's scheduler, told before each step what ``proxy.vllm_plugin`` tells it.

    It knows what the plugin knows in a real engine: when tokens came, and a step model that it learns on the way. The
    steps that a real engine with asynchronous scheduling composes ahead are composed here with all tokens known.
    """

    def __init__(self, config: EngineConfig, kv: KvCache) -> None:
        super().__init__(config, kv)
        self.clock = 0.0
        """Seconds in steps so far; while anything runs or waits, step follows step."""
        self.model = OnlineStepModel()
        self.policy = self.make_policy(config)
        self._settings = self._budget, self._chunk, self._most_running
        self._held = _NOTHING_HELD
        self._mean_step_seconds = 0.02
        self._arrived_at: dict[str, float] = {}
        self._load = StepLoad(0, 0, 0)

    def make_policy(self, config: EngineConfig) -> StepPolicy:
        raise NotImplementedError

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        sequence.due = self.clock + _tbt(sequence)  # for one whose prompt another engine has done

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._arrived_at.pop(sequence.id, None)

    def choose(self) -> Batch:
        if not (self.running or self._waiting):
            self.admitted = []
            return []
        batch = self._carry_out(self.policy.plan(self._state()))
        if not batch:  # what was planned for found no place, and nobody is to wait for it: vLLM's own step
            batch = super().choose()
        self._load = load_of(batch)
        return batch

    def on_step_end(self, batch: Batch, seconds: float) -> None:
        self.clock += seconds
        self.model.observe(self._load, seconds)
        self._mean_step_seconds += _MEAN_WEIGHT * (seconds - self._mean_step_seconds)
        for sequence, _ in batch:
            sequence.due = self.clock + _tbt(sequence)

    def _carry_out(self, plan: StepPlan) -> Batch:
        if plan.order is not None:
            waiting = {sequence.id: sequence for sequence in self._waiting}
            self._waiting.clear()
            self._waiting.extend(waiting[sequence_id] for sequence_id in plan.order)
        budget, chunk, most_running = self._settings
        self._budget = max(1, min(budget, plan.token_budget))
        self._chunk = plan.chunk_tokens or chunk
        self._most_running = most_running if plan.admits else 0
        self._held = plan.held
        try:
            return super().choose()
        finally:
            self._budget, self._chunk, self._most_running = self._settings
            self._held = _NOTHING_HELD

    def _eligible(self) -> tuple[Sequence, ...]:
        held = self._held
        return tuple(s for s in self.running.values() if s.id not in held) if held else super()._eligible()

    def _put_back(self, sequence: Sequence) -> None:
        super()._put_back(sequence)
        self._arrived_at[sequence.id] = -inf  # it was running already; vLLM puts it first as well

    def _state(self) -> EngineState:
        kv, running = self._kv, self.running.values()
        begun = [s for s in running if not s.decoding]
        reserved = sum(kv.blocks_for(s.known) - s.blocks for s in begun)
        free = kv.free - reserved - self._reserve
        return EngineState(
            self.clock,
            self._budget,
            [Decode(s.id, s.due, s.computed) for s in running if s.decoding],
            [self._prompt(s) for s in begun],
            [self._prompt(s) for s in self._waiting],
            max(0, self._most_running - len(running)),
            max(0, free) * kv.block_size,
            1 - kv.free / kv.blocks,
            self._mean_step_seconds,
        )

    def _prompt(self, sequence: Sequence) -> Prompt:
        arrived_at = self._arrived_at.setdefault(sequence.id, self.clock)
        return Prompt(sequence.id, max(1, sequence.known - sequence.computed), sequence.computed, arrived_at)


class PluginDeadlineScheduler(PluginScheduler):
    """The plugin's ``deadline``."""

    def make_policy(self, config: EngineConfig) -> StepPolicy:
        del config
        return Deadline(self.model)


class PluginSlaiScheduler(PluginScheduler):
    """The plugin's ``slai``."""

    def make_policy(self, config: EngineConfig) -> StepPolicy:
        del config
        return Slai()


class PluginRadScheduler(PluginScheduler):
    """The plugin's ``rad``; a tile is the token budget, and the other one the most sequences."""

    def make_policy(self, config: EngineConfig) -> StepPolicy:
        return Rad(config.token_budget, config.max_num_seqs)


def _tbt(sequence: Sequence) -> float:
    return _DEFAULT_TBT_SECONDS if sequence.tbt_seconds is None else sequence.tbt_seconds
