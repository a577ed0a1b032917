"""Which prompt tokens an engine's last steps held: believed first, then told by what came out of them.

Belief comes from the order of release and the engine's token budget. Truth comes with the first token of a prompt, or
the end of a slice: the step that has just ended was its last. An output that did not come says as much: the prompt was
still on its way, or waits inside the engine, when we took it for done. So each step is judged only when the next one
has ended, and its content is known by then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from proxy.core.blame import PastStep
from proxy.core.feedback import BEGINNINGS
from proxy.core.stepmodel import StepLoad

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from proxy.core.feedback import FeedbackDelay
    from proxy.core.stepmodel import OnlineStepModel

_CLEAR_DEVIATIONS = 4
"""By how many of its p95 errors the step model must be nearer to the truth, to tell what was in a step."""

_PAST_STEPS = 32
"""Steps that are remembered, to say why a token came late."""

_MOST_DOUBTS = 8
"""Steps after which a prompt without an output is taken for done all the same: something keeps its token back."""


@dataclass(slots=True, eq=False)
class Prefill:
    """Released prompt tokens whose first token has not come yet: a whole prompt, the rest of one, or a slice."""

    remaining: int
    joins: int
    """The first step that is believed to work on it: one after the step under way when it was released."""
    may_join: int
    """The first step that can work on it, if it arrives sooner than believed."""
    released_at: float
    context: int
    """Tokens of the prompt up to its end: those before ``remaining`` are in the KV cache."""
    tbt_seconds: float | None
    shows_first_token: bool = True
    """Whether its first token is seen as soon as it is made; not so for an answer that comes in one piece."""
    tells_delay: bool = False
    """Whether the step that takes it in depends on nothing but the delay of its way there."""
    request_id: str = ""
    """Whose prompt it is of."""
    over: bool = False
    doubts: int = 0
    """How often it was taken for done, and was not."""

    @property
    def is_doubtful(self) -> bool:
        """Whether nothing but belief says that it was worked on."""
        return not self.over and self.doubts < _MOST_DOUBTS


class Judgement(NamedTuple):
    """What is known of a step after the next has ended."""

    load: StepLoad | None
    """``None`` where there is nothing to learn."""
    seconds: float
    undone: int
    """Prompt tokens that were taken for worked on in it, and were not."""
    spent: int
    """Prompt tokens of the next step whose output has come already."""


@dataclass(slots=True)
class _Step:
    """A step that has ended. ``work``: prompt tokens by prefill, and how many of the prompt came before them."""

    beginnings: tuple[float, ...]
    """When it began, the step before it, and so on, as far as these were seen without a gap."""
    ended_at: float
    decodes: int
    kv_tokens: int
    observed: bool
    """Whether its beginning and end were both seen."""
    work: dict[Prefill, tuple[int, int]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended_at - self.beginnings[0]

    def add(self, prefill: Prefill, tokens: int) -> None:
        """Work on the next ``tokens`` of what remains of a prompt."""
        done, before = self.work.get(prefill, (0, prefill.context - prefill.remaining))
        self.work[prefill] = (done + tokens, before)
        prefill.remaining -= tokens

    def undo(self, prefills: Iterable[Prefill], joins: int) -> int:
        """Take back the work on ``prefills``, which was believed to be part of the step; return its tokens.

        ``joins``: the first step that is now believed to work on them.
        """
        undone = 0
        for prefill in prefills:
            tokens, _ = self.work.pop(prefill)
            prefill.remaining += tokens
            prefill.doubts += 1
            prefill.joins, prefill.may_join = joins, joins - 1
            undone += tokens
        return undone

    def load(self, without: Container[Prefill] = ()) -> StepLoad:
        """What was in it, but for some prefills."""
        work = [done for prefill, done in self.work.items() if prefill not in without]
        tokens = sum(worked for worked, _ in work)
        attention = sum(worked * (before + worked / 2) for worked, before in work)
        prefills = sum(worked > 0 for worked, _ in work)
        return StepLoad(tokens, self.decodes, self.kv_tokens, attention, prefills)

    def past(self) -> PastStep:
        """What it was, as far as that is known by now."""
        largest, tokens = None, 0
        for prefill, (worked, _) in self.work.items():
            if worked > tokens:
                largest, tokens = prefill.request_id, worked
        return PastStep(self.ended_at, self.seconds, self.load(), largest, tokens)


class StepLog:
    """The last step that has ended, and the outputs that have come since."""

    def __init__(self, delay: FeedbackDelay) -> None:
        self._delay = delay
        self._last: _Step | None = None
        self._past: deque[_Step] = deque(maxlen=_PAST_STEPS)
        self._outputs: list[tuple[Prefill, float]] = []

    def on_output(self, prefill: Prefill, now: float) -> None:
        """Note that a prompt's last token has been worked on: its first output is here."""
        self._outputs.append((prefill, now))

    def next_step(
        self, began_at: float, now: float, decodes: int, kv_tokens: int, joins: int, *, observed: bool
    ) -> Judgement:
        """Open the record of the step that has just ended at ``now`` and close the one before it.

        ``joins``: the step in which to expect what was wrongly believed to be done.
        """
        last = self._last
        seen = last.beginnings if last is not None and last.observed and last.ended_at == began_at else ()
        step = _Step((began_at, *seen)[:BEGINNINGS], now, decodes, kv_tokens, observed)
        for prefill, at in self._outputs:
            # One step's outputs come within moments of its end, some before the token that keeps the clock.
            of = last if last is not None and at - last.ended_at <= now - at else step
            of.add(prefill, prefill.remaining)
            if prefill.tells_delay and of.observed and len(of.beginnings) == BEGINNINGS:
                self._delay.learn([at - prefill.released_at for at in of.beginnings])
        self._outputs.clear()
        self._last = step
        self._past.append(step)
        spent = sum(tokens for tokens, _ in step.work.values())
        if last is None:
            return Judgement(None, 0.0, 0, spent)
        missing = [p for p in last.work if p.is_doubtful and p.shows_first_token and not p.remaining]
        undone = last.undo(missing, joins)
        return Judgement(last.load() if last.observed else None, last.seconds, undone, spent)

    def since(self, at: float) -> list[PastStep]:
        """Return the steps that ended after ``at``, as far as they are remembered, oldest first."""
        steps = takewhile(lambda step: step.ended_at > at, reversed(self._past))
        return [step.past() for step in steps][::-1]

    def add(self, prefill: Prefill, tokens: int) -> None:
        """Take ``tokens`` of what remains of a prompt for worked on in the step that has just ended."""
        assert self._last is not None
        self._last.add(prefill, tokens)

    def doubt(self, model: OnlineStepModel, joins: int) -> int:
        """Judge the step that has just ended by its duration; return the prompt tokens that it cannot have held."""
        step = self._last
        assert step is not None
        doubtful = [p for p in step.work if p.is_doubtful]
        if not doubtful or not step.observed or not model.trusted:
            return 0
        # What was sent first arrives first: the step held some of the doubtful prompts, and none after those.
        held, nearest = len(doubtful), abs(step.seconds - model.predict(step.load()))
        for count in range(len(doubtful)):
            without = set(doubtful[count:])
            load = step.load(without)
            error = abs(step.seconds - model.predict(load))
            if error + _CLEAR_DEVIATIONS * model.margin_seconds(load) < nearest:
                held, nearest = count, error
        return step.undo(doubtful[held:], joins)
