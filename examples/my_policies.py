"""Policies of your own for ``slai-proxy simulate --policy my_policies:NAME``; docs/policies.md explains them."""

from proxy.sim.kvcache import Sequence
from proxy.sim.schedulers.sarathi import SarathiScheduler


class PayingPromptsLookShort(SarathiScheduler):
    """In the engine: prompts of a class with a tight deadline count as a quarter of their length."""

    def key(self, sequence: Sequence) -> float:
        return sequence.prompt_tokens * (0.25 if (sequence.tbt_seconds or 1.0) <= 0.1 else 1.0)


def in_lanes(prompt_tokens: int, arrived_at: float) -> float:
    """At the proxy: short prompts in order of arrival, then long ones; ten seconds of waiting make up for it."""
    return arrived_at + (10.0 if prompt_tokens > 2048 else 0.0)
