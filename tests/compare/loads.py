"""Schedulers on a real engine at several loads: stock, the proxy before it, our scheduler inside it, and both.

``python -m compare.loads --help`` (with ``PYTHONPATH=tests:tests/support``) tells how; ``README.md`` beside it how to
get a vLLM without a GPU. All engines are started once and are idle while another is measured. In each round every side
gets the same requests at each load, and sides take turns in going first. What has been measured is in the file of
``--json``; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from compare.engines import PLUGINS, SMALL, engine_for
from compare.tiles import Figures, check, make_parser, measure_side, tightest
from loadgen import eventloop
from loadgen.arrivals import Rate
from loadgen.children import ChildError
from loadgen.planning import PlanError
from loadgen.runner import NotReadyError
from proxy.sim.workload import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

SIDES = ("direct-small", "direct", "plugin-slai", "plugin-deadline", "gate", "tiles", "gate-plugin")
_SHARES = "0.6,0.8,0.95"
_BURST = 1000.0
"""Requests per second that no engine can do."""
_OVERHEAD_SECONDS = 20.0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser("compare.loads", __doc__ or "")
    loads = parser.add_argument_group("loads")
    loads.add_argument("--rates", metavar="R[,R]", help="requests per second (default: by --shares)")
    loads.add_argument(
        "--shares",
        default=_SHARES,
        metavar="S[,S]",
        help=f"rates as shares of what the first side completes when all requests come at once (default: {_SHARES})",
    )
    parser.set_defaults(requests=60, sides=",".join(SIDES))
    args = parser.parse_args(argv)
    if args.rate is not None:
        parser.error("--rate: several loads are compared here, see --rates and --shares")
    for name in ("rates", "shares"):
        text = getattr(args, name)
        try:
            setattr(args, name, None if text is None else [float(part) for part in text.split(",")])
        except ValueError:
            parser.error(f"--{name}: {text!r} are no numbers, like {_SHARES}")
    args.rate = Rate.constant(1.0)
    check(args, parser)
    return args


class Comparison:
    """Measures what has not been measured."""

    def __init__(self, args: argparse.Namespace, notes: Console) -> None:
        self.args = args
        self.notes = notes
        self.runs: list[Figures] = []
        self.rates: list[float] | None = args.rates
        if args.json and Path(args.json).exists():
            told = json.loads(Path(args.json).read_text(encoding="utf-8"))
            self.runs = [Figures(**run) for run in told["runs"]]
            self.rates = self.rates or told["rates"]
            notes.print(f"{len(self.runs)} runs are there already, in {args.json}", markup=False)

    async def run(self) -> None:
        """Start the engines, find the rates, and go through all loads, rounds and sides."""
        args = self.args
        async with AsyncExitStack() as stack:
            engines: dict[tuple[str | None, bool], tuple[str, int]] = {}
            for side in args.sides:
                if (kind := (PLUGINS.get(side), side in SMALL)) not in engines:
                    self.notes.print(f"starting the engine of {side}", markup=False)
                    engines[kind] = await stack.enter_async_context(engine_for(side, args))
            of = {side: engines[PLUGINS.get(side), side in SMALL] for side in args.sides}
            if self.rates is None:
                first = await self._measure("direct", -2, of[args.sides[0]], _BURST)
                self.rates = [round(share * first.completed_per_second, 2) for share in args.shares]
                self.notes.print(f"{args.sides[0]} completes {first.completed_per_second:.2f}/s at most", markup=False)
            left = [run for run in self._plan(self.rates) if not self._is_done(*run)]
            seconds = sum(args.requests / rate + _OVERHEAD_SECONDS for _, rate, _ in left)
            self.notes.print(f"{len(left)} runs at {self.rates}/s, some {seconds / 60:.0f} min", markup=False)
            for done, (number, rate, side) in enumerate(left):
                self.notes.print(f"{done + 1}/{len(left)}: round {number + 1}, {rate:g}/s, {side}", markup=False)
                self.runs.append(await self._measure(side, number, of[side], rate))
                self._keep()

    def _plan(self, rates: Sequence[float]) -> list[tuple[int, float, str]]:
        found: list[tuple[int, float, str]] = []
        for number in range(self.args.rounds):
            for index, rate in enumerate(rates):
                turn = (number * len(rates) + index) % len(self.args.sides)
                found += [(number, rate, side) for side in (*self.args.sides[turn:], *self.args.sides[:turn])]
        return found

    def _is_done(self, number: int, rate: float, side: str) -> bool:
        return any((run.round, run.rate, run.side) == (number, rate, side) for run in self.runs)

    async def _measure(self, side: str, number: int, on: tuple[str, int], rate: float) -> Figures:
        changed = {"rate": Rate.constant(rate)}
        return await measure_side(side, number, on, argparse.Namespace(**{**vars(self.args), **changed}), self.notes)

    def _keep(self) -> None:
        if self.args.json:
            arguments = {name: str(value) for name, value in vars(self.args).items()}
            told = {"arguments": arguments, "rates": self.rates, "runs": [asdict(run) for run in self.runs]}
            whole = Path(f"{self.args.json}.part")
            whole.write_text(json.dumps(told, indent=1), encoding="utf-8")
            whole.replace(self.args.json)


def table(runs: Sequence[Figures], rate: float, tight: str) -> Table:
    """One row per side at one load: values by round, and their median; ``tight`` is the class with the TBT deadline."""
    names = [
        "TTFT p50",
        "p90",
        "p99",
        f"TBT p99 {tight}",
        "others",
        f"{tight} in time",
        "tokens/s",
        "preempted",
        "held",
    ]
    shown = Table("", *names, title=f"{rate:g} requests/s")
    for side in dict.fromkeys(run.side for run in runs):
        own = sorted((run for run in runs if run.side == side), key=lambda run: run.round)
        shown.add_row(
            side,
            *(_cell([run.ttft[i] for run in own], ".2f") for i in range(3)),
            _cell([run.strict_tbt_p99 for run in own], ".3f"),
            _cell([_looser(run, tight) for run in own], ".3f"),
            _cell([run.strict_in_time for run in own], ".0%"),
            _cell([run.measured["tokens_per_s"] for run in own], ".0f"),
            *(
                f"{sum(run.engine.get(name, 0.0) for run in own):.0f}"
                for name in ("num_preemptions", "slai_plugin_held")
            ),
        )
    return shown


def lengths_table(runs: Sequence[Figures], rate: float) -> Table:
    """TTFT by length of the prompt: the medians of the rounds."""
    buckets = list(dict.fromkeys(b for run in runs for b in run.measured["ttft_s_by_prompt_tokens"]))
    buckets.sort(key=lambda b: int(b.rstrip("+").split("-")[0]))
    shown = Table("TTFT p50 (p99)", *buckets, title=f"{rate:g} requests/s, by prompt tokens")
    for side in dict.fromkeys(run.side for run in runs):
        own = [run.measured["ttft_s_by_prompt_tokens"] for run in runs if run.side == side]

        def value(bucket: str, name: str, own: list[dict[str, Any]] = own) -> str:
            known = [found[bucket][name] for found in own if found.get(bucket, {}).get(name) is not None]
            return f"{median(known):.2f}" if known else "-"

        shown.add_row(side, *(f"{value(b, 'p50')} ({value(b, 'p99')})" for b in buckets))
    return shown


def _looser(run: Figures, tight: str) -> float | None:
    found = [p["p99"] for name, p in run.measured["tbt_s"].items() if name != tight and p["p99"] is not None]
    return max(found, default=None)


def _cell(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    text = "/".join("-" if value is None else format(value, form) for value in values)
    return f"{text} ({format(median(known), form)})" if len(known) > 1 else text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args, notes = parse_arguments(argv), Console(stderr=True)
    comparison = Comparison(args, notes)
    status = 0
    try:
        eventloop.run(comparison.run())
    except (ChildError, NotReadyError, PlanError, TraceError) as error:
        notes.print(f"compare.loads: {error}", markup=False)
        status = 1
    except KeyboardInterrupt:
        notes.print("interrupted; the same command goes on from what is in the file of --json")
        status = 130
    tight = tightest(args.classes).name
    shown = Console(width=max(200, Console().width))
    for rate in sorted({run.rate for run in comparison.runs if run.rate is not None}):
        at_rate = [run for run in comparison.runs if run.rate == rate]
        at_rate.sort(key=lambda run: args.sides.index(run.side) if run.side in args.sides else len(args.sides))
        shown.print(table(at_rate, rate, tight))
        shown.print(lengths_table(at_rate, rate))
    return status or (0 if all(run.completed == run.requests for run in comparison.runs) else 1)


if __name__ == "__main__":
    sys.exit(main())
