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

_PRIOR_VARIANCE = (0.15**2, 0.25**2, 15.0**2)
_DRIFT_VARIANCE = (5e-4**2, 1e-3**2, 5e-2**2)
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
        v0, v1, v2 = _PRIOR_VARIANCE
        self._covariance = v0, 0.0, 0.0, v1, 0.0, v2  # upper triangle, row by row

    def learn(self, size: PromptSize, tokens: int) -> None:
        """Take in that a prompt of ``size`` had ``tokens`` tokens; whatever cannot be true is passed over."""
        if not size.telling or not _plausible(size, tokens):
            return
        x0, x1, x2 = float(size.ascii_bytes), float(size.other_bytes), float(size.messages)
        rates = self.rates
        expected = rates[0] * x0 + rates[1] * x1 + rates[2] * x2
        self.reports += 1
        weight = max(_ERROR_WEIGHT, 1 / self.reports)
        self.error += weight * (min(1.0, abs(tokens - expected) / tokens) - self.error)

        # Written out, as it is done with every answer.
        c00, c01, c02, c11, c12, c22 = self._covariance
        c00, c11, c22 = _drifted(c00, 0), _drifted(c11, 1), _drifted(c22, 2)
        s0 = c00 * x0 + c01 * x1 + c02 * x2
        s1 = c01 * x0 + c11 * x1 + c12 * x2
        s2 = c02 * x0 + c12 * x1 + c22 * x2
        noise = (_TEXT_DEVIATION * expected) ** 2 + _COUNT_DEVIATION**2
        variance = noise + s0 * x0 + s1 * x1 + s2 * x2
        most = _OUTLIER_DEVIATIONS * sqrt(variance)
        surprise = min(max(tokens - expected, -most), most)
        g0, g1, g2 = s0 / variance, s1 / variance, s2 / variance
        self._covariance = c00 - g0 * s0, c01 - g0 * s1, c02 - g0 * s2, c11 - g1 * s1, c12 - g1 * s2, c22 - g2 * s2
        self.rates = TokenRates(
            min(max(rates[0] + g0 * surprise, _LOWEST[0]), _HIGHEST[0]),
            min(max(rates[1] + g1 * surprise, _LOWEST[1]), _HIGHEST[1]),
            min(max(rates[2] + g2 * surprise, _LOWEST[2]), _HIGHEST[2]),
        )


def _drifted(variance: float, rate: int) -> float:
    return min(variance + _DRIFT_VARIANCE[rate], max(variance, _PRIOR_VARIANCE[rate]))


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
