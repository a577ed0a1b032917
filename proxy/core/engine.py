"""What we believe about one engine, from nothing but the tokens that it streams to us.

An engine does not tell when its steps end or how far a prefill has come. But a stock vLLM gives each running decode
exactly one token per step, so the stream that has seen the most tokens is a clock: when it gets its next token, a step
has ended. In that step the engine had ``budget - decodes`` tokens to spend on prompts, and it spends them in the order
of release. That is enough to know how many released prompt tokens it has still to work on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """An engine's own limits. They are launch flags that vLLM exposes only in part, hence configured or scraped."""

    token_budget: int = 2048
    """Tokens per step (``--max-num-batched-tokens``). Too large a value only makes the gate looser."""
    max_num_seqs: int = 256
    kv_tokens: int | None = None
    """Size of the KV cache in tokens; ``None`` while unknown: then the KV gate is open."""

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.max_num_seqs < 1 or (self.kv_tokens is not None and self.kv_tokens < 1):
            raise ValueError("an engine's limits are at least 1")


@dataclass(slots=True)
class _Prefill:
    """A released prompt whose first token has not come yet."""

    prompt_tokens: int
    remaining: int
    released_at: float


@dataclass(slots=True)
class _Stream:
    """A decode in flight."""

    context: int
    step: int


_STEP_SECONDS_PRIOR = 0.03
_STEP_SECONDS_WEIGHT = 0.1


class EngineBelief:
    """One engine as the scheduler sees it. Every request released to it is in exactly one of prefills, streams."""

    def __init__(self, engine_id: str, limits: EngineLimits, models: frozenset[str], number: int) -> None:
        self.id = engine_id
        self.limits = limits
        self.models = models
        self.number = number
        """Position in the order of joining; breaks ties between equal engines."""
        self.up = True
        self.closed_until: float | None = None
        """Nothing is released to it before this time; set when it turned a request away."""
        self.step_seconds = _STEP_SECONDS_PRIOR
        """Moving average of the time between two observed step ends."""
        self.kv_tokens = 0
        """Context of all streams and prompts of all prefills: what the engine needs once it has begun them all."""
        self.backlog = 0
        """Released prompt tokens that the engine has not worked on yet."""
        self.steps = 0
        self._step_ended_at: float | None = None
        self._prefills: dict[str, _Prefill] = {}  # in order of release
        self._streams: dict[str, _Stream] = {}

    def __repr__(self) -> str:
        state = "up" if self.up else "down"
        return f"<Engine {self.id} {state}: {len(self._prefills)} prefills, {self.decodes} decodes, {self.backlog} backlog>"

    @property
    def decodes(self) -> int:
        return len(self._streams)

    @property
    def outstanding(self) -> int:
        """Requests released to it and not over."""
        return len(self._prefills) + len(self._streams)

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens that fit in its next step beside one token of every decode."""
        return max(1, self.limits.token_budget - len(self._streams))

    def serves(self, model: str) -> bool:
        return not model or not self.models or model in self.models

    def release(self, request_id: str, prompt_tokens: int, now: float) -> None:
        """Note that a prompt is sent to it."""
        if not self.outstanding:
            self._step_ended_at = None  # it was idle: no step is under way
        self._prefills[request_id] = _Prefill(prompt_tokens, prompt_tokens, now)
        self.kv_tokens += prompt_tokens
        self.backlog += prompt_tokens

    def on_tokens(self, request_id: str, chunks: int, now: float) -> bool:
        """Note ``chunks`` token-bearing chunks of a released request; whether they tell that a step has ended."""
        stream = self._streams.get(request_id)
        if stream is None:
            prefill = self._prefills.pop(request_id)
            self.backlog -= prefill.remaining
            self.kv_tokens += chunks
            if not self._streams:  # no stream kept the clock, but a step ends with every first token
                self._step_ended_at = now
            self._streams[request_id] = _Stream(prefill.prompt_tokens + chunks, self.steps)
            return True
        stream.context += chunks
        self.kv_tokens += chunks
        # A stream that fell behind (preempted, or joined just before the others' tokens of the same step were
        # read) must not hold the clock back once the leaders are gone: it is never more than one step behind.
        stream.step = max(stream.step + chunks, self.steps - 1)
        if stream.step <= self.steps:
            return False
        self._on_steps(stream.step - self.steps, now)
        self.steps = stream.step
        return True

    def end(self, request_id: str) -> None:
        """Forget a request, whatever state it is in."""
        if (stream := self._streams.pop(request_id, None)) is not None:
            self.kv_tokens -= stream.context
        elif (prefill := self._prefills.pop(request_id, None)) is not None:
            self.kv_tokens -= prefill.prompt_tokens
            self.backlog -= prefill.remaining

    def _on_steps(self, count: int, now: float) -> None:
        began_at = self._step_ended_at
        self._step_ended_at = now
        if began_at is None:
            return
        self.step_seconds += _STEP_SECONDS_WEIGHT * ((now - began_at) / count - self.step_seconds)
        budget = self.prefill_budget * count
        for prefill in self._prefills.values():
            if prefill.released_at >= began_at:
                break  # it came during this step and is taken in by the next; so are all behind it
            worked_on = min(prefill.remaining, budget)
            prefill.remaining -= worked_on
            self.backlog -= worked_on
            budget -= worked_on
            if not budget:
                break

    def lead_tokens(self, feedback_seconds: float) -> int:
        """Prompt tokens that it works through before it can have what we release now (at least one step's)."""
        return self.prefill_budget * max(1, ceil(feedback_seconds / max(self.step_seconds, 1e-6)))

    def estimated_wait_seconds(self, prompt_tokens: int) -> float:
        """Time until a prompt released now would have its first token, by the current step time."""
        return (self.backlog + prompt_tokens) / self.prefill_budget * self.step_seconds
