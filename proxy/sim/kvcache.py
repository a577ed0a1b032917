"""Sequences of a simulated engine, and the blocks of KV cache that they hold.

Blocks of a prompt stay cached when its sequence is gone, until others need them (automatic prefix caching, least
recently used first).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class Produced(NamedTuple):
    """One token of one sequence, made by the step that just ended."""

    sequence_id: str
    finished: bool


class Sequence:
    """A prompt and what is generated from it, inside an engine."""

    __slots__ = (
        "alive",
        "arrival",
        "blocks",
        "cached",
        "common",
        "computed",
        "content",
        "decoding",
        "due",
        "from_cache",
        "hashes",
        "id",
        "known",
        "left",
        "prompt_tokens",
        "ready",
        "shown",
        "tbt_seconds",
        "token",
    )

    def __init__(
        self,
        sequence_id: str,
        prompt_tokens: int,
        output_tokens: int,
        content: str | None = None,
        *,
        tbt_seconds: float | None = None,
        common: int = 0,
        hashes: tuple[bytes, ...] = (),
    ) -> None:
        self.id = sequence_id
        self.hashes = hashes  # of the full blocks of its prompt, for a cache that finds blocks by them
        self.shown = 0  # of these, how many can be found because it holds them
        self.arrival = 0  # its place in the order in which sequences came to the engine
        self.ready = 0  # tokens whose keys and values come with it, computed elsewhere
        self.content = content
        self.common = min(common, prompt_tokens) or prompt_tokens  # tokens that are its content's
        self.prompt_tokens = prompt_tokens
        self.tbt_seconds = tbt_seconds
        self.from_cache = 0  # blocks that only the prefix cache held before its admission
        self.cached = 0  # tokens found in the prefix cache at its admission
        self.known = prompt_tokens  # prompt and tokens made so far
        self.computed = 0  # of these, how many have their keys and values in the cache
        self.left = output_tokens  # tokens still to make
        self.blocks = 0
        self.decoding = False  # its prefill is done; false again after a preemption
        self.due = 0.0  # for schedulers that know deadlines: when it is to be in a step at the latest
        self.alive = True
        self.token = Produced(sequence_id, finished=False)  # what all of its steps but the last make: built once


class KvCache:
    """All blocks of an engine: each is held by a sequence, or free; of the free ones some are still cached."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.free = blocks
        """Empty blocks, and those that only the prefix cache still holds."""
        self.cached = 0
        self._by_content: OrderedDict[str, int] = OrderedDict()  # cached blocks, least recently used first

    def __repr__(self) -> str:
        return f"<KvCache {self.free} of {self.blocks} blocks free, {self.cached} of them cached>"

    def contents(self) -> dict[str, int]:
        """Cached blocks by content, least recently used first."""
        return dict(self._by_content)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def give(self, sequence: Sequence, blocks: int, upto: int = 0) -> None:
        """Let ``sequence`` hold so many free blocks more; ``upto`` of its tokens are computed after this step."""
        del upto
        sequence.blocks += blocks
        self._take(blocks)

    def give_cached(self, sequence: Sequence, filling: int) -> None:
        """Let ``sequence`` hold its first blocks that are cached; its last token is computed in any case.

        ``filling`` tokens of its content are being computed in this very step. Their blocks can be found as soon as
        the sequence that fills them is scheduled. They are shared then; counting them for both is on the safe side.
        """
        sequence.cached = 0
        if sequence.ready:
            self.give(sequence, self.blocks_for(sequence.ready))
            sequence.computed = sequence.ready
            sequence.decoding = True
            return
        if sequence.content is None:
            return
        most = min(sequence.known - 1, sequence.common) // self.block_size
        held = self._by_content.pop(sequence.content, 0)
        self.cached -= held
        if held > most:  # the rest stays cached
            self._by_content[sequence.content] = held - most
            self.cached += held - most
        sequence.from_cache = min(held, most)
        self.give(sequence, max(sequence.from_cache, min(most, filling // self.block_size)))
        sequence.computed = sequence.cached = sequence.blocks * self.block_size

    def take_back(self, sequence: Sequence) -> None:
        """Free all blocks of ``sequence``; those of its prompt stay cached."""
        self.free += sequence.blocks
        sequence.blocks = 0
        if sequence.content is None:
            return
        rest = self._by_content.pop(sequence.content, 0)  # cached beyond what the sequence took from the cache
        self.cached -= rest
        full = min(sequence.computed, sequence.common) // self.block_size
        full = min(max(full, sequence.from_cache + rest), self.free - self.cached)
        if full > 0:
            self._by_content[sequence.content] = full
            self.cached += full

    def _take(self, blocks: int) -> None:
        self.free -= blocks
        while self.cached > self.free:  # what was used longest ago is overwritten, from its end
            content, held = self._by_content.popitem(last=False)
            lost = min(held, self.cached - self.free)
            self.cached -= lost
            if held > lost:
                self._by_content[content] = held - lost
                self._by_content.move_to_end(content, last=False)
