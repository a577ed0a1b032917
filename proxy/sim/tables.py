"""A study as tables: for each rate TTFT and the engines, then TBT by class, TTFT by tenant (where there are
several) and by prompt length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from proxy.sim.capacity import Capacity
    from proxy.sim.study import RunFigures
    from proxy.sim.workload import Surge

Summary = dict[str, dict[str, dict[str, Any]]]

_LEGEND = """\
Medians over the seeds. range: least and greatest p50 of a seed. change: of p50 against the first
row, seed by seed. done, offered: requests per second. starved: steps that the gate left without
prompt tokens while a prompt waited that the engine had room for, % of all. queue: from an engine's
receipt of a prompt to the first step that works on it. attained: requests whose TTFT and every TBT
were within their class's deadlines, %. goodput: those of all classes, per second. never: no first
token came, as of requests that failed."""


_LEARNING_LEGEND = """\
Errors in milliseconds: of the model as it was after so many steps, over the next 500 steps with a
stream in them, by what was truly in those; against what the engine's profile says, and (with jitter)
against what the steps took. tokens right: steps whose prompt tokens the proxy had counted exactly."""


def print_study(console: Console, summary: Summary, runs: Sequence[RunFigures], surge: Surge | None = None) -> None:
    """Print a study's tables: with rules on a terminal, plain columns elsewhere."""
    more = "" if surge is None else f", {surge.factor:g} times as many for the first {surge.seconds:g} s"
    for rate, rows in summary.items():
        if not rows:
            continue
        console.print(Text(f"{rate} requests per second{more}", style="bold"))
        several = any(len(row["median"].get("ttft_s_by_tenant", ())) > 1 for row in rows.values())
        for table in (_overview(rows), _by_class(rows), *([_by_tenant(rows)] if several else []), _by_length(rows)):
            _print(console, table)
    for line in (*failures(runs), *_LEGEND.splitlines()):
        console.print(Text(line, style="dim"), soft_wrap=True)


def print_capacities(console: Console, found: Mapping[str, Capacity], ttft_p50_seconds: float) -> None:
    """Print up to which rate each policy keeps the limits."""
    limit = f"median TTFT up to {ttft_p50_seconds:g} s, p99 TBT of each class within its deadline"
    console.print(Text(f"capacity ({limit})", style="bold"))
    table = _table("kept at\n(1/s)", "broken at\n(1/s)", "between,\nabout", "\n95 %", "change", "what\nbreaks")
    first = next(iter(found.values())).estimate if found else None
    for number, (policy, capacity) in enumerate(found.items()):
        change = 100 * (capacity.estimate / first - 1) if number and capacity.estimate and first else None
        table.add_row(
            policy,
            "-" if capacity.kept_at is None else f"{capacity.kept_at:g}",
            "-" if capacity.broken_at is None else f"{capacity.broken_at:g}",
            _number(capacity.estimate, 2),
            "-" if capacity.interval is None else "{:.2f}-{:.2f}".format(*capacity.interval),
            "-" if change is None else f"{change:+.0f} %",
            capacity.broken or "-",
        )
    _print(console, table)


def print_learning(console: Console, judged: Sequence[Mapping[str, Any]]) -> None:
    """Print how far the step model was off after so many steps, a row for each run and checkpoint."""
    table = _table(
        *("rate\n(1/s)", "seed", "steps\nseen", "a step\n(ms)", "error\nmean", "\nMAE", "\np95"),
        *("with jitter\nMAE", "\np95", "tokens\nright (%)"),
    )
    for run in judged:
        for steps, row in run["after_steps"].items():
            errors, jittered = row["error_s"], row["error_with_jitter_s"]
            table.add_row(
                run["policy"],
                f"{run['rate']:g}",
                str(run["seed"]),
                f"{int(steps):,}",
                milliseconds(row["step_s"]),
                *(f"{1000 * errors[name]:.2f}" for name in ("mean", "mae", "p95")),
                *(f"{1000 * jittered[name]:.2f}" for name in ("mae", "p95")),
                _number(100 * row["exact_share"], 1),
            )
    _print(console, table)
    for line in _LEARNING_LEGEND.splitlines():
        console.print(Text(line, style="dim"), soft_wrap=True)


def failures(runs: Sequence[RunFigures]) -> Iterator[str]:
    """Say of each run in which requests failed how many did, and why."""
    for run in runs:
        if run["errors"]:
            name = f"{run['policy']} at {run['rate']:g} req/s, seed {run['seed']}"
            reasons = ", ".join(f"{count} x {reason}" for reason, count in run["errors"].items())
            yield f"{name}: of {run['requests']} requests failed {reasons}."


def _overview(rows: Mapping[str, dict[str, Any]]) -> Table:
    table = _table("TTFT\np50 (s)", "\nrange", "\nchange", "\np90", "\np99")
    for heading in ("done\n(1/s)", "of-\nfered\n(1/s)", "pre-\nempted", "star-\nved\n(%)", "queue\np95\n(ms)"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, (policy, row) in enumerate(rows.items()):
        figures, ratio = row["median"], row["ratio"]
        least, greatest = row["spread"]["ttft_s"]["p50"]
        change = ratio["ttft_s"]["p50"] if number and ratio else None
        table.add_row(
            policy,
            seconds(figures["ttft_s"]["p50"]),
            f"{seconds(least)}-{seconds(greatest)}" if len(row["seeds"]) > 1 else "-",
            "-" if change is None else f"{100 * (change - 1):+.1f} %",
            seconds(figures["ttft_s"]["p90"]),
            seconds(figures["ttft_s"]["p99"]),
            _number(figures["completed_per_s"], 3),
            _number(figures["offered_per_s"], 3),
            _number(figures["preemptions"], 0),
            _number(100 * figures["starved_steps"] / max(1, figures["steps"]), 2),
            milliseconds(figures["engine_queue_s"]["p95"]),
        )
    return table


def _by_class(rows: Mapping[str, dict[str, Any]]) -> Table:
    classes = dict.fromkeys(name for row in rows.values() for name in row["median"]["tbt_s"])
    headings = [(f"{name}\nTBT p99\n(ms)", "\nattained\n(%)") for name in classes]
    table = _table(*(heading for pair in headings for heading in pair), "goodput\n(1/s)")
    for policy, row in rows.items():
        cells = []
        for name in classes:
            attained = row["median"]["attainment"].get(name)
            cells.append(milliseconds(row["median"]["tbt_s"].get(name, {}).get("p99")))
            cells.append(_number(None if attained is None else 100 * attained, 1))
        table.add_row(policy, *cells, _number(row["median"]["attained_per_s"], 3))
    return table


def _by_tenant(rows: Mapping[str, dict[str, Any]]) -> Table:
    tenants = dict.fromkeys(name for row in rows.values() for name in row["median"]["ttft_s_by_tenant"])
    headings = [(f"{name}\np50", "\np90", "\np99", "\n(done/s)") for name in tenants]
    table = _table(*(heading for four in headings for heading in four), first="TTFT (s)\nby tenant")
    for policy, row in rows.items():
        found = row["median"]["ttft_s_by_tenant"]
        cells = [
            (*(seconds(found[name][p]) for p in ("p50", "p90", "p99")), _number(found[name]["completed_per_s"], 3))
            if name in found
            else ("", "", "", "")
            for name in tenants
        ]
        table.add_row(policy, *(cell for four in cells for cell in four))
    return table


def _by_length(rows: Mapping[str, dict[str, Any]]) -> Table:
    found = {bucket for row in rows.values() for bucket in row["median"]["ttft_s_by_prompt_tokens"]}
    buckets = sorted(found, key=lambda bucket: int(bucket.rstrip("+").split("-")[0]))
    # One above the other, or five or six buckets do not fit beside each other.
    headings = [("\n".join((*_edges(bucket), "p50")), "\n\np99") for bucket in buckets]
    table = _table(*(heading for pair in headings for heading in pair), first="TTFT (s)\nby prompt\ntokens")
    for policy, row in rows.items():
        by_length = row["median"]["ttft_s_by_prompt_tokens"]
        cells = [
            (seconds(by_length[b]["p50"]), seconds(by_length[b]["p99"])) if b in by_length else ("", "")
            for b in buckets
        ]
        table.add_row(policy, *(cell for pair in cells for cell in pair))
    return table


def _print(console: Console, table: Table) -> None:
    if not console.is_terminal:
        table.box, table.padding = None, (0, 2, 0, 0)
    console.print(table)
    if table.box is None:
        console.print()


def _edges(bucket: str) -> tuple[str, str]:
    low, dash, high = bucket.partition("-")
    return low + dash, high


def _table(*columns: str, first: str = "") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def seconds(value: float | None) -> str:
    """Write a duration in seconds in at most five characters, up to a day; ``None`` is one that never ended."""
    if value is None:
        return "never"
    digits = 3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:.{digits}f}"


def milliseconds(value: float | None) -> str:
    """Write a duration given in seconds as milliseconds, with a digit after the point below a second."""
    return "-" if value is None else _number(1000 * value, 1 if value < 1 else 0)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
