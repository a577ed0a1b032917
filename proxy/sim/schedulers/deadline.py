"""Our own scheduler for the inside of an engine: what SLAI becomes with a step model."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from proxy.sim.schedulers.base import DUE
from proxy.sim.schedulers.sarathi import ShortestRemainingFirst

if TYPE_CHECKING:
    from proxy.sim.engine import EngineConfig
    from proxy.sim.kvcache import KvCache, Sequence
    from proxy.sim.schedulers.base import Batch

_ROUNDING = 1e-9
"""Seconds, by far more than floating-point sums in another order differ by."""


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
        self._streams: dict[str, Sequence] = {}  # whose next token is ``due``
        self._limit = 0.0  # how long the step being composed may last
        self._attention = 0.0
        self._kv_tokens = 0
        self._decodes = 0
        self._prompt_tokens = 0

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._streams.pop(sequence.id, None)

    def choose(self) -> Batch:
        self.admitted, preempted = [], self.preemptions
        self._attention, self._kv_tokens, self._decodes, self._prompt_tokens = 0.0, 0, 0, 0
        batch: Batch = []
        streams = sorted(self._streams.values(), key=DUE)
        critical = self._critical(streams)
        budget = self._decode(streams[:critical], batch, self.config.token_budget)
        if self._in_time(0, 1):
            budget = self.fill(batch, budget, may_admit=self.preemptions == preempted)
        others = streams[critical:]
        if not batch:  # nothing else to do, and budget for all of them
            self._decode(others, batch, budget)
            return batch
        sure, rest = self._split(others)
        budget = self._decode(sure, batch, budget, may_preempt=False)
        if rest and not self._none_in_time(rest):
            for sequence in rest:
                if self._seconds_with(1, sequence.computed) <= self._limit:
                    budget = self._decode([sequence], batch, budget, may_preempt=False)
        return batch

    def prefill(self, sequence: Sequence, batch: Batch, budget: int) -> int:
        computed = sequence.computed
        tokens = super().prefill(sequence, batch, min(budget, self._room(computed, sequence.known - computed)))
        self._prompt_tokens += tokens
        self._attention += tokens * (computed + tokens / 2)
        return tokens

    def on_step_end(self, batch: Batch, seconds: float) -> None:
        super().on_step_end(batch, seconds)
        clock, default, margin = self.clock, self._DEFAULT_TBT_SECONDS, self.MARGIN_SECONDS
        begins = len(self.running) > len(self._streams)  # perhaps
        for sequence, _ in batch:
            if sequence.decoding and sequence.alive:
                if begins:
                    self._streams[sequence.id] = sequence
                tbt = sequence.tbt_seconds
                sequence.due = clock + (default if tbt is None else tbt) - margin

    def prefills(self) -> list[Sequence]:
        return super().prefills() if len(self.running) > len(self._streams) else []

    def _decode(self, streams: list[Sequence], batch: Batch, budget: int, *, may_preempt: bool = True) -> int:
        """Add the next tokens of these, as far as the budget goes; return what is left of it."""
        size, kv, running = self.kv.block_size, self.kv, self.running
        left = budget
        for sequence in streams:
            if left <= 0:
                break
            if sequence.computed < sequence.blocks * size:  # a short cut of what ``decode`` does
                batch.append((sequence, 1))
            elif sequence.id not in running or not (may_preempt or kv.free) or not self.decode(sequence, batch):
                continue  # it has no KV cache, or gets no more
            left -= 1
            self._kv_tokens += sequence.computed
        self._decodes += budget - left
        return left

    def _critical(self, streams: list[Sequence]) -> int:
        """Set how long the step may last; return how many streams must be in it, of all in the order of due times."""
        kv = self.kv
        least = self._seconds(0, 0, len(streams), sum([s.computed for s in streams]))
        slack = streams[0].due - self.clock if streams else self.LONGEST_STEP_SECONDS
        self._limit = max(least, min(self.LONGEST_STEP_SECONDS, slack))
        full = kv.blocks - kv.free >= self._NEARLY_FULL * kv.blocks
        if full or (self.waiting and not self.fits(self.waiting[0])):
            return len(streams)
        return bisect_left(streams, self.clock + 2 * self._limit, key=DUE)

    def _split(self, streams: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Those, from the first on, that the step has time for together; and the rest, for some of which it may."""
        limit = self._limit - _ROUNDING
        if not streams or self._seconds_with(len(streams), sum([s.computed for s in streams])) <= limit:
            return streams, []
        if self._none_in_time(streams):
            return [], []
        computed = list(accumulate([s.computed for s in streams]))
        low, high = 0, len(streams) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._seconds_with(middle, computed[middle - 1]) <= limit:
                low = middle
            else:
                high = middle - 1
        return streams[:low], streams[low:]

    def _none_in_time(self, streams: list[Sequence]) -> bool:
        return self._seconds_with(1, min([s.computed for s in streams])) > self._limit + _ROUNDING

    def _seconds_with(self, decodes: int, computed: int) -> float:
        """How long the step lasts with so many streams more, of which so many tokens together are computed."""
        return self._seconds(self._prompt_tokens, self._attention, self._decodes + decodes, self._kv_tokens + computed)

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
