"""A KV cache that finds blocks by what is in them, as vLLM does: for prompts that come over HTTP.

The virtual-time face needs no such detail: there a prompt says which others it has its beginning in common with
(``KvCache``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from proxy.sim.kvcache import KvCache

if TYPE_CHECKING:
    from proxy.sim.kvcache import Sequence


class BlockCache(KvCache):
    """Every full block of a prompt can be found by its hash, which is one of all tokens up to its end.

    Blocks of running sequences are found as soon as the step that fills them is composed. A block that several of them
    have counts for each, which is on the safe side of vLLM's, where they share it; blocks of answers are not kept.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        super().__init__(blocks, block_size)
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # held by nobody, least recently used first
        self._held: dict[bytes, int] = {}  # by so many sequences

    def give(self, sequence: Sequence, blocks: int, upto: int = 0) -> None:
        super().give(sequence, blocks)
        self._show(sequence, upto // self.block_size)

    def give_cached(self, sequence: Sequence, filling: int) -> None:
        del filling  # what this step fills is among the blocks held
        found = 0
        for block in sequence.hashes[: (sequence.known - 1) // self.block_size]:
            if block in self._idle:
                self._wake(block)
            elif block not in self._held:
                break
            found += 1
        self.give(sequence, found, found * self.block_size)
        sequence.computed = sequence.cached = found * self.block_size

    def take_back(self, sequence: Sequence) -> None:
        self.free += sequence.blocks
        sequence.blocks = 0
        for block in sequence.hashes[: sequence.shown]:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
        sequence.shown = 0
        # Its end goes first when room is needed: the beginning is of use without it.
        for block in reversed(sequence.hashes[: sequence.computed // self.block_size]):
            if block in self._idle:
                self._idle.move_to_end(block)
            elif block not in self._held and self.cached < self.free:
                self._idle[block] = None
                self.cached += 1

    def _show(self, sequence: Sequence, upto: int) -> None:
        """Let the first ``upto`` blocks of ``sequence`` be found while it holds them."""
        for block in sequence.hashes[sequence.shown : upto]:
            self._held[block] = self._held.get(block, 0) + 1
            sequence.shown += 1
            if block in self._idle:
                self._wake(block)

    def _wake(self, block: bytes) -> None:
        del self._idle[block]
        self.cached -= 1

    def _take(self, blocks: int) -> None:
        self.free -= blocks
        while self.cached > self.free:
            self._idle.popitem(last=False)
            self.cached -= 1
