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
    joins: int
    """The first step that can work on it: the one after the step under way when it was released."""
    released_at: float


@dataclass(slots=True)
class _Stream:
    """A decode in flight. ``step`` is the clock's reading when its latest token came."""

    context: int
    step: int


_STEP_SECONDS_PRIOR = 0.03
_STEP_SECONDS_WEIGHT = 0.1

_PATIENCE_STEPS = 3
"""How many usual steps the clock may be silent before steps are assumed to go by unseen (a stall, a preemption)."""


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
        self._clock = 0  # the most tokens that any stream has seen, and so the steps that we saw end
        self._step = 0  # number of the step under way, seen or assumed
        self._step_began_at = 0.0
        self._prefills: dict[str, _Prefill] = {}  # in order of release
        self._streams: dict[str, _Stream] = {}

    def __repr__(self) -> str:
        state = "up" if self.up else "down"
        work = f"{len(self._prefills)} prefills, {self.decodes} decodes, {self.backlog} backlog"
        return f"<Engine {self.id} {state}: {work}>"

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

    def lead_tokens(self, feedback_seconds: float) -> int:
        """Prompt tokens that it works through before it can have what we release now (at least one step's)."""
        return self.prefill_budget * max(1, ceil(feedback_seconds / max(self.step_seconds, 1e-6)))

    def estimated_wait_seconds(self, prompt_tokens: int) -> float:
        """Time until a prompt released now would have its first token, by the current step time."""
        return (self.backlog + prompt_tokens) / self.prefill_budget * self.step_seconds

    def release(self, request_id: str, prompt_tokens: int, now: float) -> None:
        """Note that a prompt is sent to it."""
        joins = self._step + 1
        if not self.outstanding:  # idle: this prompt itself begins the next step
            joins = self._step
            self._step_began_at = now
        self._prefills[request_id] = _Prefill(prompt_tokens, prompt_tokens, joins, now)
        self.kv_tokens += prompt_tokens
        self.backlog += prompt_tokens

    def on_tokens(self, request_id: str, chunks: int, now: float) -> bool:
        """Note ``chunks`` token-bearing chunks of a released request; whether they tell that a step has ended."""
        self.kv_tokens += chunks
        stream = self._streams.get(request_id)
        if stream is None:
            prefill = self._prefills.pop(request_id)
            self.backlog -= prefill.remaining
            if not self._streams:  # no stream keeps the clock, but a step ends with every first token
                self._next_step(1, now)
            self._streams[request_id] = _Stream(prefill.prompt_tokens + chunks, self._clock)
            return True
        stream.context += chunks
        # A stream that fell behind (preempted, or its first token was read before the others' of the same step)
        # must not hold the clock back once the leaders are gone: it is never more than one step behind.
        stream.step = max(stream.step + chunks, self._clock - 1)
        steps = stream.step - self._clock
        if steps <= 0:
            return False
        self._clock = stream.step
        self._learn_step_seconds((now - self._step_began_at) / steps)
        self._next_step(steps, now)
        return True

    def end(self, request_id: str, now: float, tokens: int | None = None) -> None:
        """Forget a request, whatever state it is in. ``tokens``: length of an answer that came in one piece."""
        if (stream := self._streams.pop(request_id, None)) is not None:
            self.kv_tokens -= stream.context
        elif (prefill := self._prefills.pop(request_id, None)) is not None:
            self.kv_tokens -= prefill.prompt_tokens
            self.backlog -= prefill.remaining
            if tokens:  # no token was seen, but this many steps must have gone by
                steps = tokens - 1 + ceil(prefill.prompt_tokens / self.limits.token_budget)
                self._learn_step_seconds((now - prefill.released_at) / max(1, steps))

    def silent_until(self) -> float | None:
        """When the clock, if it stays silent, is no longer believed; ``None`` while there is no backlog to work on."""
        if not self.backlog:
            return None
        # Without a stream nothing tells of a step's end, so there is nothing to be patient for.
        return self._step_began_at + self.step_seconds * (_PATIENCE_STEPS if self._streams else 1)

    def assume_steps(self, now: float) -> None:
        """Let the steps pass that must have ended by ``now`` although no token told of them.

        Answers that are not streamed and prompts before the first token are silent. To take their backlog for
        untouched would leave the engine idle; to take it for done too early only loosens the gate.
        """
        until = self.silent_until()
        if until is not None and now >= until:
            self._next_step(max(1, int((now - self._step_began_at) / self.step_seconds)), now)

    def _learn_step_seconds(self, seconds: float) -> None:
        self.step_seconds += _STEP_SECONDS_WEIGHT * (max(seconds, 1e-6) - self.step_seconds)

    def _next_step(self, count: int, now: float) -> None:
        """``count`` steps have ended, the last one now: account for the prompt tokens worked on in them."""
        self._step += count
        self._step_began_at = now
        budget = self.prefill_budget * count
        for prefill in self._prefills.values():
            present = min(count, self._step - prefill.joins)
            if present <= 0:
                break  # it came during this step, and so did all behind it
            worked_on = min(prefill.remaining, budget, self.prefill_budget * present)
            prefill.remaining -= worked_on
            self.backlog -= worked_on
            budget -= worked_on
