"""RAD, Algorithm 1 of the SLAI paper: throughput-optimal, blind to latency."""

from __future__ import annotations

from math import inf

from proxy.sim.schedulers.base import Batch, Scheduler


class RadScheduler(Scheduler):
    """A step is one chunk of the oldest prompt, or one token of every stream; never both.

    It works on streams alone once there are ``max_num_seqs`` of them (the paper's b_col) or no prompt is left, and else
    on ``token_budget`` tokens (its b_lcm) of the oldest prompt. So every step is a full tile unless all that there is
    streams, and there are fewer than a tile of them. The paper assumes prompts of whole chunks and KV cache for b_col
    of the largest requests; without, the last chunk of a prompt is a part of a tile, and one that does not fit waits.
    """

    CYCLE: float = inf
    """Prompts admitted in a cycle (the paper's N); then the streams drain before the next cycle."""

    _begun_in_cycle = 0

    def choose(self) -> Batch:
        self.admitted = []
        batch: Batch = []
        decodes = self.decodes()
        if not self.running:
            self._begun_in_cycle = 0
        if len(decodes) < self.config.max_num_seqs:
            prefill = next(iter(self.prefills()), None)
            if prefill is None and self.waiting and self._begun_in_cycle < self.CYCLE and self.fits(self.waiting[0]):
                prefill = self.waiting[0]
                self.admit(prefill)
                self._begun_in_cycle += 1
            if prefill is not None:
                self.prefill(prefill, batch, self.config.token_budget)
                return batch
        for sequence in decodes:
            if sequence.id in self.running:
                self.decode(sequence, batch)
        return batch
