"""The SLAI paper's scheduler inside the engine, as its published code has it, and with its quirks mended."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, ClassVar

from proxy.sim.schedulers.base import DUE, Batch, Scheduler, urgency

if TYPE_CHECKING:
    from proxy.sim.engine import EngineConfig
    from proxy.sim.kvcache import KvCache, Sequence


class SlaiScheduler(Scheduler):
    """SLAI with the shortest prompt first and the dynamic offset (the paper's ``spf_dynamic_offset``).

    A decode may wait until its last schedulable time, ``end of its last step + TBT - offset * mean step``, and is
    critical from then on. A step takes critical decodes, prompts half-way, new prompts (the shortest first, without
    aging) and, in what is left of the budget, the other decodes. The offset is larger when the KV cache is nearly full:
    decodes then run more often and end sooner. As in the code, a last schedulable time stays what it was when it was
    set, the mean goes over all steps ever, and a prompt takes all its blocks at once, with no prefix cache. Left out of
    the code is only that it never ends when a prompt is too long for it.
    """

    OFFSETS: ClassVar[tuple[float, float]] = (5, 10)
    """In mean steps: usually, and when the KV cache is nearly full."""
    LATE_DEADLINES: ClassVar[bool] = False
    """Whether a stream gets its first last schedulable time a step after its prompt is done, and is in no step until
    then, as in the published code."""
    _NEARLY_FULL = 0.96
    _DEFAULT_TBT_SECONDS = 0.2

    def __init__(self, config: EngineConfig, kv: KvCache) -> None:
        super().__init__(config, kv)
        self._prefills: dict[str, Sequence] = {}  # half-way, in order of admission
        self._streams: dict[str, Sequence] = {}  # decodes with a last schedulable time (``due``)
        self._fresh: list[Sequence] = []  # decodes without a last schedulable time
        self._steps = 0

    def key(self, sequence: Sequence) -> float | tuple[float, ...]:
        return sequence.prompt_tokens

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._prefills.pop(sequence.id, None)
        self._streams.pop(sequence.id, None)

    def choose(self) -> Batch:
        batch: Batch = []
        budget = self.config.token_budget
        decodes = sorted(self._streams.values(), key=DUE)
        critical = bisect_right(decodes, self.clock, key=DUE)
        budget = self._decode(decodes[:critical], batch, budget, critical=True)
        for sequence in self._prefills.values():
            budget -= self.prefill(sequence, batch, budget)
        budget = self._admit(batch, budget)
        self._decode(decodes[critical:], batch, budget, critical=False)
        if not batch and self._fresh:
            self._set_deadlines([])  # a step with nothing in it takes no time
            return self.choose()
        return batch

    def on_step_end(self, batch: Batch, seconds: float) -> None:
        super().on_step_end(batch, seconds)
        self._steps += 1
        prefills = self._prefills
        begun = (
            [s for s, _ in batch if s.decoding and s.alive and prefills.pop(s.id, None) is not None] if prefills else []
        )
        if self.LATE_DEADLINES:
            self._set_deadlines([entry for entry in batch if entry[0] not in begun])
            self._fresh = begun
        else:
            self._fresh = begun
            self._set_deadlines(batch)

    def mean_step(self) -> float:
        """Seconds, over all steps so far."""
        return self.clock / self._steps

    def _set_deadlines(self, batch: Batch) -> None:
        """Of what generates in the batch, and of the fresh ones that still do."""
        kv, clock, default = self.kv, self.clock, self._DEFAULT_TBT_SECONDS
        early = self.OFFSETS[kv.blocks - kv.free >= self._NEARLY_FULL * kv.blocks] * self.mean_step()
        if self._fresh:
            fresh, self._fresh = [s for s in self._fresh if s.decoding and s.alive], []
            self._streams.update((s.id, s) for s in fresh)
            batch = [*((s, 1) for s in fresh), *batch]
        for sequence, _ in batch:
            if sequence.decoding and sequence.alive:
                tbt = sequence.tbt_seconds
                sequence.due = clock + (default if tbt is None else tbt) - early

    def _decode(self, sequences: list[Sequence], batch: Batch, budget: int, *, critical: bool) -> int:
        """Add the next tokens of these, as far as the budget goes; return what is left of it."""
        kv, running = self.kv, self.running
        size = kv.block_size
        for sequence in sequences:
            if not budget:
                break
            if sequence.computed >= sequence.blocks * size:  # or it was preempted by one before it
                may_preempt = critical or not batch
                need = kv.blocks_for(sequence.computed + 1) - sequence.blocks
                while need > kv.free and may_preempt and sequence.id in running:
                    self.preempt(next(reversed(self._prefills.values()), sequence))
                if need > kv.free or sequence.id not in running:
                    continue
                kv.give(sequence, need)
            batch.append((sequence, 1))
            budget -= 1
        return budget

    def _admit(self, batch: Batch, budget: int) -> int:
        self.admitted = []
        while budget and self.waiting and self.fits(self.waiting[0]):
            sequence = self.waiting[0]
            self.admit(sequence)
            budget -= self.prefill(sequence, batch, budget)
        return budget

    def admit(self, sequence: Sequence) -> None:
        self._prefills[sequence.id] = sequence
        self.waiting.remove(sequence)
        self.running[sequence.id] = sequence
        self.admitted.append(sequence.id)
        self.kv.give(sequence, self.kv.blocks_for(sequence.known))


class SlaiFixedScheduler(SlaiScheduler):
    """SLAI with the shortest prompt first and a fixed offset (the paper's ``spf_fixed_offset``)."""

    OFFSETS = (10, 10)


class SlaiFcfsScheduler(SlaiFixedScheduler):
    """SLAI in order of arrival with a fixed offset (the paper's ``fcfs_fixed_offset``)."""

    def key(self, sequence: Sequence) -> float:
        del sequence
        return 0.0


class SlaiPriorityScheduler(SlaiScheduler):
    """SLAI, and prompts of users with the tightest TBT deadline before all others (the paper's ``user_priority``)."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return urgency(sequence), sequence.prompt_tokens


class SlaiAsPublishedScheduler(SlaiScheduler):
    """SLAI with one more quirk of the published code: see ``LATE_DEADLINES``."""

    LATE_DEADLINES = True


class SlaiMendedScheduler(SlaiScheduler):
    """SLAI without the quirks.

    The mean follows the last steps; nobody is held back while the KV cache is nearly full or the next prompt does not
    fit, as those who wait hold it longer; and prompts find their beginning in the prefix cache.
    """

    _SMOOTHING = 0.05

    def __init__(self, config: EngineConfig, kv: KvCache) -> None:
        super().__init__(config, kv)
        self._mean = 0.0

    def choose(self) -> Batch:
        kv = self.kv
        if kv.blocks - kv.free >= self._NEARLY_FULL * kv.blocks or (self.waiting and not self.fits(self.waiting[0])):
            for sequence in self._streams.values():
                sequence.due = 0.0
        return super().choose()

    def on_step_end(self, batch: Batch, seconds: float) -> None:
        self._mean += (seconds - self._mean) * (self._SMOOTHING if self._steps else 1)
        super().on_step_end(batch, seconds)

    def mean_step(self) -> float:
        return self._mean

    def admit(self, sequence: Sequence) -> None:
        self._prefills[sequence.id] = sequence
        super(SlaiScheduler, self).admit(sequence)
