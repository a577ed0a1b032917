"""Tiles on real engines: direct, direct with a small budget, the gate and tiles, on the same requests, in turn.

``python -m compare.tiles --help`` (with ``PYTHONPATH=tests``) tells how; ``README.md`` beside it how to get a vLLM
without a GPU. Engines that are given as a command are started for each run and stopped after it, so that every run
begins with an empty cache and has the machine to itself; engines given as URLs stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from compare.engines import PLUGINS, SMALL, engine_counts, engine_for
from loadgen import eventloop
from loadgen.arrivals import Rate
from loadgen.children import ChildError, running
from loadgen.load_arguments import add_load_arguments, plan_load, positive
from loadgen.metrics import measure
from loadgen.planning import PlanError
from loadgen.progress import open_display
from loadgen.runner import NotReadyError, run_workload, wait_until_ready
from proxy.core.request import RequestClass
from proxy.sim.workload import ClassShare, TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.sim.records import RequestRecord

SIDES = ("direct", "direct-small", "gate", "tiles")
_PROXY = {"gate": [], "tiles": ["--tiles"], "gate-plugin": []}
_WARM_UP_REQUESTS, _WARM_UP_RATE = 24, 5.0
"""That nobody measures: what a proxy or our scheduler in the engine knows of an engine's steps, it learns from them."""
_SENT = ("slai_slice_tokens_total", "slai_slice_prefix_tokens_total")
_COMMAND = "python -m vllm.entrypoints.openai.api_server --model MODEL --port {port} --max-num-batched-tokens {budget}"


@dataclass(slots=True)
class Figures:
    """What one run showed; times in seconds, ``None`` where there is nothing to tell of."""

    side: str
    round: int
    completed: int
    requests: int
    ttft: tuple[float | None, ...]
    """50th, 90th and 99th percentile."""
    strict_tbt_p99: float | None
    strict_in_time: float | None
    """Share of the strict requests with every TBT in time."""
    completed_per_second: float
    hit_rate: float | None = None
    """Share of what earlier slices had brought that the engine found cached."""
    prompt_tokens: int = 0
    rate: float | None = None
    load_average: tuple[float, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """The proxy's own, of engines and slices."""
    engine: dict[str, float] = field(default_factory=dict)
    """What the engine has counted meanwhile: preemptions, steps, decodes held back."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser("compare.tiles", __doc__ or "")
    args = parser.parse_args(argv)
    check(args, parser)
    return args


def make_parser(name: str, about: str) -> argparse.ArgumentParser:
    """Return a parser for what is compared, where and how; ``check`` is to look at what it finds."""
    parser = argparse.ArgumentParser(
        prog=name,
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"example:\n  python -m {name} --json out.json --engine '{_COMMAND}'\n",
    )
    where = parser.add_argument_group("engines")
    where.add_argument(
        "--engine", metavar="COMMAND", help="starts an engine; {port} and {budget} in it are filled in, for each run"
    )
    where.add_argument("--large", metavar="URL", help="instead: an engine with the large budget that runs already")
    where.add_argument("--small", metavar="URL", help="instead: an engine with the small budget that runs already")
    where.add_argument("--large-budget", type=int, default=2048, help="tokens in a step (default: 2048)")
    where.add_argument(
        "--small-budget",
        type=int,
        default=448,
        help="the largest budget whose steps keep the strict deadline on this engine (default: 448)",
    )
    where.add_argument("--max-num-seqs", type=int, default=64, help="as the engine has it (default: 64)")
    where.add_argument("--wait", type=positive, default=180.0, help="seconds for an engine to come up (default: 180)")
    how = parser.add_argument_group("comparison")
    how.add_argument(
        "--sides",
        default=",".join(SIDES),
        help=f"which to compare: {', '.join((*SIDES, *PLUGINS))} (default: {','.join(SIDES)}); the last three have "
        "our scheduler in the engine, which needs --engine; the last one the proxy before it as well",
    )
    how.add_argument(
        "--rounds", type=int, default=3, help="each side once per round, on requests of its own (default: 3)"
    )
    how.add_argument("--proxy-flags", default="", help="further flags of slai-proxy serve")
    how.add_argument("--json", metavar="OUT", help="write all figures to this file, after each run")
    add_load_arguments(parser)
    # A small model on a CPU: ShareGPT prompts at a third of their length, short answers.
    parser.set_defaults(requests=80, scale_lengths=1 / 3, max_output_tokens=60)
    return parser


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in what was left out, and end with a message where something makes no sense."""
    args.sides = args.sides.split(",")
    if unknown := set(args.sides) - set(SIDES) - set(PLUGINS):
        parser.error(f"--sides: no {', '.join(sorted(unknown))}; there are {', '.join((*SIDES, *PLUGINS))}")
    if not args.engine and set(args.sides) & set(PLUGINS):
        parser.error("--engine is needed for an engine with our scheduler inside")
    needed = {"small" if side in SMALL else "large" for side in args.sides}
    if not args.engine and (missing := [f"--{name}" for name in sorted(needed) if getattr(args, name) is None]):
        parser.error(f"--engine, or else {' and '.join(missing)}, is needed")
    if args.rate is None and args.concurrency is None:
        parser.error("--rate is needed: near 0.85 of what the engine can do")
    if args.classes is None:
        strict, relaxed = RequestClass("strict", tbt_seconds=0.3), RequestClass("relaxed", tbt_seconds=1.5)
        args.classes = [ClassShare(strict, 0.15), ClassShare(relaxed, 0.85)]


def figures(records: Sequence[RequestRecord], side: str, number: int, strictest: RequestClass) -> Figures:
    """Say of a run what the table shows; ``strictest`` is the class whose TBT is judged."""
    measured = measure(records)
    ttfts, of_class = measured["all"]["ttft_s"], [r for r in records if r.request.request_class == strictest]
    ended = [r for r in of_class if r.completed]
    gaps = sorted(gap for r in ended for gap in r.gaps)
    limit = strictest.tbt_seconds or float("inf")
    done = [r.finished_at for r in records if r.completed and r.finished_at is not None]
    return Figures(
        side,
        number,
        len(done),
        len(records),
        tuple(ttfts[name] for name in ("p50", "p90", "p99")),
        gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))] if gaps else None,
        sum(all(gap <= limit for gap in r.gaps) for r in ended) / len(of_class) if of_class else None,
        len(done) / max(done, default=1.0),
        prompt_tokens=sum(r.request.prompt_tokens for r in records),
        measured=measured,
    )


def tightest(classes: Sequence[ClassShare]) -> RequestClass:
    """The class whose TBT is judged."""
    return min((c.request_class for c in classes), key=lambda c: c.tbt_seconds or float("inf"))


def read_metrics(exposition: str) -> dict[str, float]:
    """The proxy's figures on engines and slices, without their labels but for those that tell samples apart."""
    found: dict[str, float] = {}
    for line in exposition.splitlines():
        if matched := re.fullmatch(r"(slai_(?:engine|slice)\w*|process_cpu_seconds_total)(\{[^}]*\})? (\S+)", line):
            name, labels, value = matched.groups()
            label = re.sub(r'engine="[^"]*",?', "", labels or "").strip("{},")
            found[f"{name}{{{label}}}" if label else name] = float(value)
    return found


def hit_rate(metrics: dict[str, float]) -> float | None:
    """Share of the earlier slices' tokens that engines found cached; ``None`` where no slice followed another."""
    found, lost = (metrics.get(f'slai_slice_prefix_tokens_total{{cached="{told}"}}', 0.0) for told in ("yes", "no"))
    return found / (found + lost) if found + lost else None


def costs(runs: Sequence[Figures]) -> list[str]:
    """What slices cost: what is sent for each prompt, and the proxy's CPU time, beside that of the gate."""
    sliced = [run for run in runs if run.side == "tiles" and run.metrics.get("slai_slices_total")]
    if not sliced:
        return []
    slices = sum(run.metrics["slai_slices_total"] for run in sliced)
    sent = sum(value for run in sliced for name, value in run.metrics.items() if name.startswith(_SENT))
    prompts = sum(run.prompt_tokens for run in sliced)
    per_slice = slices / sum(run.requests for run in sliced)
    lines = [f"slices: {per_slice:.1f} per request; {sent / prompts:.1f} tokens in them for each of a prompt"]
    per_request = {
        side: sum(run.metrics.get("process_cpu_seconds_total", 0.0) for run in own) / sum(run.requests for run in own)
        for side in ("gate", "tiles")
        if (own := [run for run in runs if run.side == side])
    }
    if len(per_request) == 2:
        more = (per_request["tiles"] - per_request["gate"]) * sum(run.requests for run in sliced) / slices
        told = ", ".join(f"{side} {1e3 * seconds:.1f} ms" for side, seconds in per_request.items())
        lines.append(f"CPU of the proxy: {told} per request; {1e3 * more:.2f} ms more per slice")
    return lines


async def run_side(side: str, number: int, args: argparse.Namespace, notes: Console) -> Figures:
    """Measure one side in one round: every side of a round gets the same requests at the same times."""
    async with engine_for(side, args) as engine:
        return await measure_side(side, number, engine, args, notes)


async def measure_side(
    side: str, number: int, on: tuple[str, int], args: argparse.Namespace, notes: Console
) -> Figures:
    """As ``run_side``, over an engine that runs already: its address and its token budget."""
    async with AsyncExitStack() as stack:
        engine, budget = on
        url = engine
        if side in _PROXY:
            words = ["proxy", "serve", "--engines", engine, "--port", "0", "--log-level", "warning"]
            words += ["--token-budget", str(budget), "--max-num-seqs", str(args.max_num_seqs)]
            words += [*_PROXY[side], *shlex.split(args.proxy_flags)]
            child = await stack.enter_async_context(running("the proxy", words, address=r"listens on (http://\S+)"))
            url = child.address
        model = await wait_until_ready([url], patience_seconds=args.wait)

        async def run(**changed: object) -> Sequence[RequestRecord]:
            seeded = argparse.Namespace(**{**vars(args), **changed})
            _, planned = plan_load(seeded, lambda line: notes.print(line, markup=False))
            with open_display(notes) as display:
                return await run_workload(planned.schedule.requests, [url], model=model, progress=display)

        await run(
            rate=Rate.constant(_WARM_UP_RATE),
            requests=_WARM_UP_REQUESTS,
            seconds=None,
            concurrency=None,
            seed=args.seed - 1,
        )
        before = await asyncio.to_thread(engine_counts, engine)
        proxy_before = await _proxy_metrics(url) if side in _PROXY else {}
        loads = os.getloadavg()
        records = await run(seed=args.seed + number)
        found = figures(records, side, number, tightest(args.classes))
        found.rate = None if args.rate is None else args.rate.single
        found.load_average = (*loads[:1], *os.getloadavg()[:1])
        counts = await asyncio.to_thread(engine_counts, engine)
        found.engine = {name: value - before.get(name, 0.0) for name, value in counts.items()}
        if side in _PROXY:
            now = await _proxy_metrics(url)
            found.metrics = {
                name: value - proxy_before.get(name, 0.0) * ("_total" in name) for name, value in now.items()
            }
            found.hit_rate = hit_rate(found.metrics)
        return found


async def _proxy_metrics(url: str) -> dict[str, float]:
    with await asyncio.to_thread(urlopen, f"{url}/metrics") as answer:
        return read_metrics(answer.read().decode())


def table(runs: Sequence[Figures]) -> Table:
    """One row per side: values by round, and for several rounds their median."""
    shown = Table(
        "", "TTFT p50", "p90", "p99", "TBT p99, strict", "strict in time", "completed/s", "slices found", "load"
    )

    def cell(values: Sequence[float | None], form: str) -> str:
        known = [value for value in values if value is not None]
        text = " / ".join("-" if value is None else format(value, form) for value in values)
        return f"{text} ({format(median(known), form)})" if len(known) > 1 else text

    for side in dict.fromkeys(run.side for run in runs):
        own = [run for run in runs if run.side == side]
        shown.add_row(
            side,
            *(cell([run.ttft[i] for run in own], ".2f") for i in range(3)),
            cell([run.strict_tbt_p99 for run in own], ".3f"),
            cell([run.strict_in_time for run in own], ".0%"),
            cell([run.completed_per_second for run in own], ".2f"),
            cell([run.hit_rate for run in own], ".1%"),
            " / ".join(f"{run.load_average[0]:.1f}" for run in own if run.load_average),
        )
    return shown


async def compare(args: argparse.Namespace, notes: Console) -> list[Figures]:
    """All sides in all rounds; the order in a round turns, so that no side always follows the same one."""
    runs: list[Figures] = []
    for number in range(args.rounds):
        turn = number % len(args.sides)
        for side in (*args.sides[turn:], *args.sides[:turn]):
            notes.print(f"round {number + 1} of {args.rounds}: {side}", markup=False)
            runs.append(await run_side(side, number, args, notes))
            if args.json:
                _keep(runs, args)
    return runs


def _keep(runs: Sequence[Figures], args: argparse.Namespace) -> None:
    told = {
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "runs": [asdict(run) for run in runs],
    }
    Path(args.json).write_text(json.dumps(told, indent=1), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args, notes = parse_arguments(argv), Console(stderr=True)
    try:
        runs = eventloop.run(compare(args, notes))
    except (ChildError, NotReadyError, PlanError, TraceError) as error:
        notes.print(f"compare_tiles: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        notes.print("interrupted; what was measured is in the file of --json")
        return 130
    shown = Console(width=max(140, Console().width))
    shown.print(table(sorted(runs, key=lambda run: run.round)))
    for line in costs(runs):
        shown.print(line, markup=False, highlight=False)
    return 0 if all(run.completed == run.requests for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
