"""What an engine can do at most, by its launch flags or by its own account."""

from __future__ import annotations

from dataclasses import dataclass

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
