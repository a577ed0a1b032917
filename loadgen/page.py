"""A report as one HTML file: plots, tables and definitions, with nothing to fetch and no script.

Light or dark as the browser is, narrow enough for a phone, and fit for paper. Every plot has its figures as a table,
for screen readers and for copying.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from loadgen.charts import SERIES_COLOURS, Chart, svg
from loadgen.page_parts import capacity_parts, comparison_parts, run_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadgen.page_parts import Parts, Rows
    from loadgen.report import Document

_ROWS_OF_A_PLOT = 25
_SENTENCES = ("meaning", "setting", "value", "verdict")
"""Columns of text, which is not set like figures."""

_DEFINITIONS = (
    ("TTFT", "first token minus the intended time of the request, so that a late client and every queue count"),
    ("TBT", "time between tokens: the gap between two arrivals of tokens in one stream, pooled over the streams"),
    ("TPOT", "time from the first to the last token over one less than the number of tokens, of each request"),
    ("server queue", "what the servers on the way say, each of its own queue, that they held the request back"),
    ("attainment", "share of all requests that completed with TTFT and every TBT within their class's deadlines"),
    ("goodput", "requests that attained their deadlines, per second"),
    ("failures", "what failed, was refused or never ended has missed its deadlines, and its TTFT is infinite"),
    ("intervals", "95 %, by drawing whole requests with replacement; of shares after Wilson"),
)


def page_of(document: Document) -> str:
    """Draw the page of a report of any kind."""
    match document.get("kind", "run"):
        case "capacity":
            parts = capacity_parts(document)
        case "comparison":
            parts = comparison_parts(document)
        case _:
            parts = run_parts(document)
    return "\n".join(_page(document, parts)) + "\n"


def _page(document: Document, parts: Parts) -> Iterator[str]:
    style = files("loadgen").joinpath("style.css").read_text(encoding="utf-8")
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(parts.title)}</title><style>{style}</style></head><body><main>"
    yield f'<header><h1>{escape(parts.title)}</h1><p class="dim">{escape(parts.subtitle)}</p>'
    valid, reason = document["valid"], document.get("invalid_reason")
    state, words = ("good", "valid") if valid else ("bad", f"not valid: {reason}")
    yield f'<p><span class="state {state}">{escape(words)}</span></p>'
    yield from (f"<p>{escape(line)}</p>" for line in parts.remarks)
    yield "</header>"
    yield '<ul class="cards">'
    yield from (f"<li><span>{escape(name)}</span><b>{escape(value)}</b></li>" for name, value in parts.cards)
    yield "</ul>"
    for heading, rows in parts.tables:
        yield f"<section><h2>{escape(heading)}</h2>"
        yield from _table(rows)
        yield "</section>"
    yield '<section><h2>Plots</h2><div class="charts">'
    for chart in parts.charts:
        yield from _figure(chart)
    yield "</div></section>"
    yield '<section><h2>What the figures mean</h2><div class="scroll"><table><tbody>'
    for name, meaning in _DEFINITIONS:
        yield f'<tr><th scope="row">{name}</th><td class="wrap">{meaning}</td></tr>'
    yield "</tbody></table></div></section>"
    yield "<section><h2>How it was measured</h2>"
    yield from _table([("setting", "value"), *(_setting(item) for item in document["config"].items())])
    yield "</section></main></body></html>"


def _setting(item: tuple[str, Any]) -> tuple[str, str]:
    name, value = item
    return name.replace("_", " "), value if isinstance(value, str) else json.dumps(value)


def _figure(chart: Chart) -> Iterator[str]:
    caption = f"{chart.y.label}. {chart.note}" if chart.note else chart.y.label
    yield f"<figure><h3>{escape(chart.title)}</h3><figcaption>{escape(caption)}</figcaption>"
    if len(chart.series) > 1:
        yield '<ul class="legend">'
        for place, series in enumerate(chart.series):
            line = f'<path class="line s{place % SERIES_COLOURS}" d="M1 6H29"/>'
            yield f'<li><svg viewBox="0 0 30 12" aria-hidden="true">{line}</svg>{escape(series.name)}</li>'
        yield "</ul>"
    yield svg(chart)
    yield "<details><summary>Figures of this plot</summary>"
    yield from _table(_rows_of(chart))
    yield "</details></figure>"


def _rows_of(chart: Chart) -> Rows:
    """The points of a chart, thinned out evenly."""
    rows: list[tuple[str, ...]] = [("", chart.x.label, chart.y.label)]
    for series in chart.series:
        points = series.points
        step = max(1, -(-len(points) // _ROWS_OF_A_PLOT))
        picked = [*points[::step], *(points[-1:] if (len(points) - 1) % step else [])]
        rows += [(series.name, chart.x.text(x), chart.y.text(y)) for x, y in picked]
    return rows


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    head, *body = rows
    kinds = [' class="wrap"' if name in _SENTENCES else "" for name in head]
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f'<th scope="col"{kind}>{escape(cell)}</th>' for cell, kind in zip(head, kinds, strict=True))
    yield "</tr></thead><tbody>"
    for first, *cells in body:
        row = "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(cells, kinds[1:], strict=True))
        yield f'<tr><th scope="row">{escape(first)}</th>{row}</tr>'
    yield "</tbody></table></div>"
