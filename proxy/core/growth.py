"""How much KV cache the sequences of an engine will still need, learnt from the lengths of past outputs.

A running sequence grows by a token per step until it ends, and then frees all that it holds. So what an engine needs
is not the sum of what its sequences may become, but the peak of what they hold together while nothing more is
released: after ``h`` steps ``sum((context + h) * P(it still runs))``. Short prompts with long outputs make that rise
for long; long prompts with short outputs make it fall from the first end on. Ends come by chance, hence a margin of
some standard deviations of the same sum.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

from proxy.core.copying import share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

HORIZONS = (0, 1, 2, 4, 8, 16, 32, *(half << octave for octave in range(5, 13) for half in (2, 3)))
"""Steps ahead at which the forecast looks; beyond the last, far more ends than grows."""

_DEVIATIONS = 2.0
"""Margin over the mean. What it does not cover shows as preemptions, and those raise the engine's watermark."""

_BUCKETS = 48
"""Two per octave: lengths up to 2**24 tokens, all longer ones in the last."""
_EDGES = (0, 1, *((2 + half) << octave for octave in range(24) for half in (0, 1)))[: _BUCKETS + 1]

_WINDOW = 2000
"""Outputs over which lengths are remembered: older ones fade."""
_LEARNT = 100
"""Ended outputs from which on lengths are believed at all."""
_POOLED = 20.0
"""How many of a class's own outputs weigh as much as what is known of all together."""
_REFRESH = 64
"""What is derived is made anew after so many outputs."""
_MAX_KINDS = 256
"""Where engines do not tell what they serve, clients name the models."""
_REMAKE_STEPS = 64
"""A forecast holds for at most so many steps: running on, sequences come nearer to their ends."""

Row = tuple[float, ...]
"""For each horizon, the probability that a sequence still runs then."""


def bucket_of(tokens: int) -> int:
    """The bucket of a length: ``_EDGES[b] <= tokens < _EDGES[b + 1]``."""
    if tokens < 2:
        return max(0, tokens)
    octave = tokens.bit_length() - 2
    return min(2 + 2 * octave + ((tokens >> octave) & 1), _BUCKETS - 1)


class OutputLengths:
    """The distribution of output lengths of one kind of request; constant time and space."""

    def __init__(self, pooled: OutputLengths | None = None) -> None:
        self._pooled = pooled  # stands in for what has not been seen yet of this kind
        self._weights = [0.0] * _BUCKETS
        self._tokens = 0.0  # sum of the lengths, faded like the weights
        self._ended = 0
        self._longer: list[float] = []  # for each bucket, the weight of all above it; with the rows, as of the last use
        self._rows: dict[int, Row] = {}

    def __repr__(self) -> str:
        return f"<OutputLengths of {self._ended} outputs>"

    @property
    def learnt(self) -> bool:
        """Whether enough outputs have ended to say anything."""
        return self._ended >= _LEARNT or (self._pooled is not None and self._pooled.learnt)

    @property
    def ended(self) -> int:
        """How many outputs have ended."""
        return self._ended

    @property
    def mean_tokens(self) -> float | None:
        """Of those outputs, the latest above all; ``None`` while there are none."""
        return self._tokens / sum(self._weights) if self._ended else None

    def learn(self, tokens: int) -> None:
        """Take in the length of an output that has ended, however it ended: its KV cache is free."""
        if tokens < 1:
            return
        self._weights[bucket_of(tokens)] += 1.0
        self._tokens += tokens
        self._ended += 1
        if self._ended % _REFRESH == 0:
            fade = (1 - 1 / _WINDOW) ** _REFRESH
            self._weights = [fade * weight for weight in self._weights]
            self._tokens *= fade
            self._longer = []
            self._rows.clear()
        if self._pooled is not None:
            self._pooled.learn(tokens)

    def to_ask(self, copies: dict[OutputLengths, OutputLengths]) -> OutputLengths:
        """Return a copy that answers as this one does, and keeps what it works out for that to itself.

        What is worked out stays until enough has been learnt, so asking this one would change later answers.
        ``copies``: those that have been made already, to which those made here are added.
        """
        if self not in copies:
            asked = copies[self] = OutputLengths()
            share(self, asked)
            asked._rows = dict(self._rows)
            asked._pooled = None if self._pooled is None else self._pooled.to_ask(copies)
        return copies[self]

    def row(self, bucket: int) -> Row:
        """Return, for each horizon, how likely a sequence that has produced as many tokens still runs then."""
        row = self._rows.get(bucket)
        if row is None:
            produced = (_EDGES[bucket] + _EDGES[bucket + 1] - 1) / 2
            now = self.survival(produced)
            row = self._rows[bucket] = tuple(self.survival(produced + horizon) / now for horizon in HORIZONS)
        return row

    def survival(self, tokens: float) -> float:
        """Return the share of outputs that are longer than ``tokens``; never zero.

        Where nothing has been seen, an output that has come so far is taken to be half-way: one pseudo-observation
        with ``P(length > x) = mean / (mean + x)``.
        """
        if not self._longer:
            above = list(accumulate(reversed(self._weights), initial=0.0))
            self._longer = above[::-1]
        total = self._longer[0]
        if self._pooled is not None:
            prior, weight = self._pooled.survival(tokens), _POOLED
        else:
            mean = max(1.0, self._tokens / total if total else 0.0)
            prior, weight = mean / (mean + tokens), 1.0
        bucket = bucket_of(int(tokens))
        low, high = _EDGES[bucket], _EDGES[bucket + 1]
        share = max(0.0, (high - 1 - tokens) / (high - low))  # of the bucket's own, as if evenly spread
        longer = self._longer[bucket + 1] + share * (self._longer[bucket] - self._longer[bucket + 1])
        return (longer + weight * prior) / (total + weight)


class GrowthModel:
    """What is known of output lengths, by model and class; ``pooled`` knows all together."""

    def __init__(self) -> None:
        self.pooled = OutputLengths()
        self._kinds: dict[tuple[str, str], OutputLengths] = {}

    def kinds(self) -> Mapping[tuple[str, str], OutputLengths]:
        """What is known of each kind, by model and class."""
        return self._kinds

    def of(self, model: str, class_name: str) -> OutputLengths:
        """The lengths of one model's outputs for one class; those of all together if there are too many kinds."""
        kind = model, class_name
        lengths = self._kinds.get(kind)
        if lengths is None:
            if len(self._kinds) >= _MAX_KINDS:
                return self.pooled
            lengths = self._kinds[kind] = OutputLengths(self.pooled)
        return lengths


Sequence = tuple[int, int, OutputLengths, int | None]
"""One that an engine has been given: its context (in a prefill, as it will be at its end), the tokens of its answer so
far, what is known of outputs of its kind, and how many its client allows."""


class KvForecast:
    """What sequences will hold together at each horizon: mean and variance, in tokens."""

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        self.sequences = 0
        self._mean = [0.0] * len(HORIZONS)
        self._variance = [0.0] * len(HORIZONS)
        groups: dict[tuple[OutputLengths, int, int], list[float]] = {}
        for context, produced, outputs, max_tokens in sequences:
            key = outputs, bucket_of(produced), _within(produced, max_tokens)
            group = groups.get(key)
            if group is None:
                group = groups[key] = [0.0, 0.0, 0.0]
            group[0] += 1
            group[1] += context
            group[2] += context * context
        for (outputs, bucket, within), (count, contexts, squares) in groups.items():
            self._add(outputs.row(bucket)[:within], count, contexts, squares)

    def add(self, sequence: Sequence) -> None:
        """Count one more."""
        context, produced, outputs, max_tokens = sequence
        row = outputs.row(bucket_of(produced))
        self._add(row[: _within(produced, max_tokens)], 1, context, context * context)

    def _add(self, row: Row, count: float, contexts: float, squares: float) -> None:
        self.sequences += int(count)
        for k, runs in enumerate(row):
            horizon = HORIZONS[k]
            self._mean[k] += runs * (contexts + horizon * count)
            self._variance[k] += runs * (1 - runs) * (squares + horizon * (2 * contexts + horizon * count))

    def peak(self, prompt_tokens: int, outputs: OutputLengths) -> float:
        """Return the most that will be held if a prompt is added now, chance included, in tokens."""
        peak = 0.0
        for horizon, runs, mean, variance in zip(HORIZONS, outputs.row(0), self._mean, self._variance, strict=True):
            tokens = prompt_tokens + horizon
            deviation = sqrt(variance + runs * (1 - runs) * tokens * tokens)
            peak = max(peak, mean + runs * tokens + _DEVIATIONS * deviation)
        return peak


class _Given(NamedTuple):
    """A sequence, as it was given to the engine."""

    prompt_tokens: int
    outputs: OutputLengths
    max_tokens: int | None


class KvOutlook:
    """What the sequences of one engine will hold; forecast anew only where that may let something in."""

    def __init__(self) -> None:
        self._given: dict[str, _Given] = {}
        self._forecast: KvForecast | None = None
        self._step = 0
        self._ended = False

    def __len__(self) -> int:
        return len(self._given)

    def to_ask(self, copies: dict[OutputLengths, OutputLengths]) -> KvOutlook:
        """Return a copy that answers as this one does; ``copies``: of those that it asks, as far as there are any."""
        asked = KvOutlook()
        share(self, asked)
        asked._given = {key: given._replace(outputs=given.outputs.to_ask(copies)) for key, given in self._given.items()}
        return asked

    def add(self, key: str, prompt_tokens: int, outputs: OutputLengths, max_tokens: int | None) -> None:
        """Note that a sequence has been given to the engine; ``outputs``: what is known of those of its kind."""
        self._given[key] = _Given(prompt_tokens, outputs, max_tokens)
        if self._forecast is not None:
            self._forecast.add((prompt_tokens, 0, outputs, max_tokens))

    def end(self, key: str, context: int) -> None:
        """Note that a sequence is over, with ``context`` tokens, and learn from it."""
        given = self._given.pop(key, None)
        if given is not None:
            given.outputs.learn(context - given.prompt_tokens)
            self._ended = True

    def drop(self, key: str) -> None:
        """Forget a sequence, and learn nothing from it."""
        self._ended |= self._given.pop(key, None) is not None

    def fits(
        self,
        prompt_tokens: int,
        outputs: OutputLengths,
        room_tokens: float,
        step: int,
        contexts: Callable[[], Mapping[str, int]],
    ) -> bool:
        """Whether a prompt and all sequences will stay within ``room_tokens``.

        ``step``: the engine's. ``contexts``: what the sequences past their first token hold now, by key.
        """
        if self._forecast is not None:
            grown = self._forecast.sequences * (step - self._step)  # every one that has not ended
            if self._forecast.peak(prompt_tokens, outputs) + grown <= room_tokens:
                return True
            if not self._ended and step - self._step < _REMAKE_STEPS:
                return False
        self._forecast, self._step, self._ended = KvForecast(self._sequences(contexts())), step, False
        return self._forecast.peak(prompt_tokens, outputs) <= room_tokens

    def _sequences(self, contexts: Mapping[str, int]) -> Iterator[Sequence]:
        for key, (prompt_tokens, outputs, max_tokens) in self._given.items():
            context = contexts.get(key, prompt_tokens)
            yield context, context - prompt_tokens, outputs, max_tokens


def _within(produced: int, max_tokens: int | None) -> int:
    """How many horizons a sequence can reach before it has all tokens that its client allows."""
    return len(HORIZONS) if max_tokens is None else max(1, bisect_left(HORIZONS, max_tokens - produced))
