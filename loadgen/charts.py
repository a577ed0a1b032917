"""Plots as SVG text: lines, steps and points over linear or logarithmic axes, coloured by the page's style sheet.

Nothing is fetched and nothing runs in the browser: what is drawn is in the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDTH, HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 24, 12, 44

_LEAST = 1e-12
"""Less is nothing."""
_LEAST_OF_MOST = 1e-8
"""A logarithmic axis goes no further down than that below its top."""

SERIES_COLOURS = 6
"""As many as the style sheet has; more series begin again."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name, in the order in which they are joined."""

    name: str
    points: Sequence[tuple[float, float]]
    scatter: bool = False
    """Draw single points, and do not join them."""
    marked: bool = False
    """Draw the points besides the line."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What runs along an edge. Limits are taken from the points where they are not given."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    percent: bool = False

    def text(self, value: float) -> str:
        return f"{100 * value:g} %" if self.percent else number(value)


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot, its title, and lines that mark limits on the horizontal or vertical axis."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    note: str = ""
    x_limits: Sequence[tuple[float, str]] = field(default_factory=tuple)
    y_limits: Sequence[tuple[float, str]] = field(default_factory=tuple)


def number(value: float) -> str:
    """Write a number as short as it can be read."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.4g}" if abs(value) >= 1000 else f"{value:.3g}"


class _Scale:
    """From values to places on the page."""

    def __init__(self, axis: Axis, values: Iterable[float], start: float, end: float) -> None:
        known = [value for value in values if not axis.log or value > _LEAST]
        low = min(known, default=0.1 if axis.log else 0.0) if axis.low is None else axis.low
        high = max(known, default=1.0) if axis.high is None else axis.high
        if not axis.log and axis.low is None and axis.high is None:
            low = min(0.0, low)
        if axis.log:
            low = max(low, high * _LEAST_OF_MOST)
        if high - low < _LEAST:
            low, high = (low / 2, low * 2) if axis.log else (low, low + 1)
        self.log, self.low, self.high, self._start, self._end = axis.log, low, high, start, end

    def __call__(self, value: float) -> float:
        share = self._share(min(max(value, self.low), self.high))
        return round(self._start + share * (self._end - self._start), 1)

    def _share(self, value: float) -> float:
        if self.log:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if not self.log:
            return linear_ticks(self.low, self.high)
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        reach = self.high / self.low
        steps = (1, 2, 5) if reach < 100 else (1, 3) if reach < 3000 else (1,)
        found = [step * 10.0**decade for decade in decades for step in steps]
        inside = [value for value in found if self.low <= value * 1.0001 and value <= self.high * 1.0001]
        return inside if len(inside) > 2 else [value for value in linear_ticks(self.low, self.high) if value > 0]


def linear_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers from ``low`` to ``high``, about ``wanted`` of them."""
    raw = (high - low) / wanted
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, floor(high / step + 1e-9) + 1)]


def svg(chart: Chart) -> str:
    """Draw a chart."""
    xs = [x for series in chart.series for x, _ in series.points] + [at for at, _ in chart.x_limits]
    ys = [y for series in chart.series for _, y in series.points] + [at for at, _ in chart.y_limits]
    x = _Scale(chart.x, xs, _LEFT, WIDTH - _RIGHT)
    y = _Scale(chart.y, ys, HEIGHT - _BOTTOM, _TOP)
    names = ", ".join(series.name for series in chart.series)
    told = f"{chart.title}: {chart.y.label} against {chart.x.label}, {names}. The table below has the figures."
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(told)}">',
        *_grid(chart, x, y),
        *_limits(chart, x, y),
    ]
    for place, series in enumerate(chart.series):
        parts += _drawn(series, place % SERIES_COLOURS, x, y)
    return "\n".join([*parts, "</svg>"])


def _grid(chart: Chart, x: _Scale, y: _Scale) -> Iterable[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for value in y.ticks():
        at = y(value)
        yield f'<path class="grid" d="M{_LEFT} {at}H{right}"/>'
        yield f'<text x="{_LEFT - 6}" y="{at + 4:g}" text-anchor="end">{chart.y.text(value)}</text>'
    for value in x.ticks():
        at = x(value)
        yield f'<path class="grid" d="M{at} {_TOP}V{bottom}"/>'
        yield f'<text x="{at}" y="{bottom + 17}" text-anchor="middle">{chart.x.text(value)}</text>'
    yield f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>'
    yield f'<text x="{(_LEFT + right) / 2:g}" y="{HEIGHT - 7}" text-anchor="middle">{escape(chart.x.label)}</text>'


def _limits(chart: Chart, x: _Scale, y: _Scale) -> Iterable[str]:
    for place, (value, label) in enumerate(chart.x_limits):
        at = x(value)
        left = at > WIDTH * 0.7
        yield f'<path class="limit" d="M{at} {_TOP}V{HEIGHT - _BOTTOM}"/>'
        yield (
            f'<text class="limit" x="{at + (-4 if left else 4):g}" y="{HEIGHT - _BOTTOM - 8 - 15 * place}" '
            f'text-anchor="{"end" if left else "start"}">{escape(label)}</text>'
        )
    for value, label in chart.y_limits:
        at = y(value)
        yield f'<path class="limit" d="M{_LEFT} {at}H{WIDTH - _RIGHT}"/>'
        yield f'<text class="limit" x="{_LEFT + 6}" y="{at - 5:g}">{escape(label)}</text>'


def _drawn(series: Series, colour: int, x: _Scale, y: _Scale) -> Iterable[str]:
    places = [(x(a), y(b)) for a, b in series.points if (a > _LEAST or not x.log) and (b > _LEAST or not y.log)]
    if not series.scatter and places:
        yield f'<path class="line s{colour}" d="M{"L".join(f"{a} {b}" for a, b in places)}"/>'
    if series.scatter:
        # One path of dots of no length and round ends: a third of the text of as many circles.
        yield f'<path class="dots s{colour}" d="{"".join(f"M{a} {b}h0" for a, b in places)}"/>'
    if series.marked:
        yield f'<path class="marks s{colour}" d="{"".join(f"M{a} {b}h0" for a, b in places)}"/>'
