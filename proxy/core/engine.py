"""What we believe about one engine, from nothing but the tokens that it streams to us.

An engine does not tell when its steps end or how far a prefill has come. But a stock vLLM gives each running decode
exactly one token per step, so the stream that has seen the most tokens is a clock: when it gets its next token, a step
has ended. In that step the engine had ``budget - decodes`` tokens to spend on prompts, and it spends them in the order
of release. That is enough to know how many released prompt tokens it has still to work on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from proxy.core.backoff import BackOff
from proxy.core.blame import Blame, blame
from proxy.core.feedback import FeedbackDelay
from proxy.core.forecast import Forecast, foresee, spread
from proxy.core.growth import KvOutlook, OutputLengths
from proxy.core.health import Condition, Health, HealthConfig
from proxy.core.hitrate import HitRate
from proxy.core.selfreport import EngineReport, SelfReports
from proxy.core.steplog import Prefill, StepLog
from proxy.core.stepmodel import OnlineStepModel, StepLoad

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.core.limits import EngineLimits


@dataclass(slots=True)
class _Stream:
    """A decode in flight. ``step`` is the clock's reading when its latest token came."""

    context: int
    step: int
    tbt_seconds: float | None


_STEP_SECONDS_PRIOR = 0.03
_STEP_SECONDS_WEIGHT = 0.1
_STEP_SECONDS_OUTLIER = 4
"""A step counts as at most this many usual ones: a stall is no reason to expect the next."""

_PATIENCE_STEPS = 3
"""How many usual steps the clock may be silent before steps are assumed to go by unseen (a stall, a preemption)."""


class EngineBelief:
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
        self.id = engine_id
        self.limits = limits
        self.models = models
        self.number = number
        """Of all joinings ever: tells an engine from an earlier one of its id, and breaks ties between equal ones."""
        self.delay = FeedbackDelay(feedback_seconds)
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
        self.step_seconds = _STEP_SECONDS_PRIOR
        """Moving average of the time between two observed step ends."""
        self.model = OnlineStepModel()
        """What its steps take, by their content."""
        self.outputs = OutputLengths() if outputs is None else outputs
        """Lengths of outputs of any kind."""
        self.reports = SelfReports()
        self.hit_rate = HitRate()
        """Whether slices that it was sent are still cached when the next one comes."""
        self.kv_tokens = 0
        """Context of all streams and prompts of all prefills: what the engine needs once it has begun them all."""
        self.backlog = 0
        """Released prompt tokens that the engine has not worked on yet."""
        self._clock = 0  # the most tokens that any stream has seen, and so the steps that we saw end
        self._step = 0  # number of the step under way, seen or assumed
        self._step_began_at = 0.0
        self._silent = False  # steps have been assumed since the last that we saw end
        self._prefills: dict[str, Prefill] = {}  # in order of release
        self._streams: dict[str, _Stream] = {}
        self._stream_context = 0
        self._log = StepLog(self.delay)
        self._deadlines: Counter[float] = Counter()  # TBT deadlines of prefills and streams
        self._held: dict[str, int] = {}  # cached prefixes of prompts that are still being sliced, in tokens
        self._outlook = KvOutlook()
        self._siblings: dict[str, int] = {}  # answers beyond the first, of requests that ask for several
        self.siblings = 0
        """All of those."""
        self.passing = 0
        """Requests that it was given past the queue: no generation, but load."""

    def __repr__(self) -> str:
        state = "leaving" if self.leaving else "up" if self.up else "down"
        work = f"{len(self._prefills)} prefills, {self.decodes} decodes, {self.backlog} backlog"
        return f"<Engine {self.id} {state}: {work}>"

    @property
    def decodes(self) -> int:
        return len(self._streams)

    @property
    def outstanding(self) -> int:
        """Sequences released to it and not over."""
        return len(self._prefills) + len(self._streams)

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
    def prefill_budget(self) -> int:
        """Prompt tokens that fit in its next step beside one token of every decode."""
        return max(1, self.limits.token_budget - len(self._streams) - self.siblings - self.reports.foreign)

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

    def lead_tokens(self) -> int:
        """Prompt tokens that it works through before it can have what we release now (at least one step's)."""
        steps = max(1, ceil(self.delay.seconds / max(self.step_seconds, 1e-6))) + self.delay.steps
        return self.prefill_budget * steps

    def estimated_wait_seconds(self, prompt_tokens: int) -> float:
        """Time until a prompt released now would have its first token, by the current step time."""
        return (self.backlog + prompt_tokens) / self.prefill_budget * self.step_seconds

    @property
    def step(self) -> int:
        """Number of the step under way, seen or assumed."""
        return self._step

    def untaken(self) -> int:
        """Released prompt tokens that are not part of the step under way either."""
        return self.backlog - self._loads()[0].prefill_tokens

    def forecast(self, now: float, *, soonest: bool = False) -> Forecast:
        """What is in the step under way and, of what has been released, in those to come, each with all decodes.

        ``soonest``: if everything on its way arrives as soon as it can.
        """
        return foresee(self._loads(soonest=soonest), self.model, self._step_began_at, now)

    def intake(self, released_at: float, now: float) -> range:
        """The steps, counted from the one under way, any of which may take in what was released then."""
        late = self._intake(self.forecast(now), released_at)
        soon = self._intake(self.forecast(now, soonest=True), released_at)
        return range(min(late.start, soon.start), max(late.stop, soon.stop))

    def _intake(self, forecast: Forecast, released_at: float) -> range:
        delay = self.delay
        error_seconds = self.model.margin_seconds(forecast.loads[0])
        return forecast.intake(
            released_at + delay.least_seconds, released_at + delay.seconds, delay.steps, error_seconds
        )

    def _loads(self, *, soonest: bool = False) -> list[StepLoad]:
        joining = ((p, p.may_join if soonest else p.joins) for p in self._prefills.values())
        return spread(joining, self._step, self.prefill_budget, len(self._streams), self._stream_context)

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
        if streamed and not self._shows_work():
            self.health.progress_at = now
        self.health.release(request_id, now)
        if sequences > 1:
            self._siblings[request_id] = sequences - 1
            self.siblings += sequences - 1
        self._outlook.add(request_id, prompt_tokens, self.outputs if outputs is None else outputs, max_tokens)
        held = self._held.pop(request_id, 0)
        cached = max(0, cached_tokens - held)
        self._add_prefill(request_id, prompt_tokens - held - cached, prompt_tokens, now, tbt_seconds, streamed=streamed)
        self.kv_tokens += cached
        if tbt_seconds is not None:
            self._deadlines[tbt_seconds] += 1

    def release_slice(self, request_id: str, slice_id: str, upto_tokens: int, now: float) -> None:
        """Note that the first ``upto_tokens`` of a prompt are sent to it, to be cached."""
        if not self._shows_work():
            self.health.progress_at = now
        held = self._held.get(request_id, 0)
        self._add_prefill(slice_id, upto_tokens - held, upto_tokens, now, of=request_id)
        self._held[request_id] = upto_tokens

    def held_tokens(self, request_id: str) -> int:
        """Prompt tokens of which it was sent the slices."""
        return self._held.get(request_id, 0)

    def drop_slices(self, request_id: str) -> None:
        """Forget the cached prefix of a prompt that will not be completed here."""
        self.kv_tokens -= self._held.pop(request_id, 0)

    def on_slice_end(self, slice_id: str, now: float) -> bool:
        """Note the end of a slice; whether it tells that a step has ended. Its KV cache stays with the request."""
        prefill = self._prefills.pop(slice_id, None)
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
        if health.condition is Condition.STALLED:
            health.progress(now)
        stream = self._streams.get(request_id)
        if stream is None:
            health.first_token(request_id, now)
            prefill = self._prefills.pop(request_id)
            self._on_output(prefill, now)
            if not self._streams:  # no stream keeps the clock, but a step ends with every first token
                self._next_step(1, now)
            context = prefill.context + chunks
            self._streams[request_id] = _Stream(context, self._clock, prefill.tbt_seconds)
            self._stream_context += context
            return True
        stream.context += chunks
        self._stream_context += chunks
        stream.step += chunks
        steps = stream.step - self._clock
        if steps <= 0:
            return False
        self._clock = stream.step
        self._silent = False
        seconds = (now - self._step_began_at) / steps
        self._learn_step_seconds(seconds)
        self._next_step(steps, now, observed=steps == 1)
        return True

    def blame(self, gap_seconds: float, tbt_seconds: float, chunks: int, now: float) -> Blame:
        """Say why a stream waited for ``gap_seconds`` until ``now`` for ``chunks`` chunks, longer than it was to."""
        return blame(self._log.since(now - gap_seconds), gap_seconds, tbt_seconds, chunks, self.model)

    def context_tokens(self, request_id: str) -> int:
        """Tokens of a released request so far, prompt and output; 0 while no token of it has come."""
        return stream.context if (stream := self._streams.get(request_id)) is not None else 0

    def end(self, request_id: str, now: float, tokens: int | None = None) -> None:
        """Forget a request, whatever state it is in. ``tokens``: length of an answer that came in one piece."""
        tbt_seconds: float | None = None
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
        elif (prefill := self._prefills.pop(request_id, None)) is not None:
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

    def silent_until(self) -> float | None:
        """When the clock, if it stays silent, is no longer believed; ``None`` while there is no backlog to work on."""
        return self._step_began_at + self._patience_seconds() if self.backlog else None

    def assume_steps(self, now: float) -> None:
        """Let the steps pass that must have ended by ``now`` although no token told of them.

        Answers that are not streamed and prompts before the first token are silent. To take their backlog for
        untouched would leave the engine idle; to take it for done too early only loosens the gate.
        """
        # The first comparison spares the second most of the time: no step is expected to be shorter than usual.
        while self.backlog and now >= self._step_began_at + self.step_seconds * self._patience_steps():
            if now < self._step_began_at + self._patience_seconds():
                return
            expected = self._step_expected_seconds()
            steps = max(1, int((now - self._step_began_at) / expected))
            self._silent = True
            for prefill in self._prefills.values():
                prefill.tells_delay = False
            self._next_step(steps, self._step_began_at + steps * expected)

    def _patience_seconds(self) -> float:
        return self._step_expected_seconds() * self._patience_steps()

    def _patience_steps(self) -> int:
        # Without a stream nothing tells of a step's end, so there is nothing to be patient for.
        return _PATIENCE_STEPS if self._streams else 1

    def _step_expected_seconds(self) -> float:
        """How long the step under way should take, if it has taken in all that was released."""
        loads = self._loads()
        everything = loads[0]._replace(
            prefill_tokens=min(self.prefill_budget, sum(load.prefill_tokens for load in loads)),
            attention=sum(load.attention for load in loads),
            prefills=sum(load.prefills for load in loads),
        )
        return max(self.step_seconds, self.model.predict(everything))

    def _add_prefill(
        self,
        key: str,
        tokens: int,
        context: int,
        now: float,
        tbt_seconds: float | None = None,
        *,
        streamed: bool = True,
        of: str | None = None,
    ) -> None:
        joins, may_join = self._joins(now, now)
        tells_delay = (
            bool(self._streams)
            and not self._silent
            and self.untaken() + tokens <= self.prefill_budget
            and not any(p.doubts for p in self._prefills.values())  # what keeps those may keep this one
        )
        if not self.outstanding:  # idle: this prompt itself begins the next step
            joins = may_join = self._step
            self._step_began_at = now
        elif not self.backlog and now >= self._step_began_at + self._patience_seconds():
            self._step_began_at = now  # silent, and for long: nobody knows when the step under way began
        self._prefills[key] = Prefill(
            tokens, joins, may_join, now, context, tbt_seconds, streamed, tells_delay, of or key
        )
        self.kv_tokens += tokens
        self.backlog += tokens

    def _on_output(self, prefill: Prefill, now: float) -> None:
        self.backlog -= prefill.remaining
        prefill.over = True
        self._log.on_output(prefill, now)

    def _learn_step_seconds(self, seconds: float) -> None:
        bounded = min(max(seconds, 1e-6), _STEP_SECONDS_OUTLIER * self.step_seconds)
        self.step_seconds += _STEP_SECONDS_WEIGHT * (bounded - self.step_seconds)

    def _next_step(self, count: int, now: float, *, observed: bool = False) -> None:
        """``count`` steps have ended, the last one now: account for the prompt tokens worked on in them."""
        self._step += count
        judged = self._log.next_step(
            self._step_began_at, now, len(self._streams), self._stream_context, self._step + 1, observed=observed
        )
        if judged.load is not None:
            self.model.observe(judged.load, judged.seconds)
        self.backlog += judged.undone
        self._step_began_at = now
        budget = self.prefill_budget * count - judged.spent
        for prefill in self._prefills.values():
            present = min(count, self._step - prefill.joins)
            worked_on = min(prefill.remaining, budget, self.prefill_budget * present)
            if worked_on > 0:
                self._log.add(prefill, worked_on)
                self.backlog -= worked_on
                budget -= worked_on
        self.backlog += self._log.doubt(self.model, self._step + 1)
        composed = self._step + self.delay.steps
        for prefill in self._prefills.values():
            if prefill.joins >= composed and not prefill.doubts:  # until now it may have missed this step
                prefill.joins, soonest = self._joins(prefill.released_at, now)
                prefill.may_join = max(self._step, min(soonest, prefill.may_join))  # the step under way may have it

    def _joins(self, released_at: float, now: float) -> tuple[int, int]:
        """The first step believed to work on what was released then, and the first that may."""
        steps = self.intake(released_at, now)
        return self._step + steps[-1], self._step + steps[0]
