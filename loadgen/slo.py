"""Service level objectives in a line: ``ttft_p50<=0.5s, tbt_p99[strict]<=100ms, attainment>=99%``.

A comma separates what must all hold. Each part is a figure, in brackets the class it is of (all requests without),
a comparison and a limit with its unit. Figures of latency are ``ttft``, ``tbt``, ``tpot`` and ``e2e`` with ``_pNN``,
``_mean`` or ``_max``; shares are ``attainment`` (requests within all deadlines of their class) and ``completed``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf, isfinite, log
from typing import TYPE_CHECKING

import numpy as np

from loadgen.intervals import PooledQuantile, bootstrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from loadgen.intervals import Weights
    from loadgen.sample import Floats, Integers, Sample

_LATENCIES = ("ttft", "tbt", "tpot", "e2e")
_SHARES = ("attainment", "completed")
_UNITS = {"s": 1.0, "ms": 1e-3}

_PART = re.compile(
    r"(?P<metric>[A-Za-z_][\w.]*)\s*(?:\[(?P<group>[^\]]*)\])?\s*(?P<compare><=|>=|<|>|==|=)?\s*"
    r"(?P<number>[-+]?[\d.]+(?:[eE][-+]?\d+)?)?\s*(?P<unit>[A-Za-z%]+)?\s*"
)

EXAMPLE = "ttft_p50<=0.5s, tbt_p99[strict]<=100ms, attainment>=99%"


class SloError(ValueError):
    """The expression is wrong; the message shows where, and what would be right."""

    def __init__(self, text: str, at: int, why: str, length: int = 1) -> None:
        super().__init__(f"{why}\n  {text}\n  {' ' * at}{'^' * max(1, length)}")


@dataclass(frozen=True, slots=True)
class Limit:
    """One part of an SLO."""

    metric: str
    """``ttft``, ``tbt``, ``tpot``, ``e2e``, ``attainment`` or ``completed``."""
    statistic: str
    """``p50``, ``p99.9``, ``mean`` or ``max``; empty for a share."""
    group: str
    """The class; empty for all requests."""
    limit: float
    """In seconds, or as a share of one."""

    @property
    def is_share(self) -> bool:
        """Whether more is better."""
        return self.metric in _SHARES

    @property
    def name(self) -> str:
        figure = f"{self.metric}_{self.statistic}" if self.statistic else self.metric
        return f"{figure}[{self.group}]" if self.group else figure

    def __str__(self) -> str:
        if self.is_share:
            return f"{self.name}>={100 * self.limit:g}%"
        return f"{self.name}<={1000 * self.limit:g}ms" if self.limit < 1 else f"{self.name}<={self.limit:g}s"

    def value(self, sample: Sample) -> float | None:
        """Return the figure, infinite if it never came; ``None`` if nobody asked in this class."""
        sample = sample.of_class(self.group) if self.group else sample
        return self._statistic(sample)(np.ones(len(sample), dtype=np.int64)) if len(sample) else None

    def margin(self, value: float | None) -> float:
        """Return by how much the limit is exceeded: of a latency the logarithm of the ratio, of a share the difference.

        Up to zero the limit is kept.
        """
        if value is None:
            return -inf
        if self.is_share:
            return self.limit - value
        return log(value / self.limit) if 0 < value < inf else (inf if value else -inf)

    def deviation(self, sample: Sample, seed: int = 0) -> float:
        """Return the standard deviation of the margin by the bootstrap over requests; ``inf`` if it cannot be told."""
        sample = sample.of_class(self.group) if self.group else sample
        statistic = self._statistic(sample)
        found = bootstrap(lambda weights: self.margin(statistic(weights)), len(sample), seed)
        return inf if found is None or not isfinite(found.deviation) else found.deviation

    def hopeless(self, sample: Sample, planned: int) -> bool:
        """Tell whether this limit is broken whatever the requests that are still missing in ``sample`` bring.

        ``planned`` is how many requests of the group there will be in the end, with those of ``sample``.
        """
        sample = sample.of_class(self.group) if self.group else sample
        if self.metric == "attainment":
            return bool((planned - (~sample.attained).sum()) / planned < self.limit)
        if self.metric == "ttft" and self.statistic.startswith("p"):
            too_late = int((sample.ttft > self.limit).sum())
            return too_late > planned - int(self._share * (planned - 1)) - 1
        return False

    @property
    def _share(self) -> float:
        return float(self.statistic[1:]) / 100

    def _statistic(self, sample: Sample) -> Callable[[Weights], float]:
        if self.is_share:
            column = (sample.attained if self.metric == "attainment" else sample.completed).astype(float)
            return lambda weights: float(weights @ column) / int(weights.sum())
        values, owners = self._values(sample)
        if self.statistic.startswith("p"):
            quantile = PooledQuantile(values, owners, len(sample), self._share)
            return lambda weights: _or_never(quantile(weights), sample)
        if self.statistic == "max":
            return lambda weights: _or_never(max(values[weights[owners] > 0], default=np.nan), sample)
        return lambda weights: _or_never(_mean(values, weights[owners]), sample)

    def _values(self, sample: Sample) -> tuple[Floats, Integers]:
        if self.metric == "tbt":
            return sample.gaps, sample.owners
        values = {"ttft": sample.ttft, "tpot": sample.tpot, "e2e": sample.e2e}[self.metric]
        known = ~np.isnan(values)
        return values[known], np.arange(len(sample))[known]


def _mean(values: Floats, weights: Weights) -> float:
    drawn = weights > 0
    return float(values[drawn] @ weights[drawn]) / int(weights.sum()) if drawn.any() else np.nan


def _or_never(value: float, sample: Sample) -> float:
    """Take what has no value for one that is kept if everybody was served, and that never came otherwise."""
    if not np.isnan(value):
        return float(value)
    return 0.0 if sample.completed.all() else inf


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that must all hold."""

    limits: tuple[Limit, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.limits))

    def check_classes(self, names: Iterable[str]) -> None:
        """Make sure that every class it names is there.

        Raises:
            ValueError: one is not; the message lists those that there are.
        """
        known = sorted(set(names))
        for limit in self.limits:
            if limit.group and limit.group not in known:
                raise ValueError(f"--slo: {limit}: no class is named {limit.group!r}; there are {', '.join(known)}")


def parse_slo(text: str) -> Slo:
    """Read an SLO.

    Raises:
        SloError: it is wrong; the message shows the place.
    """
    limits: list[Limit] = []
    start = 0
    for part in text.split(","):
        at = start + len(part) - len(part.lstrip())
        start += len(part) + 1
        limit = _parse_limit(text, at, part.strip())
        if any(limit.name == other.name for other in limits):
            raise SloError(text, at, f"{limit.name} is limited twice", len(limit.name))
        limits.append(limit)
    return Slo(tuple(limits))


def _parse_limit(text: str, at: int, part: str) -> Limit:
    found = _PART.match(part)
    if found is None:
        raise SloError(text, at, f"here a figure was expected, as in {EXAMPLE!r}")
    metric, statistic = _parse_figure(text, at, found["metric"])
    group = found["group"]
    if group is not None and not group.strip():
        raise SloError(text, at + found.start("group") - 1, "the brackets name a class, as in tbt_p99[strict]", 2)
    if found["compare"] is None:
        raise SloError(text, at + found.end("metric"), f"after {found['metric']} comes <= or >= and a limit")
    share = metric in _SHARES
    compare, place = found["compare"], at + found.start("compare")
    if compare not in ((">=", ">") if share else ("<=", "<")):
        right = ">=" if share else "<="
        why = f"{found['metric']} is better when {'larger' if share else 'smaller'}: write {right}"
        raise SloError(text, place, why, len(compare))
    if found["number"] is None:
        raise SloError(text, at + found.end("compare"), "here the limit is missing, as in <=0.5s or >=99%")
    limit = _parse_number(text, at, found, share=share)
    if found.end() < len(part):
        rest = part[found.end() :]
        raise SloError(text, at + found.end(), f"{rest!r} is too much; a comma separates limits", len(rest))
    return Limit(metric, statistic, (group or "").strip(), limit)


def _parse_figure(text: str, at: int, name: str) -> tuple[str, str]:
    if name in _SHARES:
        return name, ""
    metric, _, statistic = name.partition("_")
    if metric in _LATENCIES:
        if statistic in ("mean", "max"):
            return metric, statistic
        if re.fullmatch(r"p\d{1,2}(\.\d+)?", statistic):
            return metric, statistic
        where, length = (at, len(name)) if not statistic else (at + len(metric) + 1, len(statistic))
        raise SloError(
            text, where, f"{metric} of what? {metric}_p50, {metric}_p99, {metric}_mean, {metric}_max", length
        )
    known = [*(f"{m}_{s}" for m in _LATENCIES for s in ("p50", "p90", "p95", "p99", "mean", "max")), *_SHARES]
    near = get_close_matches(name, known, 1) or get_close_matches(metric, _LATENCIES, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join((*_LATENCIES, *_SHARES))}"
    raise SloError(text, at, f"no figure is called {name!r}; {hint}", len(name))


def _parse_number(text: str, at: int, found: re.Match[str], *, share: bool) -> float:
    unit = found["unit"] or ""
    place, length = at + found.start("number"), found.end() - found.start("number")
    try:
        number = float(found["number"])
    except ValueError:
        raise SloError(text, place, f"{found['number']!r} is not a number", len(found["number"])) from None
    if share:
        if unit not in ("", "%"):
            raise SloError(text, at + found.start("unit"), "a share is a number up to 1, or a percentage", len(unit))
        number = number / 100 if unit else number
        if not 0 < number <= 1:
            raise SloError(text, place, "a share lies between 0 and 1 (0 % and 100 %)", length)
        return number
    if unit not in _UNITS:
        raise SloError(text, place, f"a latency has a unit: {number:g}s or {number:g}ms", length)
    if not 0 < number < inf:
        raise SloError(text, place, "the limit must be positive", length)
    return number * _UNITS[unit]
