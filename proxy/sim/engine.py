"""A simulated vLLM engine: continuous batching, without the GPU.

Each step works on some tokens of some sequences, all within one token budget; which ones is the affair of its
scheduler (``proxy.sim.schedulers``), vLLM's own unless told otherwise. Pure: the caller owns the clock, and both faces
of the simulator (virtual time, HTTP) drive this one class.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from proxy.core.stepmodel import StepLoad
from proxy.sim.blockcache import BlockCache
from proxy.sim.kvcache import KvCache, Produced, Sequence
from proxy.sim.profiles import PROFILES, Jitter, Profile
from proxy.sim.schedulers import ENGINE_SCHEDULERS, Batch, EngineScheduler, EngineSchedulerName
from proxy.sim.schedulers.base import load_of

__all__ = ["EngineConfig", "Produced", "SimulatedEngine"]


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
    async_scheduling: bool = False
    """Whether each step is composed while the one before it runs (``--async-scheduling``, vLLM's default on GPUs): a
    prompt that comes during a step is taken in one step later."""
    scheduler: EngineSchedulerName | type[EngineScheduler] = EngineSchedulerName.VLLM
    """One of ours, or a class of somebody else's."""
    jitter: Jitter | None = None
    """By how much its steps differ from the profile's; ``None``: not at all."""

    def __post_init__(self) -> None:
        if min(self.token_budget, self.max_num_seqs, self.block_size) < 1 or not 0 <= self.watermark < 1:
            raise ValueError("budget, sequences and block size are at least 1, the watermark lies in [0, 1)")
        if self.token_budget < self.max_num_seqs:
            raise ValueError("the token budget must hold one token of every sequence")

    @property
    def blocks(self) -> int:
        return self.profile.kv_tokens // self.block_size


class SimulatedEngine:
    """One engine; see the module's docstring. ``start_step`` and ``finish_step`` alternate.

    ``seed`` is that of its jitter, ``cache`` how it finds prompts that begin alike.
    """

    def __init__(self, config: EngineConfig | None = None, seed: str = "", cache: type[KvCache] = KvCache) -> None:
        self.config = config or EngineConfig()
        self.steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.step_load = StepLoad(0, 0, 0)
        """What is in the step begun last; prompt tokens of a prefill that starts over count again."""
        self.smooth_seconds = 0.0
        """What the step begun last takes without jitter."""
        self.step_seconds = 0.0
        """What it takes."""
        self._kv = cache(self.config.blocks, self.config.block_size)
        kind = self.config.scheduler
        make = ENGINE_SCHEDULERS[kind] if isinstance(kind, EngineSchedulerName) else kind
        self._scheduler: EngineScheduler = make(self.config, self._kv)
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._batch: Batch | None = None
        self._late: list[Sequence] = []  # came after the next step had been composed
        self._jitter = random.Random(f"{seed}:jitter")

    def __repr__(self) -> str:
        return f"<SimulatedEngine running={self.running} waiting={self.waiting} kv={self.kv_tokens_used}>"

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._sequences) - self.running

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    @property
    def step_admitted(self) -> list[str]:
        """Sequences that the step begun last took in from the queue, first come first."""
        return self._scheduler.admitted

    @property
    def finds_blocks(self) -> bool:
        """Whether prompts with the same ``hashes`` find each other's blocks."""
        return isinstance(self._kv, BlockCache)

    def cached_tokens(self, sequence_id: str) -> int:
        """Return how many tokens of a sequence's prompt were found cached when it was taken in last.

        Raises:
            KeyError: there is no such sequence.
        """
        return self._sequences[sequence_id].cached

    @property
    def kv_tokens_used(self) -> int:
        """Tokens in allocated blocks; a block counts whole."""
        return (self._kv.blocks - self._kv.free) * self._kv.block_size

    def add(
        self,
        sequence_id: str,
        prompt_tokens: int,
        output_tokens: int,
        content: str | None = None,
        *,
        tbt_seconds: float | None = None,
        common: int = 0,
        hashes: tuple[bytes, ...] = (),
        ready: int = 0,
    ) -> None:
        """Queue a prompt. Prompts of the same ``content`` begin with the same tokens: one finds the other's blocks.

        Only the first ``common`` tokens are the content's, if that is given; then it also finds those that a running
        sequence holds. To a ``BlockCache`` only ``hashes`` matter, one for each full block of the prompt.
        ``tbt_seconds`` is for schedulers that know deadlines; vLLM's does not. With ``ready`` tokens, all of the prompt
        but its last, another engine has computed them, and they come with it (not to SLAI's scheduler).

        Raises:
            ValueError: the id is in use, a length is below one, or the whole sequence can never fit the KV cache.
        """
        if sequence_id in self._sequences:
            raise ValueError(f"sequence {sequence_id!r} exists already")
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a prompt and an output have at least one token")
        if ready not in (0, prompt_tokens - 1):
            raise ValueError("of a prompt that was begun elsewhere, all but the last token is ready")
        if prompt_tokens + output_tokens > self._kv.blocks * self._kv.block_size:
            raise ValueError(f"{prompt_tokens + output_tokens} tokens never fit into {self.config.profile.kv_tokens}")
        sequence = Sequence(
            sequence_id, prompt_tokens, output_tokens, content, tbt_seconds=tbt_seconds, common=common, hashes=hashes
        )
        self._sequences[sequence_id] = sequence
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.ready = ready
        if self.config.async_scheduling and self._batch is not None:
            self._late.append(sequence)
        else:
            self._scheduler.add(sequence)

    def abort(self, sequence_id: str) -> None:
        """Drop a sequence at once; its share of a step under way is lost. An unknown id is ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._drop(sequence)

    def start_step(self) -> float | None:
        """Choose the next batch and return the seconds that it takes; ``None`` when there is nothing to run."""
        if self._batch is not None:
            raise RuntimeError("the last step has not been finished")
        batch = self._scheduler.choose()
        self.step_load = load_of(batch)
        late, self._late = self._late, []
        for sequence in late:
            self._scheduler.add(sequence)
        if not batch:
            return self.start_step() if late else None  # with nothing else to run, nothing is composed ahead
        self._batch = batch
        self.steps += 1
        profile, load = self.config.profile, self.step_load
        self.smooth_seconds = profile.step.seconds(
            prefill_tokens=load.prefill_tokens,
            sequences=len(batch),
            decodes=load.decodes,
            kv_tokens=load.kv_tokens,
            attention=load.attention,
        )
        jitter = self.config.jitter
        self.step_seconds = self.smooth_seconds + (jitter.draw_seconds(self._jitter) if jitter else 0.0)
        return self.step_seconds

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
                self._drop(sequence)
        self.generation_tokens += len(produced)
        self._scheduler.on_step_end(batch, self.step_seconds)
        return produced

    def _drop(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        if sequence in self._late:
            self._late.remove(sequence)
        else:
            self._scheduler.remove(sequence)
        self._kv.take_back(sequence)
        sequence.alive = False
