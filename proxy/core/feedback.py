"""The delay of the loop between the proxy and an engine: a token on its way here, and a prompt on its way back.

A prompt that is released when a step has ended arrives while the next one runs, and is taken in by the one after that,
unless its way takes longer than the step. An engine that composes each step while the one before it runs (asynchronous
scheduling, vLLM's default on GPUs) takes it in one step later still. Which step did take it in is told by when its
output comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_OUTWARD = 0.5
_INWARD = 0.05
"""Where the bounds of the delay turn out wrong they move fast, where they could be closer, slowly."""
_BEYOND = 1.25
"""What was too short by nothing would miss again."""
_MOST_SECONDS = 0.25
"""A prompt that needs longer waits for something else inside the engine."""
_MISS_WEIGHT = 0.05
_KNOWN_PROMPTS = 20
"""It takes so many to know a delay well enough to keep it."""


@dataclass(frozen=True, slots=True)
class DelaySnapshot:
    """What was learnt of a delay, to begin with after a restart; a figure for each number of steps ahead."""

    least_seconds: tuple[float, ...]
    most_seconds: tuple[float, ...]
    misses: tuple[float, ...]
    """How often each was wrong, as a moving average from 0 to 1."""

    def __post_init__(self) -> None:
        # It may come from a file, by a decoder that looks at no types.
        if not all(len(of) == BEGINNINGS - 1 for of in (self.least_seconds, self.most_seconds, self.misses)):
            raise ValueError("a delay is known for each number of steps ahead")
        if not all(0 <= seconds <= _MOST_SECONDS * _BEYOND for seconds in (*self.least_seconds, *self.most_seconds)):
            raise ValueError(f"a delay lies between 0 and {_MOST_SECONDS * _BEYOND:g} s")
        if not all(0 <= share <= 1 for share in self.misses):
            raise ValueError("misses are a share")


class _Hypothesis:
    """That the engine composes its steps so many steps ahead; with the delay that this makes of what is seen."""

    def __init__(self, seconds: float) -> None:
        self.least, self.most = 0.0, seconds
        self.misses = 0.0  # moving average of how often the delay was wrong

    def learn(self, too_short: float, enough: float) -> None:
        # Less than nothing is enough for nobody: a step that was composed before the release cannot hold the prompt.
        self.misses += _MISS_WEIGHT * (not too_short <= self.most <= enough) - _MISS_WEIGHT * self.misses
        too_short, enough = max(0.0, min(too_short, _MOST_SECONDS)), max(enough, 0.0)
        if too_short > self.most:
            self.most += _OUTWARD * (_BEYOND * too_short - self.most)
        elif enough < self.most:
            self.most += _INWARD * (enough - self.most)
        if enough < self.least:
            self.least += _OUTWARD * (enough - self.least)
        elif too_short > self.least:
            self.least += _INWARD * (too_short - self.least)


class FeedbackDelay:
    """Learnt from the steps that a prompt missed and the one that it caught."""

    def __init__(self, seconds: float) -> None:
        self._hypotheses = [_Hypothesis(seconds) for _ in range(BEGINNINGS - 1)]
        self._prompts = 0  # learnt from
        self._choose()

    def __repr__(self) -> str:
        return f"<FeedbackDelay {self.seconds * 1e3:.1f} ms, {self.steps} steps ahead>"

    def _choose(self) -> None:
        at_once, ahead = self._hypotheses
        likelier = ahead if ahead.misses < at_once.misses else at_once
        self.steps = int(likelier is ahead)
        """How many steps ahead the engine composes a step: 0, or 1 with asynchronous scheduling."""
        self.seconds = likelier.most
        """From the release of a prompt to when a step can be composed with it, both as seen from here."""
        self.least_seconds = likelier.least
        """What it may be at best."""

    def learn(self, beginnings: Sequence[float]) -> None:
        """Take in which step took a prompt in.

        ``beginnings``: when that step began, the step before it and the one before that, in seconds after the release.
        A prompt that was not taken in for very long tells nothing: it waited inside the engine.
        """
        if beginnings[-1] > _MOST_SECONDS:
            return
        self._prompts += 1
        for i, hypothesis in enumerate(self._hypotheses):
            hypothesis.learn(too_short=beginnings[i + 1], enough=beginnings[i])
        self._choose()

    def snapshot(self) -> DelaySnapshot | None:
        """Return what has been learnt; ``None`` while that is little."""
        if self._prompts < _KNOWN_PROMPTS:
            return None
        ceiling = _MOST_SECONDS * _BEYOND  # it may have begun above
        return DelaySnapshot(
            tuple(min(h.least, ceiling) for h in self._hypotheses),
            tuple(min(h.most, ceiling) for h in self._hypotheses),
            tuple(h.misses for h in self._hypotheses),
        )

    def restore(self, learnt: DelaySnapshot) -> None:
        """Begin anew with what has been learnt elsewhere; it is corrected as fast as any other beginning."""
        figures = zip(learnt.least_seconds, learnt.most_seconds, learnt.misses, strict=True)
        for hypothesis, (least, most, misses) in zip(self._hypotheses, figures, strict=True):
            hypothesis.least, hypothesis.most, hypothesis.misses = least, most, misses
        self._prompts = _KNOWN_PROMPTS
        self._choose()


BEGINNINGS = 3
"""How many steps' beginnings it takes to learn from: that of the step which took a prompt in, and those before it."""
