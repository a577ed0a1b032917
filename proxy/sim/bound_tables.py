"""What ``slai-proxy bound`` prints."""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from proxy.sim.bound import best_budget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from proxy.sim.bound import Bound, BudgetRow, Needs
    from proxy.sim.bound_command import Share
    from proxy.sim.bound_live import LiveEngine
    from proxy.sim.bound_lp import StepKind


def print_bound(console: Console, needs: Needs, found: Bound, rows: Sequence[BudgetRow], *, engines: int) -> None:
    """Print the bound, what binds, and the token budgets."""
    context = needs.kv_tokens / max(1e-9, needs.decodes)
    _say(
        console,
        f"a request has {needs.prompt_tokens:,.0f} prompt and {needs.decodes + 1:,.0f} output tokens on average, "
        f"and a decode a context of {context:,.0f}",
    )
    most = f"at most {found.requests_per_second:.2f} requests per second and engine"
    fleet = "" if engines == 1 else f", {engines * found.requests_per_second:.2f} with {engines} engines"
    _say(console, f"{most}{fleet}: {found.binds} binds", bold=True)
    alone = ", ".join(f"{name} {_rate(rate)}" for name, rate in found.alone.items())
    _say(console, f"if it were the only limit: {alone}")
    _say(
        console,
        f"there, a step has {found.prompt_tokens:,.0f} prompt tokens, {found.decodes:,.0f} streams, "
        f"{found.kv_tokens:,.0f} tokens of context, and takes {1e3 * found.step_seconds:.1f} ms",
    )
    table = _table("token\nbudget", "requests\nper second", "binds", "full step\n(ms)", "tightest TBT\nkept")
    for row in rows:
        kept = "-" if row.keeps is None else f"{1e3 * row.keeps:+.0f} ms"
        seconds = f"{1e3 * row.full_step_seconds:.1f}"
        table.add_row(f"{row.token_budget:,}", f"{row.bound.requests_per_second:.3f}", row.bound.binds, seconds, kept)
    _print(console, table)
    if (best := best_budget(rows, within_tbt=False)) is not None:
        _say(console, f"best token budget, whatever the deadlines: {best.token_budget} (within 1 % of the best bound)")
    if rows and rows[0].keeps is not None:
        within = best_budget(rows, within_tbt=True)
        _say(
            console,
            "no token budget keeps the tightest TBT deadline"
            if within is None
            else f"best token budget that keeps the tightest TBT deadline: {within.token_budget}, "
            f"{within.bound.requests_per_second:.2f} requests per second",
        )


def print_mix(console: Console, rate: float, mix: Sequence[StepKind]) -> None:
    """Print what the linear program found."""
    _say(console, f"by the linear program: {rate:.3f} requests per second, with these steps", bold=True)
    table = _table("share of\ntime", "prompt\ntokens", "streams", "context\ntokens")
    for kind in mix:
        table.add_row(f"{kind.share:.1%}", *(f"{n:,.0f}" for n in (kind.prompt_tokens, kind.decodes, kind.kv_tokens)))
    _print(console, table)


def print_shares(console: Console, found: Sequence[Share]) -> None:
    """Print how near each policy comes."""
    _say(console, "what policies complete when offered 15 % more than the bound", bold=True)
    table = _table("done\n(1/s)", "bound\n(1/s)", "share of\nbound", "pre-\nempted", "TBT p99\n(ms)", first="policy")
    for share in found:
        gaps = share.figures["tbt_s"]
        tbt = ", ".join(f"{name} {1e3 * of['p99']:.0f}" for name, of in gaps.items() if of["p99"] is not None)
        done, most = f"{share.completed_per_second:.3f}", f"{share.bound_per_second:.3f}"
        table.add_row(share.policy, done, most, f"{share.share:.1%}", f"{share.figures['preemptions']:,}", tbt)
    _print(console, table)


def print_live(console: Console, engines: Sequence[LiveEngine]) -> None:
    """Print how near a proxy's engines are."""
    table = _table(
        *(
            "at, of\nthe bound",
            "prompt\ntokens/s",
            "output\ntokens/s",
            "a step\n(ms)",
            "prompt\ntokens",
            "streams",
            "context\ntokens",
        ),
        *("binds", "twice as much\nof it brings"),
        first="engine",
    )
    for engine in engines:
        if engine.share is None or engine.binds is None:
            table.add_row(engine.id, "-", *["-"] * 8)
            continue
        table.add_row(
            engine.id,
            f"{engine.share:.0%}" + ("" if engine.trusted else " ?"),
            *(f"{n * engine.steps_per_second:,.0f}" for n in (engine.prompt_tokens, engine.decodes)),
            f"{1e3 * engine.step_seconds:.1f}",
            *(f"{n:,.1f}" for n in (engine.prompt_tokens, engine.decodes)),
            f"{engine.kv_tokens:,.0f}",
            engine.binds,
            f"+{engine.more_with[engine.binds]:.0%}",
        )
    _print(console, table)
    if any(engine.share is None for engine in engines):
        _say(console, "-: nothing is known of its steps yet")
    if any(engine.share is not None and not engine.trusted for engine in engines):
        _say(console, "?: its step model has seen too few steps to be believed")


def _rate(rate: float) -> str:
    return "any" if isinf(rate) or rate > 1e5 else f"{rate:.2f}"


def _table(*columns: str, first: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    if first is not None:
        table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print(console: Console, table: Table) -> None:
    if not console.is_terminal:
        table.box, table.padding = None, (0, 2, 0, 0)
    console.print(table)
    if table.box is None:
        console.print()


def _say(console: Console, line: str, *, bold: bool = False) -> None:
    console.print(Text(line, style="bold" if bold else ""), soft_wrap=True)
