"""Our own scheduler for the inside of an engine: what SLAI becomes with a step model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.sim.schedulers.sarathi import ShortestRemainingFirst

if TYPE_CHECKING:
    from proxy.sim.engine import EngineConfig
    from proxy.sim.kvcache import KvCache, Sequence
    from proxy.sim.schedulers.base import Batch


class DeadlineScheduler(ShortestRemainingFirst):
    """The shortest remaining prompt first, and as much of it as the tightest TBT deadline in flight allows.

    A step may last until the first stream is due. Streams that would still be in time after another such step can be
    left out of this one: what they would have cost goes to prompts. Nobody is left out while that fills the KV cache:
    when it is nearly full, or when the next prompt does not fit. The step's duration comes from the engine's profile,
    which stands for a model that has been learnt; ``MARGIN`` is for what it does not foresee.
    """

    MARGIN_SECONDS = 0.003
    LONGEST_STEP_SECONDS = 0.1
    """However late the deadlines: a prompt that comes meanwhile waits for the step to end."""
    _NEARLY_FULL = 0.9
    _DEFAULT_TBT_SECONDS = 0.2

    def __init__(self, config: EngineConfig, kv: KvCache) -> None:
        super().__init__(config, kv)
        self._model = config.profile.step
        self._due: dict[str, float] = {}  # when each stream's next token is
        self._limit = 0.0  # how long the step being composed may last
        self._attention = 0.0
        self._kv_tokens = 0
        self._decodes = 0
        self._prompt_tokens = 0

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._due.pop(sequence.id, None)

    def choose(self) -> Batch:
        self.admitted, preempted = [], self.preemptions
        self._attention, self._kv_tokens, self._decodes, self._prompt_tokens = 0.0, 0, 0, 0
        batch: Batch = []
        streams = sorted(self._due, key=self._due.__getitem__)
        critical = self._critical(streams)
        for sequence_id in streams[:critical]:
            if sequence_id in self.running:
                self.decode(self.running[sequence_id], batch)
        budget = self.config.token_budget - self._decodes
        if self._in_time(0, 1):
            budget = self.fill(batch, budget, may_admit=self.preemptions == preempted)
        nothing_else = not batch
        for sequence_id in streams[critical:]:
            sequence = self.running.get(sequence_id)
            if sequence is None or budget <= 0 or not (nothing_else or self._fits_in_time(sequence)):
                continue
            budget -= self.decode(sequence, batch)
        return batch

    def decode(self, sequence: Sequence, batch: Batch) -> int:
        done = super().decode(sequence, batch)
        self._decodes += done
        self._kv_tokens += done * sequence.computed
        return done

    def prefill(self, sequence: Sequence, batch: Batch, budget: int) -> int:
        computed = sequence.computed
        tokens = super().prefill(sequence, batch, min(budget, self._room(computed, sequence.known - computed)))
        self._prompt_tokens += tokens
        self._attention += tokens * (computed + tokens / 2)
        return tokens

    def on_step_end(self, batch: Batch, seconds: float) -> None:
        super().on_step_end(batch, seconds)
        for sequence, _ in batch:
            if sequence.alive and sequence.decoding:
                tbt = self._DEFAULT_TBT_SECONDS if sequence.tbt_seconds is None else sequence.tbt_seconds
                self._due[sequence.id] = self.clock + tbt - self.MARGIN_SECONDS

    def _critical(self, streams: list[str]) -> int:
        """Set how long the step may last; return how many streams must be in it, of all in the order of due times."""
        kv = self.kv
        least = self._seconds(0, 0, len(streams), sum(self.running[s].computed for s in streams))
        slack = self._due[streams[0]] - self.clock if streams else self.LONGEST_STEP_SECONDS
        self._limit = max(least, min(self.LONGEST_STEP_SECONDS, slack))
        full = kv.blocks - kv.free >= self._NEARLY_FULL * kv.blocks
        if full or (self.waiting and not self.fits(self.waiting[0])):
            return len(streams)
        until = self.clock + 2 * self._limit
        return sum(self._due[s] < until for s in streams)

    def _fits_in_time(self, sequence: Sequence) -> bool:
        kv_tokens = self._kv_tokens + sequence.computed
        has_block = self.kv.blocks_for(sequence.computed + 1) - sequence.blocks <= self.kv.free
        seconds = self._seconds(self._prompt_tokens, self._attention, self._decodes + 1, kv_tokens)
        return has_block and seconds <= self._limit

    def _room(self, computed: int, most: int | None = None) -> int:
        """How many tokens of a prompt, of which so many are computed, the step has time for."""
        low, high = 0, self.config.token_budget if most is None else most
        if self._in_time(computed, high):
            return high
        while low < high:
            tokens = (low + high + 1) // 2
            if self._in_time(computed, tokens):
                low = tokens
            else:
                high = tokens - 1
        return low

    def _in_time(self, computed: int, tokens: int) -> bool:
        """Whether the step can have so many tokens more of a prompt."""
        attention = self._attention + tokens * (computed + tokens / 2)
        return self._seconds(self._prompt_tokens + tokens, attention, self._decodes, self._kv_tokens) <= self._limit

    def _seconds(self, prompt_tokens: int, attention: float, decodes: int, kv_tokens: int) -> float:
        return self._model.seconds(
            prefill_tokens=prompt_tokens,
            sequences=decodes + bool(prompt_tokens),
            decodes=decodes,
            kv_tokens=kv_tokens,
            attention=attention,
        )
