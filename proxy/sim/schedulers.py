"""Schedulers inside a simulated engine: each chooses the batch of the next step, and is named after its source.

They share the sequences and the KV cache with the engine, which does the rest: it runs the batch, counts and tells them
when the step is over.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from sortedcontainers import SortedKeyList

if TYPE_CHECKING:
    from proxy.sim.engine import EngineConfig
    from proxy.sim.kvcache import KvCache, Sequence

Batch = list[tuple["Sequence", int]]
"""Sequences of a step, each with how many of its tokens the step works on."""


class EngineSchedulerName(StrEnum):
    """Which scheduler an engine has."""

    VLLM = "vllm"
    SLAI = "slai"


class EngineScheduler(Protocol):
    """Chooses batches; a sequence is waiting or running from ``add`` to ``remove``."""

    running: dict[str, Sequence]
    """Those that hold KV cache, by id."""
    preemptions: int
    admitted: list[str]
    """Sequences that the last choice took in from the queue, first come first."""

    def add(self, sequence: Sequence) -> None: ...

    def remove(self, sequence: Sequence) -> None: ...

    def choose(self) -> Batch: ...

    def on_step_end(self, batch: Batch, seconds: float) -> None: ...


class VllmScheduler:
    """vLLM V1: decodes and begun prompts in the order of their admission, then new prompts, first come first served.

    A sequence that finds no free block preempts the youngest running one, which starts over (recompute).
    """

    def __init__(self, config: EngineConfig, kv: KvCache) -> None:
        self.running: dict[str, Sequence] = {}  # in order of admission
        self.preemptions = 0
        self.admitted: list[str] = []
        self._config = config
        self._kv = kv
        self._reserve = int(config.watermark * config.blocks)
        self._waiting: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        if self.running.pop(sequence.id, None) is None:
            self._waiting.remove(sequence)

    def choose(self) -> Batch:
        running, kv, block_size = self.running, self._kv, self._kv.block_size
        budget = self._config.token_budget
        batch: Batch = []
        preempted = False
        for sequence in tuple(running.values()):
            if not budget:
                break
            if preempted and sequence.id not in running:  # by one before it
                continue
            computed = sequence.computed
            tokens = 1 if sequence.decoding else min(sequence.known - computed, budget)
            need = -(-(computed + tokens) // block_size) - sequence.blocks
            if need:
                while need > kv.free and sequence.id in running:
                    self._preempt_youngest()
                    preempted = True
                if preempted and sequence.id not in running:
                    break  # it was the youngest itself: nothing behind it is left
                kv.give(sequence, need, computed + tokens)
            budget -= tokens
            batch.append((sequence, tokens))
        self.admitted = self._admit(batch, budget) if budget and not preempted else []
        return batch

    def on_step_end(self, batch: Batch, seconds: float) -> None:
        """Nothing to note: vLLM knows no time."""

    def _admit(self, batch: Batch, budget: int) -> list[str]:
        """Take in waiting prompts; add their first chunks to ``batch`` and return their ids."""
        running, kv = self.running, self._kv
        admitted: list[str] = []
        filling: dict[str, int] = {}  # tokens that sequences of this step will have cached, by content
        while budget and self._waiting and len(running) < self._config.max_num_seqs:
            sequence = self._waiting[0]
            # The whole prompt must fit before its first chunk is taken in (vLLM's scheduler_reserve_full_isl).
            if kv.blocks_for(sequence.known) > kv.free - (self._reserve if running else 0):
                break
            self._waiting.popleft()
            running[sequence.id] = sequence
            admitted.append(sequence.id)
            shared = filling.get(sequence.content or "", 0)
            if sequence.common < sequence.prompt_tokens:  # what running sequences have computed of it is found too
                same = (s.computed for s in running.values() if s.content == sequence.content)
                shared = max(shared, *same)
            kv.give_cached(sequence, shared)
            tokens = min(sequence.known - sequence.computed, budget)
            upto = sequence.computed + tokens
            kv.give(sequence, kv.blocks_for(upto) - sequence.blocks, upto)
            budget -= tokens
            batch.append((sequence, tokens))
            if sequence.content is not None:
                filling[sequence.content] = upto
        return admitted

    def _preempt_youngest(self) -> None:
        _, sequence = self.running.popitem()
        _start_over(sequence, self._kv)
        self._waiting.appendleft(sequence)
        self.preemptions += 1


class SlaiScheduler:
    """The SLAI paper's scheduler inside the engine, as its published code has it.

    A decode may wait until its last schedulable time, ``end of its last step + TBT - offset * mean step``, and is
    critical from then on. A step takes critical decodes, prompts half-way, new prompts (the shortest first, without
    aging) and, in what is left of the budget, the other decodes. The offset is larger when the KV cache is nearly full:
    decodes then run more often and end sooner. As in the code, a last schedulable time stays what it was when it was
    set, the mean goes over all steps ever, and a prompt takes all its blocks at once, with no prefix cache.
    """

    _OFFSETS = 5, 10
    _NEARLY_FULL = 0.96
    _DEFAULT_TBT_SECONDS = 0.2

    def __init__(self, config: EngineConfig, kv: KvCache) -> None:
        self.running: dict[str, Sequence] = {}
        self.preemptions = 0
        self.admitted: list[str] = []
        self._config = config
        self._kv = kv
        self._reserve = int(config.watermark * config.blocks)
        self._waiting: SortedKeyList[Sequence] = SortedKeyList(key=lambda s: s.prompt_tokens)
        self._prefills: dict[str, Sequence] = {}  # half-way, in order of admission
        self._last_schedulable: dict[str, float] = {}  # of decodes
        self._busy_seconds = 0.0  # the clock: while there are decodes, step follows step
        self._steps = 0

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        if self.running.pop(sequence.id, None) is None:
            self._waiting.remove(sequence)
        self._prefills.pop(sequence.id, None)
        self._last_schedulable.pop(sequence.id, None)

    def choose(self) -> Batch:
        batch: Batch = []
        budget = self._config.token_budget
        decodes = sorted(self._last_schedulable.items(), key=lambda item: item[1])
        critical = sum(time <= self._busy_seconds for _, time in decodes)
        for sequence_id, _ in decodes[:critical]:
            budget -= self._decode(sequence_id, batch, budget, may_preempt=True)
        for sequence in self._prefills.values():
            budget -= self._prefill(sequence, batch, budget)
        budget = self._admit(batch, budget)
        for sequence_id, _ in decodes[critical:]:
            budget -= self._decode(sequence_id, batch, budget, may_preempt=not batch)
        return batch

    def on_step_end(self, batch: Batch, seconds: float) -> None:
        self._busy_seconds += seconds
        self._steps += 1
        kv = self._kv
        nearly_full = kv.blocks - kv.free >= self._NEARLY_FULL * kv.blocks
        early = self._OFFSETS[nearly_full] * self._busy_seconds / self._steps
        for sequence, _ in batch:
            if sequence.alive and sequence.decoding:
                self._prefills.pop(sequence.id, None)
                tbt = self._DEFAULT_TBT_SECONDS if sequence.tbt_seconds is None else sequence.tbt_seconds
                self._last_schedulable[sequence.id] = self._busy_seconds + tbt - early

    def _decode(self, sequence_id: str, batch: Batch, budget: int, *, may_preempt: bool) -> int:
        sequence, kv = self.running[sequence_id], self._kv
        if not budget:
            return 0
        need = kv.blocks_for(sequence.computed + 1) - sequence.blocks
        while need > kv.free and may_preempt and sequence_id in self.running:
            self._preempt(next(reversed(self._prefills.values()), sequence))
        if need > kv.free or sequence_id not in self.running:
            return 0
        kv.give(sequence, need)
        batch.append((sequence, 1))
        return 1

    def _prefill(self, sequence: Sequence, batch: Batch, budget: int) -> int:
        tokens = min(sequence.known - sequence.computed, budget)
        if tokens:
            batch.append((sequence, tokens))
        return tokens

    def _admit(self, batch: Batch, budget: int) -> int:
        running, kv = self.running, self._kv
        self.admitted = []
        while budget and self._waiting and len(running) < self._config.max_num_seqs:
            sequence = self._waiting[0]
            need = kv.blocks_for(sequence.known)
            if need > kv.free - (self._reserve if running else 0):
                break
            del self._waiting[0]
            running[sequence.id] = self._prefills[sequence.id] = sequence
            self.admitted.append(sequence.id)
            kv.give(sequence, need)
            budget -= self._prefill(sequence, batch, budget)
        return budget

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        _start_over(sequence, self._kv)
        self._waiting.add(sequence)
        self.preemptions += 1


def _start_over(sequence: Sequence, kv: KvCache) -> None:
    kv.take_back(sequence)
    sequence.computed = 0
    sequence.decoding = False


ENGINE_SCHEDULERS: dict[EngineSchedulerName, type[VllmScheduler | SlaiScheduler]] = {
    EngineSchedulerName.VLLM: VllmScheduler,
    EngineSchedulerName.SLAI: SlaiScheduler,
}
