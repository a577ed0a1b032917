"""Which engine probably has the beginning of a prompt in its prefix cache, and how much of it.

A prompt comes as a chain of block hashes: each stands for its block and all before it, so two prompts share a hash
only if they are equal up to there. What was released to an engine is in its cache until other prompts need the room,
least recently used first, and of one prompt the end before the beginning; the index does the same with the size of
the engine's KV cache. It knows nothing of outputs and of other clients' prompts, so it believes too much rather than
too little: what engines report as ``cached_tokens`` scales it down.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.core.engine import EngineBelief
    from proxy.core.request import Request

_UNKNOWN_KV_TOKENS = 131_072
"""Taken for the size of a KV cache that the engine does not tell."""
_MAX_BLOCKS = 65_536
"""Blocks remembered for one engine, however few tokens each has."""
_TRUST_PRIOR_TOKENS = 4096.0
"""A belief of so many tokens must be disappointed for trust to fall to a half."""
_TRUST_FORGETTING = 0.98


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt's chain of block hashes; none where its beginning is not worth a look or cannot be told."""

    hashes: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    """Tokens of the prompt up to the end of each block; an estimate, where the prompt's length is one."""


NO_BLOCKS = PromptBlocks()


class PrefixIndex:
    """What one engine's prefix cache probably holds."""

    def __init__(self) -> None:
        self.capacity_tokens = _UNKNOWN_KV_TOKENS
        self.tokens = 0
        """Of all blocks."""
        self._blocks: OrderedDict[int, tuple[int, int]] = OrderedDict()  # tokens and latest user; to be evicted first
        self._believed = self._found = _TRUST_PRIOR_TOKENS

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self)} blocks, {self.tokens} tokens, trust {self.trust:.2f}>"

    @property
    def trust(self) -> float:
        """Share of the tokens believed to be cached that engines found cached, 0 to 1."""
        return self._found / self._believed

    def match(self, blocks: PromptBlocks) -> int:
        """Return how many of the prompt's first blocks the index holds; O(log n).

        Who uses a block uses all before it, and they are evicted after it: what is held of a chain is its beginning.
        """
        low, high = 0, len(blocks.hashes)
        while low < high:
            middle = (low + high) // 2
            if blocks.hashes[middle] in self._blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, blocks: PromptBlocks, user: int) -> None:
        """Note that the engine works on a prompt with these blocks. ``user`` is a number of its own for each."""
        held = self._blocks
        for position in range(len(blocks.hashes) - 1, -1, -1):  # the first block becomes the last to be evicted
            block = blocks.hashes[position]
            known = held.get(block)
            if known is None:
                tokens = blocks.ends[position] - (blocks.ends[position - 1] if position else 0)
                self.tokens += tokens
            else:
                tokens = known[0]
            held[block] = tokens, user
            held.move_to_end(block)
        while self.tokens > self.capacity_tokens or len(held) > _MAX_BLOCKS:
            _, (tokens, _) = held.popitem(last=False)
            self.tokens -= tokens

    def take_back(self, blocks: PromptBlocks, known: int, user: int) -> None:
        """Undo a use after the first ``known`` blocks, except for those that somebody has used since."""
        for block in blocks.hashes[known:]:
            if (found := self._blocks.get(block)) is not None and found[1] == user:
                del self._blocks[block]
                self.tokens -= found[0]

    def judge(self, believed_tokens: int, found_tokens: int) -> None:
        """Learn from a prompt of which so many tokens were believed, and so many found, to be cached."""
        self._believed = _TRUST_FORGETTING * self._believed + believed_tokens
        self._found = _TRUST_FORGETTING * self._found + min(found_tokens, believed_tokens)


@dataclass(frozen=True, slots=True)
class _Use:
    """A prompt that an engine has."""

    index: PrefixIndex
    blocks: PromptBlocks
    known: int
    """Blocks that the index held before."""
    number: int


class Prefixes:
    """The indexes of all engines that cache prefixes."""

    def __init__(self) -> None:
        self._indexes: dict[str, PrefixIndex] = {}
        self._uses: dict[str, _Use] = {}  # by request
        self._number = 0

    def index(self, engine_id: str) -> PrefixIndex:
        """Return what an engine is believed to hold. To look at."""
        return self._indexes.get(engine_id, PrefixIndex())

    def cached_tokens(self, request: Request, engine: EngineBelief) -> int:
        """Return how many of the prompt's first tokens ``engine`` will probably find cached; never all of them."""
        index = self._indexes.get(engine.id)
        if index is None or not request.blocks.hashes or not engine.limits.caches_prefixes:
            return 0
        return self._worth(request, index.match(request.blocks), index, engine)

    def uncached_tokens(self, request: Request, engines: Iterable[EngineBelief]) -> int:
        """Return the prompt tokens left to work on where most of them are cached; at least 1."""
        if not request.blocks.hashes:
            return max(1, request.prompt_tokens)
        serving = (e for e in engines if e.up and e.serves(request.model))
        return max(1, request.prompt_tokens - max((self.cached_tokens(request, e) for e in serving), default=0))

    def release(self, request: Request, engine: EngineBelief) -> int:
        """Note that the prompt is sent to ``engine``; return how many of its tokens will probably be found cached.

        It counts as cached from now on: an engine registers blocks when it schedules a prompt, and takes prompts in
        the order of release, so whoever follows finds them.
        """
        if not request.blocks.hashes or not engine.limits.caches_prefixes:
            return 0
        index = self._indexes.setdefault(engine.id, PrefixIndex())
        index.capacity_tokens = engine.limits.kv_tokens or _UNKNOWN_KV_TOKENS
        known = index.match(request.blocks)
        self._number += 1
        self._uses[request.id] = _Use(index, request.blocks, known, self._number)
        index.use(request.blocks, self._number)
        return self._worth(request, known, index, engine)

    def take_back(self, request_id: str) -> None:
        """The engine provably did not start the request."""
        if (use := self._uses.pop(request_id, None)) is not None:
            use.index.take_back(use.blocks, use.known, use.number)

    def end(self, request_id: str, cached_tokens: int | None) -> None:
        """Take in the end of a request. ``cached_tokens``: how much of its prompt the engine says it found cached."""
        use = self._uses.pop(request_id, None)
        if use is not None and use.known and cached_tokens is not None:
            use.index.judge(use.blocks.ends[use.known - 1], cached_tokens)

    def clear(self, engine_id: str) -> None:
        """The engine has restarted: its cache is empty, and whatever was wrong with it may be different now."""
        self._indexes.pop(engine_id, None)

    def _worth(self, request: Request, known: int, index: PrefixIndex, engine: EngineBelief) -> int:
        """Tokens that ``known`` blocks stand for: whole blocks of the engine, of which it computes the last anew."""
        if not known:
            return 0
        tokens = min(int(index.trust * request.blocks.ends[known - 1]), request.prompt_tokens - 1)
        return max(0, tokens) // engine.limits.block_tokens * engine.limits.block_tokens
