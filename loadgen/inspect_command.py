"""``slai-loadgen inspect``: look at a trace before replaying it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from loadgen.inspection import bars, heights, inspect
from loadgen.traces import load
from loadgen.traces.rows import Window

if TYPE_CHECKING:
    from collections.abc import Iterator

_DESCRIPTION = """\
Recognise a trace by its content and show what is in it: lengths, the rate over time and how bursty it is, what share
of the prompts a prefix cache without limit would find, and conversations. Nothing is sent.

Known: ShareGPT JSON, CSV of lengths (as the SLAI paper's), Azure 2023 and 2024, BurstGPT 1 and 3, Mooncake,
Qwen-Bailian, ServeGen (a folder of clients, or one), and schedules written by plan; gzipped or not.
"""

_NOTES = """\
Rows that are not usable are left out, and their number is told for each reason; nothing is repaired silently.

examples:
  slai-loadgen inspect traffic.csv
  slai-loadgen inspect mooncake_trace.jsonl.gz --window 0:600
  slai-loadgen inspect traffic.csv --json - | jq .arrivals.interval_cv
"""

_BAR_WIDTH = 40


def add_inspect(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "inspect",
        help="look at a trace: lengths, rates, burstiness, shared prefixes",
        description=_DESCRIPTION,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", metavar="FILE", help="the trace")
    parser.add_argument(
        "--window",
        type=window,
        default=Window(),
        metavar="START:END",
        help="only this part of it, in seconds since its first request; either may be left out",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws the requests of ServeGen clients")
    parser.add_argument("--json", metavar="OUT", help="write all figures to this file; - for standard output")


def window(text: str) -> Window:
    """Read ``START:END`` in seconds."""
    start, colon, end = text.partition(":")
    try:
        found = Window(float(start or 0), float(end or "inf"))
    except ValueError:
        found = Window(0, -1)
    if not colon or not 0 <= found.start < found.end:
        raise argparse.ArgumentTypeError(f"a window is START:END in seconds, such as 0:600 or 3600:, not {text!r}")
    return found


def run_inspect(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit status.

    Raises:
        TraceError: the trace cannot be read.
        OSError: the figures cannot be written.
    """
    found = inspect(load(args.trace, seed=args.seed, window=args.window), args.trace)
    text = json.dumps(found, indent=2, allow_nan=False) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
        return 0
    if args.json:
        Path(args.json).write_text(text, encoding="utf-8")
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    for line in describe(found):
        console.print(line, markup=False, highlight=False, soft_wrap=isinstance(line, str))
    return 0


def describe(found: dict[str, Any]) -> Iterator[str | Table]:
    """Yield what a terminal shows of an inspection."""
    rows = f"{found['rows_read']:,} rows read = {found['rows_emitted']:,} emitted"
    dropped = found["rows_dropped"]
    yield f"{found['name']}: {found['format']}; {rows} + {sum(dropped.values()):,} dropped"
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        yield f"  dropped {count:,}: {reason}"
    for note in found["notes"]:
        yield f"  {note}"
    yield ""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    quantiles = ("mean", "p10", "p25", "p50", "p75", "p90", "p99", "max")
    table.add_column(f"{found['requests']:,} requests", no_wrap=True)
    for name in quantiles:
        table.add_column(name, justify="right", no_wrap=True)
    for label, key in (("prompt tokens", "prompt_tokens"), ("output tokens", "output_tokens")):
        table.add_row(label, *(f"{found[key][q]:,.0f}" for q in quantiles))
    yield table
    for label, key in (("prompt tokens", "prompt_tokens"), ("output tokens", "output_tokens")):
        yield from _histogram(label, found[key]["histogram"])
    if found["arrivals"] is None:
        yield "no times: the format tells none; give a rate to replay it"
    else:
        yield from _arrivals(found["arrivals"])
    if (sharing := found["sharing"]) is not None:
        yield (
            f"shared prefixes: a cache without limit would find {100 * sharing['found_share']:.1f} % of "
            f"{sharing['prompt_tokens']:,} prompt tokens"
        )
        if sharing["blocks"]:
            yield f"  {sharing['blocks']:,} blocks, {sharing['distinct_blocks']:,} of them distinct"
    if (sessions := found["sessions"]) is not None:
        yield (
            f"conversations: {sessions['sessions']:,}, {sessions['with_several_turns']:,} of several turns; "
            f"turns mean {sessions['turns_mean']:.1f}, max {sessions['turns_max']}"
        )


def _histogram(label: str, histogram: list[dict[str, int]]) -> Iterator[str]:
    yield label
    counts = [bar["requests"] for bar in histogram]
    while counts and not counts[-1]:
        counts.pop()
    width = len(f"{histogram[-1]['below']:,}")
    for bar, drawn in zip(histogram, bars(counts, _BAR_WIDTH), strict=False):
        yield f"  {bar['from']:>{width},}- {drawn} {bar['requests']:,}"
    yield ""


def _arrivals(arrivals: dict[str, Any]) -> Iterator[str]:
    timeline = arrivals["timeline"]
    largest = max(timeline["requests"])
    peak = largest / timeline["window_s"]
    yield f"requests per {timeline['window_s']:g} s, at most {largest:,} ({peak:,.3g} per second)"
    for line in heights(timeline["requests"]):
        yield f"  {line}"
    yield f"  0 to {arrivals['seconds']:,.1f} s, mean {_figure(arrivals['mean_per_s'])} per second"
    dispersion = ", ".join(f"{_figure(value)} over {window}" for window, value in arrivals["dispersion"].items())
    yield (
        f"burstiness: CV of the intervals {_figure(arrivals['interval_cv'])} (Poisson: 1); index of dispersion "
        f"{dispersion} (Poisson: 1)"
    )
    if arrivals["same_time_as_before"]:
        yield f"  {arrivals['same_time_as_before']:,} requests came at the very time of the one before"
    yield ""


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}"
