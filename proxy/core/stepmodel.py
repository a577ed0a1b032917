"""How long an engine's next step will take, learnt from the steps that it has taken.

``t = a + b * prefill + c * decodes + d * kv + e * attention + f * prefills`` (seconds): least squares over the past
steps, older ones counting less, with a prior that holds for whatever has not been seen. A step that took far longer
than predicted (a pause of the host, a read that came late) says little about the engine, so residuals are weighted as
Huber does. No coefficient is ever negative: more work never looks shorter.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, sqrt
from typing import NamedTuple


class StepLoad(NamedTuple):
    """What is in a step."""

    prefill_tokens: int
    decodes: int
    kv_tokens: int
    """Summed context of the decodes."""
    attention: float = 0.0
    """Over the prompt tokens: how many tokens come before each of them, summed."""
    prefills: int = 0
    """Prompts, or slices of them, that the prompt tokens belong to: each is parsed and looked up in the cache."""


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """Seconds, by what each counts."""

    fixed: float
    per_prefill_token: float
    per_decode: float
    per_kv_token: float
    per_attention: float
    per_prefill: float


PRIOR = StepCoefficients(0.02, 5e-5, 5e-5, 1.5e-7, 2e-9, 1e-3)
"""A 7B model on a mid-range GPU: of use only until some hundred steps have been seen."""

# Features are scaled to lie around one, which keeps the normal equations well conditioned.
_SCALE = (1.0, 1e-3, 1e-2, 1e-5, 1e-6, 1.0)
_PRIOR_DEVIATION = (2e-2, 1e-1, 3e-2, 3e-2, 5e-3, 5e-3)
"""How far the scaled coefficients may lie from the prior's, in seconds."""
_SIZE = len(_SCALE)
_NOISE_SECONDS = 2e-3
_HUBER_DEVIATIONS = 2.0
_FORGETTING = 0.999
_SOLVE_EVERY = 8
_JUDGE_AFTER = 4
"""Errors are judged as often, so many steps later: what takes long at once is what tokens wait for."""
_YOUNG_STEPS = 64
"""The first steps tell most: each of them is learnt from at once.

From the second on, the fit with its prior is nearer to the truth than the quantiles of the steps seen so far by prompt
tokens and decodes would be: those say nothing of a step unlike the ones before it, and lag behind as contexts grow.
"""
_TRUSTED_STEPS = 200
_RESTORED_STEPS = 20
"""Weight in steps of what an earlier run has learnt.

It holds for whatever this run has not seen yet, which needs little; but the engine may be another one than it seems,
and much would take long to forget.
"""
_LARGEST_FIGURE = 1e15
"""In a snapshot; a step of a million prompt tokens after a million others stays below."""
_ERRORS = 256
"""Steps over which the model's own error is judged."""
_ERROR_PRIOR = 0.2


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """How far the model was from the last steps of a kind, as shares of what it predicted.

    Whatever disturbs an engine disturbs a long step for longer.
    """

    p95: float
    """95th percentile of how much longer they took than predicted; never negative."""
    p99: float
    """The 99th."""
    mean: float
    """Mean of the absolute error."""
    median: float
    """Of the absolute error: no outlier moves it, so it can tell what one is."""

    def __post_init__(self) -> None:
        if not all(0 <= figure <= _LARGEST_FIGURE for figure in (self.p95, self.p99, self.mean, self.median)):
            raise ValueError("errors are those of engine steps, and not negative")


@dataclass(frozen=True, slots=True)
class StepModelSnapshot:
    """What a model has learnt, to begin another one with. Whatever can be made, can be used."""

    steps: int
    gram: tuple[float, ...]
    """Lower triangle of the normal equations' matrix, row by row."""
    moment: tuple[float, ...]
    prompt_errors: ErrorFigures
    decode_errors: ErrorFigures

    def __post_init__(self) -> None:
        # It may come from a file, by a decoder that looks at no types.
        if not all(isinstance(errors, ErrorFigures) for errors in (self.prompt_errors, self.decode_errors)):
            raise TypeError("a snapshot's errors are error figures")
        if len(self.gram) != _SIZE * (_SIZE + 1) // 2 or len(self.moment) != _SIZE:
            raise ValueError("a snapshot of other features")
        if not all(abs(figure) <= _LARGEST_FIGURE for figure in (*self.gram, *self.moment)) or self.steps < 0:
            raise ValueError("a snapshot's figures are those of engine steps, its count not negative")
        if not _is_positive_semidefinite(self.rows()):
            raise ValueError("a snapshot's equations come from no steps")

    def rows(self) -> list[list[float]]:
        """Return the matrix with its upper triangle left at zero."""
        matrix = [[0.0] * _SIZE for _ in range(_SIZE)]
        entries = iter(self.gram)
        for i in range(_SIZE):
            for j in range(i + 1):
                matrix[i][j] = next(entries)
        return matrix


class StepErrors:
    """The errors of the last steps of a kind; see ``ErrorFigures``.

    Of the later half of all that were seen, at most ``_ERRORS``: the first are those of a model that knew nothing yet,
    and one of them would be the 99th percentile for the next hundred steps.
    """

    def __init__(self) -> None:
        self._residuals: deque[float] = deque(maxlen=_ERRORS)
        self._seen = self._judged = 0
        self.p95 = self.p99 = self.mean = self.median = _ERROR_PRIOR
        self.early_p95 = _ERROR_PRIOR
        """95th percentile of how much shorter they took than predicted; never negative."""

    def add(self, residual_seconds: float, predicted_seconds: float) -> None:
        self._residuals.append(residual_seconds / max(predicted_seconds, _NOISE_SECONDS))
        self._seen += 1
        if self._seen % 2 == 0 and self._seen < 2 * _ERRORS:
            self._residuals.popleft()

    def judge(self) -> None:
        """Draw the figures anew."""
        if self._seen == self._judged:
            return
        self._judged = self._seen
        residuals = sorted(self._residuals)
        self.p95, self.p99 = (max(0.0, residuals[ceil(share * len(residuals)) - 1]) for share in (0.95, 0.99))
        self.early_p95 = max(0.0, -residuals[len(residuals) // 20])
        errors = sorted(map(abs, residuals))
        self.mean = sum(errors) / len(errors)
        self.median = errors[len(errors) // 2]

    def figures(self) -> ErrorFigures:
        return ErrorFigures(self.p95, self.p99, self.mean, self.median)

    def restore(self, figures: ErrorFigures) -> None:
        """Begin anew with what others were like."""
        self._residuals.clear()
        self._seen = self._judged = 0
        self.p95, self.p99, self.mean, self.median = figures.p95, figures.p99, figures.mean, figures.median
        self.early_p95 = figures.p95


class OnlineStepModel:
    """The fit for one engine; some microseconds per step."""

    def __init__(self, prior: StepCoefficients = PRIOR) -> None:
        self._prior = [c / s for c, s in zip(_as_tuple(prior), _SCALE, strict=True)]
        self._theta = list(self._prior)
        self._precision = [(_NOISE_SECONDS / d) ** 2 for d in _PRIOR_DEVIATION]
        self._gram = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._moment = [0.0] * _SIZE
        self.steps = 0
        """Seen by this model itself."""
        self._steps_before = 0  # by the model that it was restored from
        # Steps with prompt tokens are fewer and take several times as long: judged together, their errors would pass
        # for outliers, and what is left would say nothing about them.
        self.prompt_errors = StepErrors()
        """Of steps with prompt tokens: those that a release makes longer."""
        self.decode_errors = StepErrors()

    @property
    def trusted(self) -> bool:
        """Whether enough steps have been seen for the fit to be better than a guess."""
        return self.steps + self._steps_before >= _TRUSTED_STEPS

    @property
    def coefficients(self) -> StepCoefficients:
        return StepCoefficients(*(t * s for t, s in zip(self._theta, _SCALE, strict=True)))

    @property
    def past_steps(self) -> float:
        """How many steps ``past_load`` is the sum of, weighed in the same way."""
        return self._gram[0][0]

    def past_load(self) -> StepLoad:
        """What has been in the steps seen, added up: older ones count less, and so do those that took oddly long."""
        tokens, decodes, kv_tokens, attention, prefills = (self._gram[i][0] / _SCALE[i] for i in range(1, _SIZE))
        return StepLoad(round(tokens), round(decodes), round(kv_tokens), attention, round(prefills))

    def errors_of(self, load: StepLoad) -> StepErrors:
        """How far the model was from steps of this kind."""
        return self.prompt_errors if load.prefill_tokens else self.decode_errors

    def margin_seconds(self, load: StepLoad) -> float:
        """How much longer than predicted a step may take, for 95 of 100 of its kind; at least what a clock is off."""
        return max(_NOISE_SECONDS, self.errors_of(load).p95 * self.predict(load))

    def earliness_seconds(self, load: StepLoad) -> float:
        """How much sooner than predicted a step may end, for 95 of 100 of its kind; at least what a clock is off."""
        return max(_NOISE_SECONDS, self.errors_of(load).early_p95 * self.predict(load))

    def predict(self, load: StepLoad) -> float:
        """Return the expected duration of a step in seconds."""
        theta = self._theta
        return (
            theta[0]
            + theta[1] * load[0] * _SCALE[1]
            + theta[2] * load[1] * _SCALE[2]
            + theta[3] * load[2] * _SCALE[3]
            + theta[4] * load[3] * _SCALE[4]
            + theta[5] * load[4] * _SCALE[5]
        )

    def prefill_tokens_within(self, seconds: float, base: StepLoad, offset: int) -> int:
        """Return how many tokens of one more prompt fit into a step for it to last at most ``seconds``; 0 if none.

        ``base`` is what is in the step already; the tokens are those of one prompt after its first ``offset`` ones.
        """
        spare = seconds - self.predict(base._replace(prefills=base.prefills + 1))
        if spare <= 0:
            return 0
        # per_pair / 2 * x**2 + per_token * x = spare, in the form that also holds for per_pair = 0
        per_pair = self._theta[4] * _SCALE[4]
        per_token = self._theta[1] * _SCALE[1] + per_pair * offset
        divisor = per_token + sqrt(per_token * per_token + 2 * per_pair * spare)
        return int(2 * spare / divisor) if divisor > spare * 1e-9 else 1_000_000_000

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step whose content is known."""
        x = (
            1.0,
            load[0] * _SCALE[1],
            load[1] * _SCALE[2],
            load[2] * _SCALE[3],
            load[3] * _SCALE[4],
            load[4] * _SCALE[5],
        )
        predicted = self.predict(load)
        residual = seconds - predicted
        errors = self.errors_of(load)
        errors.add(residual, predicted)
        width = _HUBER_DEVIATIONS * max(_NOISE_SECONDS, errors.median * predicted)
        weight = 1.0 if abs(residual) <= width else width / abs(residual)
        for i in range(_SIZE):
            wx = weight * x[i]
            self._moment[i] = _FORGETTING * self._moment[i] + wx * seconds
            row = self._gram[i]
            for j in range(i + 1):
                row[j] = _FORGETTING * row[j] + wx * x[j]
        self.steps += 1
        if self.steps % _SOLVE_EVERY == 0 or self.steps < _YOUNG_STEPS:
            self._solve()
        if self.steps % _SOLVE_EVERY == _JUDGE_AFTER:
            self.prompt_errors.judge()
            self.decode_errors.judge()

    def snapshot(self) -> StepModelSnapshot:
        """Return what has been learnt."""
        return StepModelSnapshot(
            self.steps + self._steps_before,
            tuple(self._gram[i][j] for i in range(_SIZE) for j in range(i + 1)),
            tuple(self._moment),
            self.prompt_errors.figures(),
            self.decode_errors.figures(),
        )

    def restore(self, learnt: StepModelSnapshot) -> None:
        """Begin anew with what has been learnt elsewhere; it weighs no more than a few steps of our own."""
        weight = learnt.gram[0]  # every step counts for at most one there
        scale = min(1.0, _RESTORED_STEPS / weight) if weight > 0 else 0.0
        self._gram = [[scale * value for value in row] for row in learnt.rows()]
        self._moment = [scale * value for value in learnt.moment]
        self.prompt_errors.restore(learnt.prompt_errors)
        self.decode_errors.restore(learnt.decode_errors)
        self.steps, self._steps_before = 0, min(learnt.steps, _TRUSTED_STEPS)
        self._solve()

    def _solve(self) -> None:
        """Minimise the weighted squares plus the prior's; coefficients that come out negative are held at zero."""
        free = list(range(_SIZE))
        while True:
            matrix = [[self._gram[max(i, j)][min(i, j)] for j in free] for i in free]
            vector = [self._moment[i] + self._precision[i] * self._prior[i] for i in free]
            for k, i in enumerate(free):
                matrix[k][k] += self._precision[i]
            solution = _solve_positive_definite(matrix, vector)
            if all(value >= 0 for value in solution):
                break
            free = [i for i, value in zip(free, solution, strict=True) if value >= 0]
        self._theta = [0.0] * _SIZE
        for i, value in zip(free, solution, strict=True):
            self._theta[i] = value


def _as_tuple(c: StepCoefficients) -> tuple[float, ...]:
    return c.fixed, c.per_prefill_token, c.per_decode, c.per_kv_token, c.per_attention, c.per_prefill


def _is_positive_semidefinite(lower: list[list[float]]) -> bool:
    """Whether the symmetric matrix with this lower triangle is, but for what rounding makes of it."""
    matrix = [[lower[max(i, j)][min(i, j)] for j in range(len(lower))] for i in range(len(lower))]
    for k, row in enumerate(matrix):
        tolerance = 1e-9 * (1.0 + abs(lower[k][k]))
        row[k] += tolerance
        if row[k] <= 0:
            return False
        for below in matrix[k + 1 :]:
            factor = below[k] / row[k]
            for j in range(k, len(row)):
                below[j] -= factor * row[j]
    return True


def _solve_positive_definite(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination without pivoting, which a positive definite matrix does not need; both are consumed."""
    size = len(vector)
    for k in range(size):
        pivot = matrix[k]
        for i in range(k + 1, size):
            row = matrix[i]
            factor = row[k] / pivot[k]
            for j in range(k + 1, size):  # what is left of the diagonal is not looked at again
                row[j] -= factor * pivot[j]
            vector[i] -= factor * vector[k]
    solution = [0.0] * size
    for k in reversed(range(size)):
        rest = sum(matrix[k][j] * solution[j] for j in range(k + 1, size))
        solution[k] = (vector[k] - rest) / matrix[k][k]
    return solution
