"""Chunked prefill with decodes first: Sarathi-Serve, and the orders of prompts that are compared with its own.

Sarathi-Serve (Agrawal et al., OSDI 2024): every decode is in every step, and what the token budget leaves goes to
prompts, cut into chunks. vLLM V1 does the same but for details.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.sim.schedulers.base import Batch, Scheduler, urgency

if TYPE_CHECKING:
    from proxy.sim.kvcache import Sequence


class SarathiScheduler(Scheduler):
    """Decodes, then prompts half-way, then new ones first come first served."""

    def choose(self) -> Batch:
        self.admitted, preempted = [], self.preemptions
        batch: Batch = []
        budget = self.config.token_budget
        for sequence in self.decodes():
            if sequence.id in self.running:  # not preempted by one before it
                budget -= self.decode(sequence, batch)
        for sequence in self.prefills():
            budget -= self.prefill(sequence, batch, budget)
        while budget and self.waiting and self.preemptions == preempted and self.fits(self.waiting[0]):
            sequence = self.waiting[0]
            self.admit(sequence)
            budget -= self.prefill(sequence, batch, budget)
        return batch


class ShortestPromptFirst(SarathiScheduler):
    """The shortest new prompt first; one that has begun is finished first (the paper's ``sarathi_spf``)."""

    def key(self, sequence: Sequence) -> float | tuple[float, ...]:
        return sequence.prompt_tokens


class ShortestRemainingFirst(ShortestPromptFirst):
    """The prompt with the least left to do first, be it new or half-way: a short one overtakes one that has begun."""

    def choose(self) -> Batch:
        self.admitted = []
        batch: Batch = []
        budget, preempted = self.config.token_budget, self.preemptions
        for sequence in self.decodes():
            if sequence.id in self.running:
                budget -= self.decode(sequence, batch)
        self.fill(batch, budget, may_admit=self.preemptions == preempted)
        return batch

    def fill(self, batch: Batch, budget: int, *, may_admit: bool = True) -> int:
        """Add prompts to the batch in order of what is left of them; return the budget that is left."""
        begun = sorted(self.prefills(), key=lambda s: (s.known - s.computed, s.arrival), reverse=True)
        while budget > 0:
            new = self.waiting[0] if may_admit and self.waiting else None
            if new is not None and begun and begun[-1].known - begun[-1].computed <= new.known:
                new = None
            if new is not None and not self.fits(new):
                new, may_admit = None, False
            if new is not None:
                self.admit(new)
            elif begun:
                new = begun.pop()
            else:
                break
            rest, tokens = new.known - new.computed, self.prefill(new, batch, budget)
            budget -= tokens
            if tokens < rest:
                break
        return budget


class PayingUsersFirst(ShortestPromptFirst):
    """The shortest new prompt first among those with the tightest TBT deadline, then among the others."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return urgency(sequence), sequence.prompt_tokens
