"""vLLM V1's scheduler, in its order of arrival and with ``--scheduling-policy priority``."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sortedcontainers import SortedKeyList

from proxy.sim.schedulers.base import Batch, start_over, urgency

if TYPE_CHECKING:
    from proxy.sim.engine import EngineConfig
    from proxy.sim.kvcache import KvCache, Sequence


class VllmScheduler:
    """vLLM V1: decodes and begun prompts in the order of their admission, then new prompts, first come first served.

    A sequence that finds no free block preempts the youngest running one, which starts over (recompute).
    """

    def __init__(self, config: EngineConfig, kv: KvCache) -> None:
        self.running: dict[str, Sequence] = {}  # in order of admission
        self.preemptions = 0
        self.admitted: list[str] = []
        self._kv = kv
        self._budget = self._chunk = config.token_budget  # tokens of a step, and of one prompt in it
        self._most_running = config.max_num_seqs
        self._reserve = int(config.watermark * config.blocks)
        self._waiting: deque[Sequence] | SortedKeyList[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        if self.running.pop(sequence.id, None) is None:
            self._waiting.remove(sequence)

    def choose(self) -> Batch:
        running, kv, block_size = self.running, self._kv, self._kv.block_size
        budget, chunk = self._budget, self._chunk
        batch: Batch = []
        preempted = False
        for sequence in self._eligible():
            if not budget:
                break
            if preempted and sequence.id not in running:  # by one before it
                continue
            computed = sequence.computed
            tokens = 1 if sequence.decoding else min(sequence.known - computed, budget, chunk)
            need = -(-(computed + tokens) // block_size) - sequence.blocks
            if need:
                while need > kv.free and sequence.id in running:
                    budget += self._preempt_last(batch)
                    preempted = True
                if preempted and sequence.id not in running:
                    continue  # it was the last itself
                kv.give(sequence, need, computed + tokens)
            budget -= tokens
            batch.append((sequence, tokens))
        self.admitted = self._admit(batch, budget) if budget and not preempted else []
        return batch

    def on_step_end(self, batch: Batch, seconds: float) -> None:
        """Nothing to note: vLLM knows no time."""

    def _eligible(self) -> tuple[Sequence, ...]:
        """Those that may be in the step, of all that run."""
        return tuple(self.running.values())

    def _admit(self, batch: Batch, budget: int) -> list[str]:
        """Take in waiting prompts; add their first chunks to ``batch`` and return their ids."""
        running, kv = self.running, self._kv
        admitted: list[str] = []
        filling: dict[str, int] = {}  # tokens that sequences of this step will have cached, by content
        while budget and self._waiting and len(running) < self._most_running:
            sequence = self._waiting[0]
            # The whole prompt must fit before its first chunk is taken in (vLLM's scheduler_reserve_full_isl).
            if kv.blocks_for(sequence.known) > kv.free - (self._reserve if running else 0):
                break
            del self._waiting[0]
            running[sequence.id] = sequence
            admitted.append(sequence.id)
            shared = filling.get(sequence.content or "", 0)
            if sequence.common < sequence.prompt_tokens:  # what running sequences have computed of it is found too
                same = (s.computed for s in running.values() if s.content == sequence.content)
                shared = max(shared, *same)
            kv.give_cached(sequence, shared)
            tokens = min(sequence.known - sequence.computed, budget, self._chunk)
            upto = sequence.computed + tokens
            kv.give(sequence, kv.blocks_for(upto) - sequence.blocks, upto)
            budget -= tokens
            batch.append((sequence, tokens))
            if sequence.content is not None:
                filling[sequence.content] = upto
        return admitted

    def _preempt_last(self, batch: Batch) -> int:
        """Preempt who comes last; return the tokens of this step that are free again."""
        sequence = self._last()
        del self.running[sequence.id]
        start_over(sequence, self._kv)
        self._put_back(sequence)
        self.preemptions += 1
        return _take_out(sequence, batch)

    def _last(self) -> Sequence:
        return next(reversed(self.running.values()))

    def _put_back(self, sequence: Sequence) -> None:
        assert isinstance(self._waiting, deque)
        self._waiting.appendleft(sequence)


class VllmPriorityScheduler(VllmScheduler):
    """vLLM V1 with ``--scheduling-policy priority``: who has the tighter TBT deadline goes first, then who came first.

    Who comes last by that is preempted first, even if it is in the step already.
    """

    def __init__(self, config: EngineConfig, kv: KvCache) -> None:
        super().__init__(config, kv)
        self._waiting: SortedKeyList[Sequence] = SortedKeyList(key=_priority)

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)

    def _last(self) -> Sequence:
        return max(self.running.values(), key=_priority)

    def _put_back(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)


def _priority(sequence: Sequence) -> tuple[float, int]:
    return urgency(sequence), sequence.arrival


def _take_out(sequence: Sequence, batch: Batch) -> int:
    for index, (planned, tokens) in enumerate(batch):
        if planned is sequence:
            del batch[index]
            return tokens
    return 0
