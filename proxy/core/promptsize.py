"""How many tokens a prompt has, before anybody has tokenized it.

``tokens = a * ASCII bytes + b * other bytes + c * messages``: what a tokenizer makes of English differs from what it
makes of other scripts, and a chat template adds to each message. The coefficients are learnt for each model from what
engines report as ``usage.prompt_tokens``, by a Kalman filter whose coefficients drift slowly: text varies by some 15 %
about the mean whatever one learns, and a coefficient that the traffic does not exercise keeps its value. What it makes
of a report is bounded, so that an odd one (a truncated prompt, a wrong count) moves little.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

PART_TOKENS = 256
"""A content part without text: an image or a sound. Engines differ between 85 and several thousand."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """What a prompt is made of. Bytes are those of its text in UTF-8, however the request spelt it."""

    token_ids: int = 0
    """The prompt, or this much of it, came as token ids."""
    ascii_bytes: int = 0
    other_bytes: int = 0
    """Bytes of all other characters: two for each of Cyrillic, three of Chinese, four of an emoji."""
    json_bytes: int = 0
    """Tools, earlier tool calls, or a body that nobody understood: counted as ASCII text, never learnt from."""
    messages: int = 0
    """Of a chat; a completion has no template."""
    parts: int = 0
    """Content parts without text."""

    @property
    def text_bytes(self) -> int:
        return self.ascii_bytes + self.other_bytes

    @property
    def telling(self) -> bool:
        """Whether a count of its tokens says something about text."""
        return self.text_bytes > 0 and not (self.token_ids or self.json_bytes or self.parts)


class TokenRates(NamedTuple):
    """Tokens, by what each counts."""

    per_ascii_byte: float
    per_other_byte: float
    per_message: float

    def tokens(self, size: PromptSize) -> int:
        """Return the prompt's length in tokens, at least 1: exact for token ids, an estimate for the rest."""
        estimate = (
            self.per_ascii_byte * (size.ascii_bytes + size.json_bytes)
            + self.per_other_byte * size.other_bytes
            + self.per_message * size.messages
        )
        return max(1, size.token_ids + ceil(estimate) + PART_TOKENS * size.parts)


PRIOR = TokenRates(0.25, 0.25, 4.0)
"""Four bytes to a token, and four tokens around each message, until engines have told otherwise."""

_PRIOR_DEVIATION = (0.15, 0.25, 15.0)
_DRIFT_DEVIATION = (5e-4, 1e-3, 5e-2)
"""How far a coefficient may have moved from one report to the next: the last hundred or so count.

The one of many scripts moves with their mix.
"""
_LOWEST = (1 / 16, 1 / 16, 0.0)
_HIGHEST = (1.0, 1.0, 512.0)
"""No tokenizer makes more than one token of a byte, and none gets 16 bytes of natural text into one."""
_TEXT_DEVIATION = 0.15
"""Of one prompt's own ratio about the mean, as a share."""
_COUNT_DEVIATION = 2.0
"""What a template adds once, in tokens."""
_OUTLIER_DEVIATIONS = 3.0
_ERROR_WEIGHT = 0.05


class RateFit:
    """The rates of one model; some microseconds per report."""

    def __init__(self) -> None:
        self.rates = PRIOR
        self.reports = 0
        self.error = 0.0
        """Moving average of how far estimates were off, as a share (at most 1) of the tokens reported."""
        self._covariance = [[d * d if i == j else 0.0 for j in range(3)] for i, d in enumerate(_PRIOR_DEVIATION)]

    def learn(self, size: PromptSize, tokens: int) -> None:
        """Take in that a prompt of ``size`` had ``tokens`` tokens; whatever cannot be true is passed over."""
        if not size.telling or not _plausible(size, tokens):
            return
        x = (float(size.ascii_bytes), float(size.other_bytes), float(size.messages))
        expected = sum(rate * count for rate, count in zip(self.rates, x, strict=True))
        self.reports += 1
        weight = max(_ERROR_WEIGHT, 1 / self.reports)
        self.error += weight * (min(1.0, abs(tokens - expected) / tokens) - self.error)

        covariance = self._covariance
        for i in range(3):
            drifted = covariance[i][i] + _DRIFT_DEVIATION[i] ** 2
            covariance[i][i] = min(drifted, max(covariance[i][i], _PRIOR_DEVIATION[i] ** 2))
        spread = [sum(c * v for c, v in zip(row, x, strict=True)) for row in covariance]
        noise = (_TEXT_DEVIATION * expected) ** 2 + _COUNT_DEVIATION**2
        variance = noise + sum(s * v for s, v in zip(spread, x, strict=True))
        most = _OUTLIER_DEVIATIONS * sqrt(variance)
        surprise = min(max(tokens - expected, -most), most)
        gains = [s / variance for s in spread]
        self.rates = TokenRates(
            *(
                min(max(rate + gain * surprise, low), high)
                for rate, gain, low, high in zip(self.rates, gains, _LOWEST, _HIGHEST, strict=True)
            )
        )
        for i in range(3):
            for j in range(3):
                covariance[i][j] -= gains[i] * spread[j]


def _plausible(size: PromptSize, tokens: int) -> bool:
    longest = size.text_bytes + _HIGHEST[2] * (size.messages + 1)
    return 0 < tokens <= longest and size.text_bytes <= 2 * tokens / _LOWEST[0]


class PromptSizes:
    """The rates of all models; those that were used longest ago are forgotten beyond ``max_models``."""

    def __init__(self, max_models: int = 256) -> None:
        self._max_models = max_models
        self._fits: OrderedDict[str, RateFit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._fits)

    def __iter__(self) -> Iterator[tuple[str, RateFit]]:
        """Give each model with what has been learnt of it."""
        return iter(list(self._fits.items()))

    def tokens(self, model: str, size: PromptSize) -> int:
        """Return the length of a prompt for ``model`` in tokens: exact for token ids, otherwise an estimate."""
        fit = self._fits.get(model)
        return (PRIOR if fit is None else fit.rates).tokens(size)

    def learn(self, model: str, size: PromptSize, tokens: int) -> None:
        """Take in how long an engine says a prompt was."""
        if not size.telling:
            return
        fit = self._fits.setdefault(model, RateFit())
        self._fits.move_to_end(model)
        fit.learn(size, tokens)
        if len(self._fits) > self._max_models:
            self._fits.popitem(last=False)
