"""What we believe about one engine, from nothing but the tokens that it streams to us.

When its steps end and what is in them is the affair of its clock (``stepclock``). Here is the rest: whether it may be
used, what it was sent, and what that takes of its KV cache.
"""

from __future__ import annotations

from collections import Counter, deque
from math import ceil
from typing import TYPE_CHECKING, Any

from proxy.core.backoff import BackOff
from proxy.core.copying import share
from proxy.core.growth import KvOutlook, OutputLengths
from proxy.core.health import Condition, Health, HealthConfig
from proxy.core.hitrate import HitRate
from proxy.core.stepclock import StepClock, Stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.core.limits import EngineLimits
    from proxy.core.plugin import PluginPolicy
    from proxy.core.selfreport import EngineReport

_STALLED = Condition.STALLED  # looked up in its class it would take five times as long, for every token
_RATE_PROMPTS = 32
"""Over so many prompts the rate is taken at which they come."""
_RATE_KNOWN = 8
"""It takes so many to tell one."""


class EngineBelief(StepClock):
    """One engine as the scheduler sees it. Every request released to it is in exactly one of prefills, streams."""

    def __init__(
        self,
        engine_id: str,
        limits: EngineLimits,
        models: frozenset[str],
        number: int,
        feedback_seconds: float = 0.005,
        *,
        outputs: OutputLengths | None = None,
        health: HealthConfig | None = None,
    ) -> None:
        super().__init__(limits, feedback_seconds)
        self.id = engine_id
        self.models = models
        self.plugin: PluginPolicy | None = None
        """Which of our rules its own scheduler goes by; ``None``: it is vLLM's."""
        self.number = number
        """Of all joinings ever: tells an engine from an earlier one of its id, and breaks ties between equal ones."""
        self.up = True
        self.leaving = False
        """It has been removed: only what it has already is still ours."""
        self.leaves_at: float | None = None
        """When what it still has then is cut."""
        self.closed_until: float | None = None
        """Nothing is released to it before this time; set when it turned a request away."""
        self.back_off = BackOff()
        self.restarts = 0
        """How often it started anew while it was taken to be up."""
        self.health = Health(health or HealthConfig())
        self.outputs = OutputLengths() if outputs is None else outputs
        """Lengths of outputs of any kind."""
        self.hit_rate = HitRate()
        """Whether slices that it was sent are still cached when the next one comes."""
        self.kv_tokens = 0
        """Context of all streams and prompts of all prefills: what the engine needs once it has begun them all."""
        self._deadlines: Counter[float] = Counter()  # TBT deadlines of prefills and streams
        self._held: dict[str, int] = {}  # cached prefixes of prompts that are still being sliced, in tokens
        self.slice_at: float | None = None
        """When the next slice goes to it, which is held until then as somebody shorter may come."""
        self.slice_held_in: int | None = None
        """The step in which it is held."""
        self._begun_at: deque[float] = deque(maxlen=_RATE_PROMPTS + 1)  # when its latest prompts were
        self._outlook = KvOutlook()
        self._siblings: dict[str, int] = {}  # answers beyond the first, of requests that ask for several
        self.passing = 0
        """Requests that it was given past the queue: no generation, but load."""

    def __repr__(self) -> str:
        state = "leaving" if self.leaving else "up" if self.up else "down"
        work = f"{len(self._prefills)} prefills, {self.decodes} decodes, {self.backlog} backlog"
        return f"<Engine {self.id} {state}: {work}>"

    def to_ask(self) -> EngineBelief:
        """Return a copy that answers as this one does. Whatever forecasts it makes for that, this one keeps its own.

        It shares the rest with this one, and so is of use until something happens.
        """
        copies: dict[OutputLengths, OutputLengths] = {}
        asked = EngineBelief(self.id, self.limits, self.models, self.number)
        share(self, asked)
        asked.outputs = self.outputs.to_ask(copies)
        asked._outlook = self._outlook.to_ask(copies)
        return asked

    @property
    def sliced(self) -> int:
        """Prompts of which it has a prefix, with the rest still to come."""
        return len(self._held)

    @property
    def deadlines(self) -> Mapping[float, int]:
        """The TBT deadlines of all that it works on, and how many have each."""
        return self._deadlines

    @property
    def strictest_tbt_seconds(self) -> float | None:
        """The tightest TBT deadline of all that it works on."""
        return min(self._deadlines) if self._deadlines else None

    @property
    def is_full(self) -> bool:
        """Whether all of its sequence slots are taken, by our requests or others'."""
        return self.outstanding + self.siblings + self.passing + self.reports.foreign >= self.limits.max_num_seqs

    def is_open(self, now: float) -> bool:
        """Whether anything may be released to it at all."""
        return self.up and (self.closed_until is None or now >= self.closed_until) and self.health.takes(now)

    def is_stalled(self, now: float) -> bool:
        """Whether it has work that would show, and has shown no progress for longer than that can take."""
        if self.health.may_be_silent(now) or not self._shows_work():
            return False
        wait = 0.0 if self._streams else self.estimated_wait_seconds(0)
        blind = not self.reports.tells_of_progress
        return now - self.health.progress_at >= self.health.silence_limit(
            self._step_expected_seconds(), wait, blind=blind
        )

    def _shows_work(self) -> bool:
        return bool(self._streams) or any(prefill.shows_first_token for prefill in self._prefills.values())

    def serves(self, model: str) -> bool:
        return not self.leaving and (not model or not self.models or model in self.models)

    @property
    def lets_short_pass(self) -> bool:
        """Whether its own scheduler lets prompts pass longer ones that it was given before."""
        return self.plugin is not None and self.plugin.lets_short_pass

    def would_begin(self, prompt_tokens: int) -> bool:
        """Whether its own scheduler would let such a prompt pass all that it still has to work on."""
        return self.lets_short_pass and all(
            prompt_tokens < prefill.remaining for prefill in self._prefills.values() if prefill.remaining
        )

    def has_kv_room(self, prompt_tokens: int, usable_tokens: float) -> bool:
        """Whether a prompt fits into so much KV cache beside all that runs, with the growth to be expected of both."""
        room = usable_tokens - self.reports.kv_error - self._partial_blocks() - sum(self._held.values())
        return self._outlook.fits(prompt_tokens, self.outputs, room, self._step, self._contexts)

    def on_report(self, report: EngineReport | None, now: float) -> None:
        """Take in what it says of itself; ``None``: it says nothing any more."""
        if report is None:
            self.reports.forget()
        else:
            if self.reports.tells_progress(report):
                self.health.progress(now)
            held = self.kv_tokens - self.untaken() + self._partial_blocks()
            self.reports.take(report, self.limits.kv_tokens, held, self.outstanding + self.siblings + self.passing, now)

    def _contexts(self) -> dict[str, int]:
        return {request_id: stream.context for request_id, stream in self._streams.items()}

    def _partial_blocks(self) -> int:
        """Tokens that would fit into the last blocks of its sequences, half a block of each on average."""
        return self.outstanding * self.limits.block_tokens // 2

    def release(
        self,
        request_id: str,
        prompt_tokens: int,
        now: float,
        tbt_seconds: float | None = None,
        *,
        streamed: bool = True,
        cached_tokens: int = 0,
        outputs: OutputLengths | None = None,
        max_tokens: int | None = None,
        sequences: int = 1,
    ) -> None:
        """Note that a prompt is sent to it, whole or after slices of it.

        ``cached_tokens`` of it are no work, but take room: cached blocks that nobody uses are free memory, and this
        takes them out of it. Those that a running sequence uses too are counted twice, which is on the safe side.
        ``outputs``: those of its kind, if known.
        """
        self.health.release(request_id, now)
        self._take(
            request_id,
            prompt_tokens,
            now,
            tbt_seconds,
            streamed=streamed,
            cached_tokens=cached_tokens,
            outputs=outputs,
            max_tokens=max_tokens,
            sequences=sequences,
        )

    def adopt(
        self, request_id: str, prompt_tokens: int, now: float, tbt_seconds: float | None, *, tokens: int, **more: Any
    ) -> None:
        """Note that it has a request already, with ``tokens`` of its answer; ``more`` as for ``release``.

        How much of a prompt without a token is left to do is not known: all of it is the safe side.
        """
        self._take(request_id, prompt_tokens, now, tbt_seconds, **more)
        prefill = self._prefills[request_id]
        prefill.tells_delay = False  # it came we do not know when
        if tokens:
            self._take_prefill(request_id)
            self.backlog -= prefill.remaining
            prefill.over = True
            self.kv_tokens += tokens
            self._streams[request_id] = Stream(prompt_tokens + tokens, self._clock, tbt_seconds)
            self._stream_context += prompt_tokens + tokens

    def _take(
        self,
        request_id: str,
        prompt_tokens: int,
        now: float,
        tbt_seconds: float | None,
        *,
        streamed: bool = True,
        cached_tokens: int = 0,
        outputs: OutputLengths | None = None,
        max_tokens: int | None = None,
        sequences: int = 1,
    ) -> None:
        if streamed and not self._shows_work():
            self.health.progress_at = now
        if sequences > 1:
            self._siblings[request_id] = sequences - 1
            self.siblings += sequences - 1
        self._outlook.add(request_id, prompt_tokens, self.outputs if outputs is None else outputs, max_tokens)
        held = self._held.pop(request_id, 0)
        if not held:
            self._begun_at.append(now)
        cached = max(0, cached_tokens - held)
        self._add_prefill(request_id, prompt_tokens - held - cached, prompt_tokens, now, tbt_seconds, streamed=streamed)
        self.kv_tokens += prompt_tokens - held
        if tbt_seconds is not None:
            self._deadlines[tbt_seconds] += 1

    def release_slice(self, request_id: str, slice_id: str, upto_tokens: int, now: float) -> None:
        """Note that the first ``upto_tokens`` of a prompt are sent to it, to be cached."""
        if not self._shows_work():
            self.health.progress_at = now
        held = self._held.get(request_id, 0)
        if not held:
            self._begun_at.append(now)
        self._add_prefill(slice_id, upto_tokens - held, upto_tokens, now, of=request_id)
        self.kv_tokens += upto_tokens - held
        self._held[request_id] = upto_tokens

    def prompts_per_second(self, now: float) -> float:
        """How often it has begun a new prompt lately; 1 as long as that is hardly known."""
        if len(self._begun_at) < _RATE_KNOWN:
            return 1.0
        return (len(self._begun_at) - 1) / max(now - self._begun_at[0], 1e-3)

    def held_tokens(self, request_id: str) -> int:
        """Prompt tokens of which it was sent the slices."""
        return self._held.get(request_id, 0)

    def drop_slices(self, request_id: str) -> None:
        """Forget the cached prefix of a prompt that will not be completed here."""
        self.kv_tokens -= self._held.pop(request_id, 0)

    def on_slice_end(self, slice_id: str, now: float) -> bool:
        """Note the end of a slice; whether it tells that a step has ended. Its KV cache stays with the request."""
        prefill = self._take_prefill(slice_id)
        if prefill is None:
            return False
        self.health.progress(now)
        self._on_output(prefill, now)
        if not self._streams:
            self._next_step(1, now)
            return True
        return False

    def on_tokens(self, request_id: str, chunks: int, now: float) -> bool:
        """Note ``chunks`` token-bearing chunks of a released request; whether they tell that a step has ended."""
        self.kv_tokens += chunks
        health = self.health
        health.progress_at = now
        if health.condition is _STALLED:
            health.progress(now)
        stream = self._streams.get(request_id)
        if stream is None:
            health.first_token(request_id, now)
            prefill = self._take_prefill(request_id)
            assert prefill is not None
            self._on_output(prefill, now)
            if not self._streams:  # no stream keeps the clock, but a step ends with every first token
                self._next_step(1, now)
            context = prefill.context + chunks
            stream = Stream(context, self._clock, prefill.tbt_seconds)
            if self._streams:
                self._newcomers.append((stream, now))
            self._streams[request_id] = stream
            self._stream_context += context
            return True
        stream.context += chunks
        self._stream_context += chunks
        stream.step += chunks
        steps = stream.step - self._clock
        if steps <= 0:
            return False
        self._clock = stream.step
        observed, self._silent = steps == 1 and not self._silent, False
        if observed:  # whatever was thought of it meanwhile
            self._step_began_at = self._step_ended_at
        if self._newcomers:
            self._place_newcomers(now)
        self._learn_step_seconds((now - self._step_began_at) / steps)
        self._next_step(steps, now, observed=observed)
        return True

    def context_tokens(self, request_id: str) -> int:
        """Tokens of a released request so far, prompt and output; 0 while no token of it has come."""
        return stream.context if (stream := self._streams.get(request_id)) is not None else 0

    def end(self, request_id: str, now: float, tokens: int | None = None, *, whole: bool = True) -> None:
        """Forget a request, whatever state it is in. ``tokens``: length of an answer that came in one piece.

        ``whole``: whether its output can be learnt from, as nothing more of it will come.
        """
        tbt_seconds: float | None = None
        if not whole:
            self._outlook.drop(request_id)
        if self._siblings:
            self.siblings -= self._siblings.pop(request_id, 0)
        if (stream := self._streams.pop(request_id, None)) is not None:
            self.kv_tokens -= stream.context
            self._stream_context -= stream.context
            self._outlook.end(request_id, stream.context)
            tbt_seconds = stream.tbt_seconds
            if self._streams and stream.step >= self._clock:
                # The leader is gone. Its successor's token of this same step may still be to come, so one step
                # behind is where it should be; if it is further behind (preempted), it must not stop the clock.
                self._clock = min(self._clock, 1 + max(s.step for s in self._streams.values()))
        elif (prefill := self._take_prefill(request_id)) is not None:
            self.kv_tokens -= prefill.context
            self.backlog -= prefill.remaining
            prefill.over = True
            self._outlook.end(request_id, prefill.context + (tokens or 0))
            tbt_seconds = prefill.tbt_seconds
            if tokens:  # no token was seen, but this many steps must have gone by
                steps = tokens - 1 + ceil(prefill.context / self.limits.token_budget)
                self._learn_step_seconds((now - prefill.released_at) / max(1, steps))
        if tbt_seconds is not None:
            self._deadlines[tbt_seconds] -= 1
            if not self._deadlines[tbt_seconds]:
                del self._deadlines[tbt_seconds]
