"""The clock of one engine: which step it is in, since when, and what is in it and in those to come.

An engine does not tell when its steps end or how far a prefill has come. But a stock vLLM gives each running decode
exactly one token per step, so the stream that has seen the most tokens is a clock: when it gets its next token, a step
has ended. In that step the engine had ``budget - decodes`` tokens to spend on prompts, and it spends them in the order
of release. That is enough to know how many released prompt tokens it has still to work on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, repeat
from math import ceil, floor, inf
from typing import TYPE_CHECKING

from proxy.core.blame import Blame, blame
from proxy.core.feedback import FeedbackDelay
from proxy.core.forecast import HORIZON, Forecast, Spread, foresee, intake
from proxy.core.selfreport import SelfReports
from proxy.core.steplog import Prefill, StepLog
from proxy.core.stepmodel import OnlineStepModel, StepLoad

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.core.limits import EngineLimits


@dataclass(slots=True)
class Stream:
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


class StepClock:
    """Steps seen and assumed, and the prefills and streams that are in them. A base of ``EngineBelief``."""

    def __init__(self, limits: EngineLimits, feedback_seconds: float) -> None:
        self.limits = limits
        self.delay = FeedbackDelay(feedback_seconds)
        self.step_seconds = _STEP_SECONDS_PRIOR
        """Moving average of the time between two observed step ends."""
        self.model = OnlineStepModel()
        """What its steps take, by their content."""
        self.reports = SelfReports()
        self.backlog = 0
        """Released prompt tokens that the engine has not worked on yet."""
        self.siblings = 0
        """Answers beyond the first, of requests that ask for several."""
        self._clock = 0  # the most tokens that any stream has seen, and so the steps that we saw end
        self._step = 0  # number of the step under way, seen or assumed
        self._step_began_at = 0.0
        self._step_ended_at = 0.0  # that before it, seen or assumed
        self._silent = False  # steps have been assumed since the last that we saw end
        self._prefills: dict[str, Prefill] = {}  # in order of release
        self._streams: dict[str, Stream] = {}
        self._stream_context = 0
        self._spread_out: Spread | None = None
        self._soonest: Spread | None = None  # known whenever that is, and may be the same one
        self._newcomers: list[tuple[Stream, float]] = []  # since the last step that we saw end, and when
        self._log = StepLog(self.delay)

    @property
    def decodes(self) -> int:
        return len(self._streams)

    @property
    def outstanding(self) -> int:
        """Sequences released to it and not over."""
        return len(self._prefills) + len(self._streams)

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens that fit in its next step beside one token of every decode."""
        return max(1, self.limits.token_budget - len(self._streams) - self.siblings - self.reports.foreign)

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
        return self.backlog - self._spread().tokens[0] if self.backlog else 0

    def forecast(self, now: float, *, soonest: bool = False) -> Forecast:
        """What is in the step under way and, of what has been released, in those to come, each with all decodes.

        ``soonest``: if everything on its way arrives as soon as it can.
        """
        loads = self._loads(soonest=soonest)
        return Forecast(loads, list(foresee(loads, self.model, self._step_began_at, now)))

    def intake(self, released_at: float, now: float) -> range:
        """The steps, counted from the one under way, any of which may take in what was released then."""
        if not self.backlog:
            return self._intake(repeat(StepLoad(0, len(self._streams), self._stream_context)), released_at, now)
        spread, soonest = self._spread(), self._spread(soonest=True)
        late = self._intake(spread.loads(len(self._streams), self._stream_context), released_at, now)
        if soonest is spread:
            return late
        soon = self._intake(soonest.loads(len(self._streams), self._stream_context), released_at, now)
        return range(min(late.start, soon.start), max(late.stop, soon.stop))

    def last_call(self) -> float:
        """The last moment at which what is released still reaches the step that it would have reached just before.

        By when the step under way may end at the earliest. Over already where steps are shorter than the way there: a
        step that is not even under way may end at any time, and the next tile is on its way before one can see whether
        this one missed it. Rounded down to what a clock shows: a moment later is one step later.
        """
        model, soonest = self.model, inf
        for load in (self._loads()[0], self._loads(soonest=True)[0]):
            soonest = min(soonest, model.predict(load) - model.earliness_seconds(load))
        return floor(1e6 * (self._step_began_at + soonest - self.delay.seconds)) / 1e6

    def _intake(self, loads: Iterator[StepLoad], released_at: float, now: float) -> range:
        delay, first = self.delay, next(loads)
        ends_at = foresee(chain((first,), loads), self.model, self._step_began_at, now)
        return intake(
            self._step_began_at,
            ends_at,
            released_at + delay.least_seconds,
            released_at + delay.seconds,
            steps_ahead=delay.steps,
            error_seconds=self.model.margin_seconds(first),
        )

    def _loads(self, *, soonest: bool = False) -> list[StepLoad]:
        decodes, kv_tokens = len(self._streams), self._stream_context
        if not self.backlog:
            return [StepLoad(0, decodes, kv_tokens)] * HORIZON
        return list(self._spread(soonest=soonest).loads(decodes, kv_tokens))

    def _spread(self, *, soonest: bool = False) -> Spread:
        """The prompts over the steps, each when it joins, or at the ``soonest`` when it may."""
        budget = self.prefill_budget
        spread = self._soonest if soonest else self._spread_out
        if spread is not None and spread.step_under_way == self._step and spread.prefill_budget == budget:
            return spread
        unfinished = self._unfinished()
        late = Spread(self._step, budget)
        late.add([(p, p.joins) for p in unfinished])
        soon = late
        if any(p.may_join != p.joins for p in unfinished):
            soon = Spread(self._step, budget)
            soon.add([(p, p.may_join) for p in unfinished])
        self._spread_out, self._soonest = late, soon
        return soon if soonest else late

    def _spread_anew(self) -> None:
        """Forget how the prompts are spread: one has gone from among them, or is believed to join elsewhere."""
        self._spread_out = self._soonest = None

    def _add_to_spread(self, prefill: Prefill) -> None:
        """Add a prompt to what is known."""
        late, soon = self._spread_out, self._soonest
        if late is None or soon is None:
            return
        if soon is late and prefill.may_join != prefill.joins:
            soon = self._soonest = late.copy()
        late.add([(prefill, prefill.joins)])
        if soon is not late:
            soon.add([(prefill, prefill.may_join)])

    def _take_prefill(self, key: str) -> Prefill | None:
        """Take out a prompt that is over, or has become a stream."""
        prefill = self._prefills.pop(key, None)
        if prefill is not None and prefill.remaining:
            self._take_from_spread(prefill)
        return prefill

    def _take_from_spread(self, prefill: Prefill) -> None:
        """Take a prompt out of what is known, where that does not let others move up."""
        late, soon = self._spread_out, self._soonest
        if late is None or soon is None:
            return
        if not (late.whole and soon.whole):
            self._spread_anew()
            return
        late.take_out(prefill, prefill.joins)
        if soon is not late:
            soon.take_out(prefill, prefill.may_join)

    def _unfinished(self) -> list[Prefill]:
        """The prompts with tokens left to work on, in the order of their release.

        That is also the order in which they are done, and those that show no first token stay with us when they are:
        so the few that are looked for are the last of what may be hundreds.
        """
        found: list[Prefill] = []
        left = self.backlog
        for prefill in reversed(self._prefills.values()):
            if left <= 0:
                break
            if prefill.remaining:
                left -= prefill.remaining
                found.append(prefill)
        found.reverse()
        return found

    def blame(self, gap_seconds: float, tbt_seconds: float, chunks: int, now: float) -> Blame:
        """Say why a stream waited for ``gap_seconds`` until ``now`` for ``chunks`` chunks, longer than it was to."""
        began_at = now - gap_seconds
        preempted = self.reports.preempted_at >= began_at
        return blame(self._log.since(began_at), gap_seconds, tbt_seconds, chunks, self.model, preempted=preempted)

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
        decodes, kv_tokens = len(self._streams), self._stream_context
        if not self.backlog:
            return max(self.step_seconds, self.model.predict(StepLoad(0, decodes, kv_tokens)))
        spread = self._spread()
        tokens = min(spread.prefill_budget, sum(spread.tokens))
        everything = StepLoad(tokens, decodes, kv_tokens, sum(spread.attention), sum(spread.prefills))
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
        idle = not self.outstanding  # this prompt itself begins the next step
        joins, may_join = (self._step, self._step) if idle else self._joins(now, now)
        fits = self.untaken() + tokens <= self.prefill_budget
        if not fits:
            for prefill in reversed(self._prefills.values()):
                if now - prefill.released_at >= self.delay.seconds:
                    break
                prefill.tells_delay = False  # it may be overtaken on its way, and not find room where it would have
        tells_delay = (
            fits
            and bool(self._streams)
            and not self._silent
            and not any(p.doubts for p in self._prefills.values())  # what keeps those may keep this one
        )
        if idle:
            self._step_began_at = now
        elif not self.backlog and now >= self._step_began_at + self._patience_seconds():
            self._step_began_at = now  # silent, and for long: nobody knows when the step under way began
        prefill = self._prefills[key] = Prefill(
            tokens, joins, may_join, now, context, tbt_seconds, streamed, tells_delay, of or key
        )
        self.backlog += tokens
        self._add_to_spread(prefill)

    def _on_output(self, prefill: Prefill, now: float) -> None:
        self.backlog -= prefill.remaining
        prefill.over = True
        self._log.on_output(prefill, now)

    def _place_newcomers(self, now: float) -> None:
        """A step has ended ``now``: streams that began just before began with it, and not with the one before.

        Tokens of one step come by many ways, another replica's later than our own. One that is taken to be a step
        behind would not tell of a step's end when it comes to keep the clock.
        """
        for stream, began_at in self._newcomers:
            if now - began_at < began_at - self._step_began_at:
                stream.step = self._clock
        self._newcomers.clear()

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
        self._step_began_at = self._step_ended_at = now
        budget = self.prefill_budget * count - judged.spent
        for prefill in self._prefills.values():
            present = min(count, self._step - prefill.joins)
            worked_on = min(prefill.remaining, budget, self.prefill_budget * present)
            if worked_on > 0:
                self._log.add(prefill, worked_on)
                self.backlog -= worked_on
                budget -= worked_on
        self.backlog += self._log.doubt(self.model, self._step + 1)
        self._spread_anew()
        composed = self._step + self.delay.steps
        for prefill in self._prefills.values():
            if prefill.joins >= composed and not prefill.doubts:  # until now it may have missed this step
                prefill.joins, soonest = self._joins(prefill.released_at, now)
                prefill.may_join = max(self._step, min(soonest, prefill.may_join))  # the step under way may have it
                self._spread_anew()

    def _joins(self, released_at: float, now: float) -> tuple[int, int]:
        """The first step believed to work on what was released then, and the first that may."""
        steps = self.intake(released_at, now)
        return self._step + steps[-1], self._step + steps[0]
