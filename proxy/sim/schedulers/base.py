"""What the schedulers of simulated engines share: their queue, their share of the KV cache, and preemption."""

from __future__ import annotations

from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from sortedcontainers import SortedKeyList

from proxy.core.stepmodel import StepLoad

if TYPE_CHECKING:
    from proxy.sim.engine import EngineConfig
    from proxy.sim.kvcache import KvCache, Sequence

Batch = list[tuple["Sequence", int]]
"""Sequences of a step, each with how many of its tokens the step works on."""
DUE = attrgetter("due")
"""A sequence's, to sort by."""


class EngineScheduler(Protocol):
    """Chooses batches; a sequence is waiting or running from ``add`` to ``remove``."""

    running: dict[str, Sequence]
    """Those that hold KV cache, by id."""
    preemptions: int
    admitted: list[str]
    """Sequences that the last choice took in from the queue, first come first."""

    def __init__(self, config: EngineConfig, kv: KvCache) -> None: ...

    def add(self, sequence: Sequence) -> None: ...

    def remove(self, sequence: Sequence) -> None: ...

    def choose(self) -> Batch: ...

    def on_step_end(self, batch: Batch, seconds: float) -> None: ...


class Scheduler:
    """A queue in an order of one's own, and whole prompts admitted to the KV cache: the base of most schedulers.

    A subclass says in ``key`` who goes first, and composes batches from ``decode``, ``prefill`` and ``admit``.
    """

    def __init__(self, config: EngineConfig, kv: KvCache) -> None:
        self.running: dict[str, Sequence] = {}  # in order of admission
        self.preemptions = 0
        self.admitted: list[str] = []
        self.config = config
        self.kv = kv
        self.waiting: SortedKeyList[Sequence] = SortedKeyList(key=self._order)
        self.clock = 0.0
        """Seconds in steps so far. While anything runs, step follows step."""
        self._reserve = int(config.watermark * config.blocks)

    def key(self, sequence: Sequence) -> float | tuple[float, ...]:
        """Who waits with the smallest key goes first, and of equals who came first. It must not change in the queue."""
        del sequence
        return 0.0

    def choose(self) -> Batch:
        raise NotImplementedError

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        if self.running.pop(sequence.id, None) is None:
            self.waiting.remove(sequence)

    def on_step_end(self, batch: Batch, seconds: float) -> None:
        del batch
        self.clock += seconds

    # -- parts of a choice --

    def decodes(self) -> list[Sequence]:
        """Running sequences that generate, in order of admission."""
        return [s for s in self.running.values() if s.decoding]

    def prefills(self) -> list[Sequence]:
        """Running sequences with a part of their prompt still to do, in order of admission."""
        return [s for s in self.running.values() if not s.decoding]

    def fits(self, sequence: Sequence) -> bool:
        """Whether there is a slot and KV cache for all of its prompt, beyond what the watermark keeps free."""
        if len(self.running) >= self.config.max_num_seqs:
            return False
        return self.kv.blocks_for(sequence.known) <= self.kv.free - (self._reserve if self.running else 0)

    def admit(self, sequence: Sequence) -> None:
        """Let a waiting sequence run: it holds the KV cache of its whole prompt from now on."""
        self.waiting.remove(sequence)
        self.running[sequence.id] = sequence
        self.admitted.append(sequence.id)
        kv = self.kv
        kv.give_cached(sequence, 0)
        kv.give(sequence, kv.blocks_for(sequence.known) - sequence.blocks, sequence.known)

    def prefill(self, sequence: Sequence, batch: Batch, budget: int) -> int:
        """Add as much of its prompt to the batch as the budget allows; return how many tokens."""
        tokens = min(sequence.known - sequence.computed, budget)
        if tokens > 0:
            batch.append((sequence, tokens))
        return tokens

    def decode(self, sequence: Sequence, batch: Batch) -> int:
        """Add its next token to the batch; return 0 if it had to give up its KV cache.

        Where it needs a block and none is free, the youngest that is not in the batch starts over, at last itself.
        """
        kv = self.kv
        if sequence.computed < sequence.blocks * kv.block_size:  # fifteen of sixteen times
            batch.append((sequence, 1))
            return 1
        need = kv.blocks_for(sequence.computed + 1) - sequence.blocks
        if need > kv.free:
            planned = {s.id for s, _ in batch}
            while need > kv.free:
                victim = next(s for s in reversed(self.running.values()) if s.id not in planned)
                self.preempt(victim)
                if victim is sequence:
                    return 0
        kv.give(sequence, need)
        batch.append((sequence, 1))
        return 1

    def preempt(self, sequence: Sequence) -> None:
        """Take its KV cache away; it waits again, to start over."""
        self.remove(sequence)
        start_over(sequence, self.kv)
        self.waiting.add(sequence)
        self.preemptions += 1

    def _order(self, sequence: Sequence) -> tuple[float | tuple[float, ...], int]:
        return self.key(sequence), sequence.arrival


def urgency(sequence: Sequence) -> float:
    """The priority of who pays for a tight TBT deadline: the smaller the earlier."""
    return inf if sequence.tbt_seconds is None else sequence.tbt_seconds


def start_over(sequence: Sequence, kv: KvCache) -> None:
    """Let a sequence that is preempted forget what it has computed."""
    kv.take_back(sequence)
    sequence.computed = 0
    sequence.decoding = False
    sequence.ready = 0


def load_of(batch: Batch) -> StepLoad:
    """What a step with such a batch has in it."""
    kv_tokens = prefill_tokens = prefills = 0
    attention = 0.0
    for sequence, tokens in batch:
        if sequence.decoding:
            kv_tokens += sequence.computed
        else:
            prefills += 1
            prefill_tokens += tokens
            attention += tokens * (sequence.computed + tokens / 2)
    return StepLoad(prefill_tokens, len(batch) - prefills, kv_tokens, attention, prefills)
