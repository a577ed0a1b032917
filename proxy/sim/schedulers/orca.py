"""Orca (Yu et al., OSDI 2022): batches are composed anew at every step, but a prompt is one piece."""

from __future__ import annotations

from proxy.sim.schedulers.base import Batch, Scheduler


class OrcaScheduler(Scheduler):
    """Whole prompts beside decodes, first come first served, and no token budget: long prompts stop all streams.

    The KV cache of prompt and output is set aside on admission (of an output as long as it is going to be: Orca itself
    sets aside the longest that is allowed), so nobody is ever preempted. The SLAI paper runs it with 8 sequences.
    """

    def choose(self) -> Batch:
        self.admitted = []
        batch: Batch = [(s, 1) for s in self.running.values()]
        kv = self.kv
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            whole = kv.blocks_for(sequence.known + sequence.left)
            if whole > kv.free:
                break
            self.admit(sequence)
            kv.give(sequence, whole - sequence.blocks, sequence.known)
            self.prefill(sequence, batch, sequence.known)
        return batch
