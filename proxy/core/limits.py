"""What an engine can do at most, by its launch flags or by its own account."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

_LONGEST_ANSWER = 1 << 20
"""Where the size of the cache is not known."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """An engine's KV cache as it reports it (``vllm:cache_config_info``)."""

    kv_tokens: int | None = None
    block_tokens: int = 16
    caches_prefixes: bool = False


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """An engine's own limits. They are launch flags that vLLM exposes only in part, hence configured or scraped."""

    token_budget: int = 2048
    """Tokens per step (``--max-num-batched-tokens``). Too large a value only makes the gate looser."""
    max_num_seqs: int = 256
    kv_tokens: int | None = None
    """Size of the KV cache in tokens; ``None`` while unknown: then the KV gate is open."""
    block_tokens: int = 16
    """A prefix is cached in whole blocks of this size."""
    caches_prefixes: bool = False
    """Whether prompts may be sent ahead in slices."""

    @property
    def longest_answer(self) -> int:
        """Tokens that no answer of its can have more of, whatever it says: they would not fit into its KV cache."""
        return _LONGEST_ANSWER if self.kv_tokens is None else self.kv_tokens

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.max_num_seqs < 1 or (self.kv_tokens is not None and self.kv_tokens < 1):
            raise ValueError("an engine's limits are at least 1")

    def part(self, parts: int) -> EngineLimits:
        """One of so many equal parts of such an engine, for one sequence at least."""
        return replace(
            self,
            token_budget=ceil(self.token_budget / parts),
            max_num_seqs=ceil(self.max_num_seqs / parts),
            kv_tokens=None if self.kv_tokens is None else ceil(self.kv_tokens / parts),
        )
