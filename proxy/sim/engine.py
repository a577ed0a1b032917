"""A simulated vLLM engine: continuous batching as vLLM V1's scheduler does it, without the GPU.

Each step serves the running sequences in the order of their admission, decodes one token each and prefills in
chunks, all within one token budget; what is left of the budget admits waiting prompts first come, first served.
A sequence that finds no free KV block preempts the youngest running one, which starts over (recompute). Blocks of a
prompt stay cached when its sequence is gone, until others need them (automatic prefix caching, least recently used
first).
Pure: the caller owns the clock, and both faces of the simulator (virtual time, HTTP) drive this one class.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from proxy.sim.profiles import PROFILES, Profile


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What ``vllm serve`` is started with."""

    profile: Profile = PROFILES["rtx6000ada"]
    token_budget: int = 512
    """``--max-num-batched-tokens``. 512 is the largest power of two that holds 100 ms steps on an RTX 6000 Ada."""
    max_num_seqs: int = 128
    block_size: int = 16
    watermark: float = 0.0
    """Share of the KV blocks that admission leaves free (``--watermark``)."""

    def __post_init__(self) -> None:
        if min(self.token_budget, self.max_num_seqs, self.block_size) < 1 or not 0 <= self.watermark < 1:
            raise ValueError("budget, sequences and block size are at least 1, the watermark lies in [0, 1)")
        if self.token_budget < self.max_num_seqs:
            raise ValueError("the token budget must hold one token of every sequence")

    @property
    def blocks(self) -> int:
        return self.profile.kv_tokens // self.block_size


class Produced(NamedTuple):
    """One token of one sequence, made by the step that just ended."""

    sequence_id: str
    finished: bool


class _Sequence:
    __slots__ = (
        "alive",
        "blocks",
        "cached",
        "common",
        "computed",
        "content",
        "decoding",
        "from_cache",
        "id",
        "known",
        "left",
        "prompt_tokens",
        "token",
    )

    def __init__(
        self, sequence_id: str, prompt_tokens: int, output_tokens: int, content: str | None, common: int
    ) -> None:
        self.id = sequence_id
        self.content = content
        self.common = min(common, prompt_tokens) or prompt_tokens  # tokens that are its content's
        self.prompt_tokens = prompt_tokens
        self.from_cache = 0  # blocks that only the prefix cache held before its admission
        self.cached = 0  # tokens found in the prefix cache at its admission
        self.known = prompt_tokens  # prompt and tokens made so far
        self.computed = 0  # of these, how many have their keys and values in the cache
        self.left = output_tokens  # tokens still to make
        self.blocks = 0
        self.decoding = False  # its prefill is done; false again after a preemption
        self.alive = True
        self.token = Produced(sequence_id, finished=False)  # what all of its steps but the last make: built once


class SimulatedEngine:
    """One engine; see the module's docstring. ``start_step`` and ``finish_step`` alternate."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.preemptions = 0
        self.steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.step_prompt_tokens = 0
        """Prompt tokens in the step begun last; those of a prefill that starts over count again."""
        self.step_admitted: list[str] = []
        """Sequences that the step begun last took in from the queue, first come first."""
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}  # in order of admission
        self._sequences: dict[str, _Sequence] = {}
        self._free_blocks = self.config.blocks  # empty ones, and those that only the prefix cache still holds
        self._cache: OrderedDict[str, int] = OrderedDict()  # blocks by content, least recently used first
        self._cached_blocks = 0
        self._filling: dict[str, int] = {}  # tokens that sequences of the step under way will have cached, by content
        self._batch: list[tuple[_Sequence, int]] | None = None

    def __repr__(self) -> str:
        return f"<SimulatedEngine running={self.running} waiting={self.waiting} kv={self.kv_tokens_used}>"

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def kv_tokens_used(self) -> int:
        """Tokens in allocated blocks; a block counts whole."""
        return (self.config.blocks - self._free_blocks) * self.config.block_size

    def add(
        self, sequence_id: str, prompt_tokens: int, output_tokens: int, content: str | None = None, common: int = 0
    ) -> None:
        """Queue a prompt. Prompts of the same ``content`` begin with the same tokens: one finds the other's blocks.

        Only the first ``common`` tokens are the content's, if that is given; then it also finds those that a running
        sequence holds.

        Raises:
            ValueError: the id is in use, a length is below one, or the whole sequence can never fit the KV cache.
        """
        if sequence_id in self._sequences:
            raise ValueError(f"sequence {sequence_id!r} exists already")
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a prompt and an output have at least one token")
        if prompt_tokens + output_tokens > self.config.blocks * self.config.block_size:
            raise ValueError(f"{prompt_tokens + output_tokens} tokens never fit into {self.config.profile.kv_tokens}")
        sequence = _Sequence(sequence_id, prompt_tokens, output_tokens, content, common)
        self._sequences[sequence_id] = sequence
        self._waiting.append(sequence)

    def abort(self, sequence_id: str) -> None:
        """Drop a sequence at once; its share of a step under way is lost. An unknown id is ignored."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        if self._running.pop(sequence_id, None) is None:
            self._waiting.remove(sequence)
        self._release(sequence)

    def start_step(self) -> float | None:
        """Choose the next batch and return the seconds that it takes; ``None`` when there is nothing to run."""
        if self._batch is not None:
            raise RuntimeError("the last step has not been finished")
        config, running = self.config, self._running
        budget, block_size = config.token_budget, config.block_size
        batch: list[tuple[_Sequence, int]] = []
        preempted = False
        decodes = kv_tokens = prefill_tokens = 0
        attention = 0.0

        for sequence in tuple(running.values()):
            if not budget:
                break
            if preempted and sequence.id not in running:  # by one before it
                continue
            computed = sequence.computed
            tokens = 1 if sequence.decoding else min(sequence.known - computed, budget)
            need = -(-(computed + tokens) // block_size) - sequence.blocks
            if need:
                while need > self._free_blocks and sequence.id in running:
                    self._preempt_youngest()
                    preempted = True
                if preempted and sequence.id not in running:
                    break  # it was the youngest itself: nothing behind it is left
                sequence.blocks += need
                self._take(need)
            budget -= tokens
            batch.append((sequence, tokens))
            if sequence.decoding:
                decodes += 1
                kv_tokens += computed
            else:
                prefill_tokens += tokens
                attention += tokens * (computed + tokens / 2)

        self.step_admitted = self._admit(batch, budget) if budget and not preempted else []
        for sequence, tokens in batch[-len(self.step_admitted) :] if self.step_admitted else ():
            prefill_tokens += tokens
            attention += tokens * (sequence.computed + tokens / 2)
        self.step_prompt_tokens = prefill_tokens
        if not batch:
            return None
        self._batch = batch
        self.steps += 1
        return config.profile.step.seconds(
            prefill_tokens=prefill_tokens,
            sequences=len(batch),
            decodes=decodes,
            kv_tokens=kv_tokens,
            attention=attention,
        )

    def finish_step(self) -> list[Produced]:
        """End the step begun last and return the tokens that it made, in batch order."""
        if self._batch is None:
            raise RuntimeError("no step was started")
        batch, self._batch = self._batch, None
        produced: list[Produced] = []
        for sequence, tokens in batch:
            if not sequence.alive:
                continue
            sequence.computed += tokens
            if not sequence.decoding:
                self.prompt_tokens += tokens
                if sequence.computed < sequence.known:
                    continue
                sequence.decoding = True
            sequence.known += 1
            sequence.left -= 1
            if sequence.left:
                produced.append(sequence.token)
            else:
                produced.append(Produced(sequence.id, finished=True))
                del self._sequences[sequence.id], self._running[sequence.id]
                self._release(sequence)
        self.generation_tokens += len(produced)
        return produced

    def _admit(self, batch: list[tuple[_Sequence, int]], budget: int) -> list[str]:
        """Take in waiting prompts, first come, first served; add their first chunks to ``batch``, return their ids."""
        config, running = self.config, self._running
        admitted: list[str] = []
        reserve = int(config.watermark * config.blocks)
        while budget and self._waiting and len(running) < config.max_num_seqs:
            sequence = self._waiting[0]
            # The whole prompt must fit before its first chunk is taken in (vLLM's scheduler_reserve_full_isl).
            spare = self._free_blocks - (reserve if running else 0)
            if -(-sequence.known // config.block_size) > spare:
                break
            self._waiting.popleft()
            running[sequence.id] = sequence
            admitted.append(sequence.id)
            self._take_cached(sequence)
            tokens = min(sequence.known - sequence.computed, budget)
            need = -(-(sequence.computed + tokens) // config.block_size) - sequence.blocks
            sequence.blocks += need
            self._take(need)
            budget -= tokens
            batch.append((sequence, tokens))
            if sequence.content is not None:
                self._filling[sequence.content] = sequence.computed + tokens
        self._filling.clear()
        return admitted

    def _preempt_youngest(self) -> None:
        sequence_id, sequence = self._running.popitem()
        assert self._sequences[sequence_id] is sequence
        self._give_back(sequence)
        sequence.computed = 0
        sequence.decoding = False
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: _Sequence) -> None:
        self._give_back(sequence)
        sequence.alive = False

    def _take(self, blocks: int) -> None:
        self._free_blocks -= blocks
        while self._cached_blocks > self._free_blocks:  # what was used longest ago is overwritten, from its end
            content, held = self._cache.popitem(last=False)
            lost = min(held, self._cached_blocks - self._free_blocks)
            self._cached_blocks -= lost
            if held > lost:
                self._cache[content] = held - lost
                self._cache.move_to_end(content, last=False)

    def _take_cached(self, sequence: _Sequence) -> None:
        """Find the sequence's first blocks in the prefix cache; its last token is computed in any case."""
        sequence.cached = 0
        if sequence.content is None:
            return
        block_size = self.config.block_size
        most = min(sequence.known - 1, sequence.common) // block_size
        held = self._cache.pop(sequence.content, 0)
        self._cached_blocks -= held
        if held > most:  # the rest stays cached
            self._cache[sequence.content] = held - most
            self._cached_blocks += held - most
        used = min(held, most)
        # Blocks can be found as soon as the sequence that fills them is scheduled. They are shared then; counting them
        # for both is on the safe side.
        running = self._filling.get(sequence.content, 0)
        if sequence.common < sequence.prompt_tokens:
            same = (s.computed for s in self._running.values() if s.content == sequence.content)
            running = max(running, *same)
        shared = min(most, running // block_size)
        sequence.from_cache = used
        sequence.blocks = max(used, shared)
        sequence.computed = sequence.cached = sequence.blocks * block_size
        self._take(sequence.blocks)

    def _give_back(self, sequence: _Sequence) -> None:
        self._free_blocks += sequence.blocks
        sequence.blocks = 0
        if sequence.content is None:
            return
        block_size = self.config.block_size
        rest = self._cache.pop(sequence.content, 0)  # cached beyond what the sequence took from the cache
        self._cached_blocks -= rest
        full = min(sequence.computed, sequence.common) // block_size
        full = min(max(full, sequence.from_cache + rest), self._free_blocks - self._cached_blocks)
        if full > 0:
            self._cache[sequence.content] = full
            self._cached_blocks += full
