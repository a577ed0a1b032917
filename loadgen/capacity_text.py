"""A search for a capacity in words and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.report import new_table

if TYPE_CHECKING:
    from rich.table import Table

    from loadgen.report import Document
    from loadgen.slo import Slo
    from proxy.sim.search import Finding


def capacity_table(document: Document) -> Table:
    """A row for each rate: the verdict, and the mean of each limited figure over the seeds."""
    points = document["capacity"]["points"]
    names = list(points[0]["margins"]) if points else []
    more = [] if "attainment" in names else ["attainment"]
    drawn = new_table("req/s", "runs", "verdict", *names, *more, "goodput (1/s)")
    for point in points:
        runs = point["runs"]
        verdict = ("kept" if point["kept"] else "broken") + ("" if point["certain"] else " (by the mean)")
        drawn.add_row(
            f"{point['rate']:g}",
            str(len(runs)),
            verdict,
            *(_cell([run["values"][name] for run in runs], share=point["margins"][name]["share"]) for name in names),
            *(_cell([run[name] for run in runs], share=True) for name in more),
            _mean([run["attained_per_s"] for run in runs]),
        )
    return drawn


def conclusion(document: Document) -> list[str]:
    """Say in sentences what was found."""
    figures, told = document["capacity"], []
    if figures["estimate"] is not None:
        interval = figures["interval"]
        chance = f" (95 % interval {interval[0]:.4g} to {interval[1]:.4g}, by the seeds)" if interval else ""
        told.append(
            f"Capacity: {figures['estimate']:.4g} requests per second{chance}. All limits hold at "
            f"{figures['kept_at']:.4g}; at {figures['broken_at']:.4g} {' and '.join(figures['breaks'])} breaks."
        )
    if not document["valid"]:
        told.append(f"Not found, or not to be relied on: {document['invalid_reason']}.")
    if any("queue" in point["breaks"] for point in figures["points"]):
        told.append("queue: requests came faster than they were served, so that it only grew.")
    return told


def _cell(values: list[float | None], *, share: bool) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return "never" if values else "-"
    mean = sum(known) / len(known)
    return f"{100 * mean:.2f} %" if share else f"{mean:.3f} s" if mean >= 1 else f"{1000 * mean:.1f} ms"


def _mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.3f}" if known else "-"


def run_line(finding: Finding, slo: Slo) -> str:
    """One run, for the log."""
    limits = {limit.name: limit for limit in slo.limits}
    told = [
        f"{_cell([margin.value], share=margin.share)} ({limits[name]}{'' if margin.margin <= 0 else ', broken'})"
        for name, margin in finding.margins.items()
    ]
    more = f"; given up early, {finding.ended_early} was broken for sure" if finding.ended_early else ""
    more += f"; the queue grew by {100 * finding.growth:.0f} % of the arrivals" if finding.unstable else ""
    return f"{finding.trial.rate:g} req/s, seed {finding.trial.seed}: {', '.join(told)}{more}"
