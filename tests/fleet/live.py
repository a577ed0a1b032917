"""The same requests to one proxy, to fleets, and to proxies that know nothing of each other: ``python -m fleet.live``.

Before simulated engines in real time, and at a real Redis. In each round every side gets the same requests at the same
times, dealt to its replicas in turn; each run has engines and replicas of its own. One run takes two minutes or more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from redis_server import RedisServer, free_port
from rich.console import Console
from rich.table import Table

from fleet.world import Replica, unite
from loadgen import eventloop
from loadgen.children import running
from loadgen.load_arguments import add_load_arguments, plan_load
from loadgen.metrics import measure
from loadgen.progress import open_display
from loadgen.runner import run_workload, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Callable

_TOKEN_BUDGET, _MAX_NUM_SEQS = 512, 128


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m fleet.live", description=__doc__)
    parser.add_argument("--sides", default="1,2,4,4-apart", help="numbers of replicas (default: 1,2,4,4-apart)")
    parser.add_argument("--engines", type=int, default=4, help="simulated RTX 6000 Ada (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="of all sides (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, after each run")
    add_load_arguments(parser)
    parser.set_defaults(max_output_tokens=300, requests=300)
    args = parser.parse_args()
    if args.rate is None and args.concurrency is None:
        parser.error("--rate is needed: 10 is near what four engines can do of the default trace")
    return args


async def measure_side(side: str, number: int, args: argparse.Namespace, notes: Console) -> dict[str, Any]:
    """One run; ``side`` is a number of replicas, and whether they are apart."""
    count, apart = int(side.partition("-")[0]), side.endswith("-apart")
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        words = ["proxy", "engine", "--ports", ",".join("0" * args.engines), "--max-num-seqs", str(_MAX_NUM_SEQS)]
        words += ["--token-budget", str(_TOKEN_BUDGET)]
        engines = await stack.enter_async_context(running("the engines", words, address=r"(http://\S+)$"))
        server = await stack.enter_async_context(RedisServer(directory))
        flags = ("--token-budget", str(_TOKEN_BUDGET), "--max-num-seqs", str(_MAX_NUM_SEQS))
        meet = "" if apart or count == 1 else server.url
        replicas = [Replica(f"r{n}", engines.address.split(","), meet, flags, free_port()) for n in range(count)]
        for replica in replicas:
            stack.push_async_callback(replica.end)
            await replica.start(directory / f"{replica.name}.log")
        if meet:
            await unite(replicas)
        urls = [replica.url for replica in replicas]
        model = await wait_until_ready(urls, patience_seconds=20.0)
        seeded = argparse.Namespace(**{**vars(args), "seed": args.seed + number})
        _, planned = plan_load(seeded, lambda line: notes.print(line, markup=False))
        began = os.getloadavg()[0]
        with open_display(notes) as display:
            records = await run_workload(planned.schedule.requests, urls, model=model, progress=display)
        found = measure(records)
        return {"side": side, "round": number, "load": [began, os.getloadavg()[0]], **found}


def table(runs: list[dict[str, Any]]) -> Table:
    """A row for each side: its figures in seconds by round, and their ratios to the first side's."""
    first = runs[0]["side"]
    strict = min(runs[0]["tbt_s"], key=lambda name: name != "strict")
    figures: dict[str, Callable[[dict[str, Any]], float]] = {
        "TTFT p50": lambda run: run["ttft_s"]["p50"],
        "TTFT p99": lambda run: run["ttft_s"]["p99"],
        f"TBT p99, {strict}": lambda run: run["tbt_s"][strict]["p99"],
        "tokens/s": lambda run: run["tokens_per_s"],
    }
    shown = Table("replicas", "completed", *figures, "load")
    for side in dict.fromkeys(run["side"] for run in runs):
        own = [run for run in runs if run["side"] == side]
        cells = []
        for figure in figures.values():
            of_first = {run["round"]: figure(run) for run in runs if run["side"] == first}
            ratios = [figure(run) / of_first[run["round"]] for run in own if run["round"] in of_first]
            values = " / ".join(f"{figure(run):.3g}" for run in own)
            cells.append(f"{values}\n{median(ratios) - 1:+.1%} ({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})")
        loads = " / ".join(f"{run['load'][1]:.1f}" for run in own)
        shown.add_row(side, " / ".join(f"{run['completed']}" for run in own), *cells, loads)
    return shown


async def compare(args: argparse.Namespace, notes: Console) -> list[dict[str, Any]]:
    """All sides in all rounds; which goes first takes turns."""
    sides, runs = args.sides.split(","), list[dict[str, Any]]()
    for number in range(args.rounds):
        turn = number % len(sides)
        for side in (*sides[turn:], *sides[:turn]):
            notes.print(f"round {number + 1} of {args.rounds}: {side}", markup=False)
            runs.append(await measure_side(side, number, args, notes))
            if args.json:
                args.json.write_text(json.dumps(runs, indent=1))
    return sorted(runs, key=lambda run: (sides.index(run["side"]), run["round"]))


def main() -> int:
    args, notes = parse_arguments(), Console(stderr=True)
    # Of the processes that are started.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    Console(width=170).print(table(eventloop.run(compare(args, notes))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
