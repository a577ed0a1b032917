"""The search for a capacity: up or down from a first guess until the limits hold at one rate and not at another, then
bisection in the logarithm of the rate until the two are close.

Runs at rates that were chosen beforehand, those of a study, are judged by the same rules (``outcome_of``).

All of it is a function of what has been measured so far (``next_step``): a search that was interrupted goes on from its
findings, and one that is repeated takes the same course. A rate is judged by runs on several seeds, the same ones at
every rate, so that the same requests come in the same order, only closer together: common random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from math import exp, inf, log, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond, the normal one.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
_Z = 1.96

_CLEAR_FAIL = log(1.5)
_CLEAR_PASS = log(0.5)
"""Beyond these margins one run is enough."""

_MOST_MARGIN = 3.0
"""Twenty times the limit; more, or a figure that never came, is no more broken than that."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: requests per second, and the seed that draws them."""

    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Margin:
    """By how much a limit was exceeded in a run; see ``Limit.margin``."""

    value: float | None
    """The figure itself, in seconds or as a share; ``None`` if it never came or nobody asked."""
    margin: float
    deviation: float
    """By chance, as far as one run can tell."""
    share: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """What a run said of each limit."""

    trial: Trial
    margins: Mapping[str, Margin]
    unstable: bool = False
    growth: float = 0.0
    """Share of the arrivals that stayed in the queue."""
    ended_early: str | None = None
    """The limit that was known to be broken before the end; the run was ended then."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Other figures, for tables and plots."""


Findings: TypeAlias = Mapping[Trial, Finding]


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """What to find, and how sure to be."""

    start: float
    """The first rate tried, in requests per second."""
    seeds: tuple[int, ...]
    """At most these are run at a rate."""
    least_seeds: int = 3
    """Run at a rate unless one run is clear."""
    tolerance: float = 0.025
    """Of the two last rates' ratio, less one."""
    lowest: float = 0.0
    highest: float = inf
    at_once: int = 1
    """How many runs can be under way together; more than one may measure some that are not needed."""

    def __post_init__(self) -> None:
        if not 0 < self.start < inf or not 0 < self.tolerance < 1 or not self.seeds:
            raise ValueError("a search needs a positive rate to start at, a tolerance below one, and seeds")
        if len(set(self.seeds)) < len(self.seeds) or not 1 <= self.least_seeds <= len(self.seeds):
            raise ValueError("seeds differ, and at least one of them and at most all are run at each rate")


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of one rate."""

    rate: float
    kept: bool
    certain: bool
    """Whether the interval says so; otherwise only the mean does, after all seeds."""
    breaks: tuple[str, ...]
    """The limits that are broken by the mean; ``queue`` if it only grows."""
    findings: tuple[Finding, ...]
    means: Mapping[str, tuple[float, float]]
    """Mean margin of each limit, and half the width of its 95 % interval."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a search."""

    kept_at: float | None
    """The highest rate at which all limits held, below all at which they did not; ``None``: not even at the lowest."""
    broken_at: float | None
    """The lowest rate at which one did not; ``None``: they held at the highest that may be tried."""
    estimate: float | None
    """Between the two, where the limit is crossed if its margin goes straight in the logarithm of the rate."""
    interval: tuple[float, float] | None
    """95 %, from the seeds' differences at the last rates."""
    breaks: tuple[str, ...]
    """What is broken at ``broken_at``: first the limit that is crossed first, if it can be told."""
    judgements: tuple[Judgement, ...]
    """All rates, ascending."""


class _Wanted(Exception):  # noqa: N818 - control flow, and never seen outside
    def __init__(self, trials: list[Trial]) -> None:
        super().__init__()
        self.trials = trials


def next_step(plan: SearchPlan, findings: Findings) -> list[Trial] | Outcome:
    """Return the runs that are needed next, or the outcome."""
    try:
        return _walk(plan, findings)
    except _Wanted as wanted:
        return wanted.trials


def judged(plan: SearchPlan, findings: Findings) -> list[Judgement]:
    """Return the rates that can be judged already, ascending."""
    found = []
    for rate in sorted({trial.rate for trial in findings}):
        try:
            found.append(_judge(plan, findings, rate))
        except _Wanted:
            continue
    return found


def _walk(plan: SearchPlan, findings: Findings) -> Outcome:
    low: Judgement | None = None
    high: Judgement | None = None
    rate = _rounded(min(max(plan.start, plan.lowest), plan.highest))
    for _ in count():
        judgement = _judge(plan, findings, rate)
        low, high = (judgement, high) if judgement.kept else (low, judgement)
        if low and high:
            if high.rate / low.rate <= 1 + plan.tolerance:
                break
            between = _rounded(sqrt(low.rate * high.rate))
            if not low.rate < between < high.rate:
                break
            rate = between
        elif low:
            if rate >= plan.highest or rate > 1e4 * plan.start:
                break
            rate = _rounded(min(2 * rate, plan.highest))
        else:
            if rate <= plan.lowest or rate < 1e-4 * plan.start:
                break
            rate = _rounded(max(rate / 2, plan.lowest))
    if low is None or high is None:
        return _outcome(low, high, judged(plan, findings))
    # The verdicts may have needed few seeds, where the figure between them is as good as all of them make it.
    sure = [_judge(plan, findings, judgement.rate, to_the_last=True) for judgement in (low, high)]
    return _outcome(low, high, judged(plan, findings), (sure[0], sure[1]))


def outcome_of(findings: Findings) -> Outcome:
    """Return the capacity that runs show which were made beforehand: at each of their rates on each of their seeds.

    Raises:
        ValueError: there are none, or one is missing.
    """
    rates, seeds = sorted({trial.rate for trial in findings}), sorted({trial.seed for trial in findings})
    if not findings or len(findings) < len(rates) * len(seeds):
        raise ValueError("a capacity needs runs at each rate on each seed")
    plan = SearchPlan(rates[0], tuple(seeds), least_seeds=len(seeds))
    judgements = [_judge(plan, findings, rate, to_the_last=True) for rate in rates]
    broken = next((place for place, judgement in enumerate(judgements) if not judgement.kept), None)
    kept = judgements[:broken]
    return _outcome(kept[-1] if kept else None, None if broken is None else judgements[broken], judgements)


def _outcome(
    low: Judgement | None,
    high: Judgement | None,
    judgements: Sequence[Judgement],
    surer: tuple[Judgement, Judgement] | None = None,
) -> Outcome:
    """``surer`` are the same two rates by more seeds than their verdicts needed."""
    kept_at, broken_at = (None if end is None else end.rate for end in (low, high))
    breaks = high.breaks if high else ()
    if low is None or high is None:
        return Outcome(kept_at, broken_at, None, None, breaks, tuple(judgements))
    estimate, interval, first = _estimate(*(surer or (low, high)), breaks, judgements)
    breaks = tuple(sorted(breaks, key=lambda name: name != first))
    return Outcome(kept_at, broken_at, estimate, interval, breaks, tuple(judgements))


def _rounded(rate: float) -> float:
    return float(f"{rate:.5g}")


def _judge(plan: SearchPlan, findings: Findings, rate: float, *, to_the_last: bool = False) -> Judgement:
    have: list[Finding] = []
    for number, seed in enumerate(plan.seeds):
        finding = findings.get(Trial(rate, seed))
        if finding is None:
            missing = (Trial(rate, s) for s in plan.seeds[number:] if Trial(rate, s) not in findings)
            # All that are run in any case, and not the ones that may not be needed.
            enough = plan.at_once if to_the_last else max(1, min(plan.at_once, plan.least_seeds - number))
            raise _Wanted([trial for trial, _ in zip(missing, range(enough), strict=False)])
        have.append(finding)
        judgement = _verdict(rate, have)
        if _clear(have) and (not to_the_last or finding.ended_early is not None):
            return judgement
        if len(have) >= plan.least_seeds and judgement.certain and not to_the_last:
            return judgement
    return judgement


def _clear(findings: Sequence[Finding]) -> bool:
    """Tell whether a single run leaves no doubt."""
    if len(findings) > 1:
        return False
    finding = findings[0]
    if finding.ended_early is not None:
        return True
    margins = finding.margins.values()
    if any(not m.share and m.margin >= _CLEAR_FAIL for m in margins):
        return True
    if finding.unstable:
        return any(m.margin > 0 for m in margins)
    return all(m.margin + 3 * m.deviation < 0 if m.share else m.margin <= _CLEAR_PASS for m in margins)


def _verdict(rate: float, findings: Sequence[Finding]) -> Judgement:
    means = {name: _mean_margin([f.margins[name] for f in findings]) for name in findings[0].margins}
    clear = _clear(findings)
    grows = sum(f.unstable for f in findings) > len(findings) / 2
    early = any(f.ended_early for f in findings[:1]) and clear
    breaks = [name for name, (mean, _) in means.items() if mean > 0]
    breaks.sort(key=lambda name: -means[name][0])
    if grows:
        breaks.append("queue")
    if early and not breaks:
        breaks.append(findings[0].ended_early or "")
    fails = grows or any(mean - half > 0 for mean, half in means.values())
    passes = not grows and all(mean + half <= 0 for mean, half in means.values())
    return Judgement(rate, not breaks, clear or fails or passes, tuple(breaks), tuple(findings), means)


def _mean_margin(margins: Sequence[Margin]) -> tuple[float, float]:
    """Return the mean over the seeds and half its 95 % interval."""
    values = [max(-_MOST_MARGIN, min(_MOST_MARGIN, m.margin)) for m in margins]
    mean, size = fmean(values), len(values)
    within = fmean(min(_MOST_MARGIN, m.deviation) for m in margins)
    if size < 3:  # too few to tell how seeds differ: what each run knows of itself
        return mean, _Z * within / sqrt(size)
    return mean, (_T[size - 2] if size - 2 < len(_T) else _Z) * stdev(values) / sqrt(size)


def _estimate(
    low: Judgement, high: Judgement, breaks: Sequence[str], judgements: Sequence[Judgement]
) -> tuple[float, tuple[float, float] | None, str | None]:
    """Return where the first limit is crossed, its interval, and which it is.

    All seeds may put it a little beside the two rates.
    """
    crossings = []
    for name in breaks:
        if name not in high.means:
            continue
        below, above = low.means[name][0], high.means[name][0]
        share = -below / (above - below) if above > below else 0.5
        crossings.append((low.rate * (high.rate / low.rate) ** min(2.0, max(-1.0, share)), name))
    if not crossings:
        return sqrt(low.rate * high.rate), None, None
    estimate, name = min(crossings)
    # A slope over two rates this close would be mostly chance.
    wide = [j for j in judgements if 0.75 * estimate <= j.rate <= estimate / 0.75 and len(j.findings) > 1]
    if len(wide) < 2 or (slope := _slope([(log(j.rate), j.means[name][0]) for j in wide])) <= 0:
        return estimate, None, name
    half = max(low.means[name][1], high.means[name][1]) / slope
    return estimate, (estimate * exp(-half), estimate * exp(half)), name


def _slope(points: Sequence[tuple[float, float]]) -> float:
    xs, ys = zip(*points, strict=True)
    x0, y0 = fmean(xs), fmean(ys)
    spread = sum((x - x0) ** 2 for x in xs)
    return sum((x - x0) * (y - y0) for x, y in points) / spread if spread else 0.0
