"""``make paper``: simulate, draw, write; what has been simulated once is kept."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from proxy.sim.argtypes import count
from proxy.sim.paper import figures, page
from proxy.sim.paper.plan import FULL, QUICK, Task, perform, tasks
from proxy.sim.parallel import run_parallel, usable_cores
from proxy.sim.workload import SHAREGPT_LIKE, TraceError, load_trace

_MODEL = (
    "engine.py",
    "kvcache.py",
    "profiles.py",
    "simulator.py",
    "fleet.py",
    "records.py",
    "policies.py",
    "schedulers",
)


def main(argv: list[str] | None = None) -> int:
    """Run it and return the exit status."""
    args = _parser().parse_args(argv)
    notes = Console(stderr=True)
    try:
        trace = load_trace(args.trace)
        azure = None if args.azure is None else load_trace(args.azure)
    except TraceError as error:
        notes.print(Text(f"paper: {error}"), soft_wrap=True)
        return 2
    size = QUICK if args.quick else FULL
    args.cache.mkdir(parents=True, exist_ok=True)
    kept = args.cache / f"runs-{_fingerprint()}.jsonl"
    done = _read(kept)
    wanted = list(tasks(size, trace, azure))
    left = [task for task in wanted if task.key not in done]
    if len(left) < len(wanted):
        notes.print(Text(f"{len(wanted) - len(left)} of {len(wanted)} simulations are in {kept}"), soft_wrap=True)
    began = time.monotonic()
    interrupted = False
    if left and not args.draw_only:
        try:
            _simulate(left, args.jobs, done, kept, notes)
        except KeyboardInterrupt:
            interrupted = True
            notes.print(Text("stopped; what is done is kept, and the next run goes on from there"))
    runs = [done[task.key] for task in wanted if task.key in done]
    if not runs:
        return 130
    written = page.write(args.out, runs, size, (trace, azure), complete=len(runs) == len(wanted))
    written += figures.draw(args.out / "paper", runs)
    seconds = time.monotonic() - began
    notes.print(
        Text(f"{len(runs)} simulations, {seconds:.0f} s now; wrote {', '.join(map(str, written))}"), soft_wrap=True
    )
    return 130 if interrupted else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make paper",
        description="Simulate the evaluation of the SLAI paper, draw figures, and write a page that compares. It takes "
        "some five minutes of one idle core (--quick: under two); it can be stopped and goes on where it was.",
    )
    parser.add_argument("--trace", default=SHAREGPT_LIKE, metavar="FILE", help="lengths (default: the built-in fit)")
    parser.add_argument("--azure", metavar="FILE", help="lengths of Azure's conversations (default: alike, made up)")
    parser.add_argument("--quick", action="store_true", help="fewer rates, seeds and requests: to see how it goes")
    parser.add_argument("--out", type=Path, default=Path("build/paper"), metavar="DIR", help="(default: build/paper)")
    parser.add_argument("--cache", type=Path, default=Path("build/paper"), metavar="DIR", help="(default: build/paper)")
    parser.add_argument("--jobs", type=count, default=usable_cores(), metavar="N", help="processes (default: per core)")
    parser.add_argument("--draw-only", action="store_true", help="simulate nothing: draw what there is")
    return parser


def _simulate(left: list[Task], jobs: int, done: dict[str, Any], kept: Path, notes: Console) -> None:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with (
        kept.open("a", encoding="utf-8") as file,
        Progress(*columns, console=notes, disable=not notes.is_terminal) as progress,
        closing(run_parallel(perform, left, min(jobs, len(left)))) as results,
    ):
        bar = progress.add_task("", total=len(left))
        for number, result in enumerate(results, 1):
            done[result["key"]] = result
            file.write(json.dumps(result) + "\n")
            file.flush()
            progress.update(bar, advance=1, description=result["key"])
            if not notes.is_terminal and number % 10 == 0:
                notes.print(Text(f"{number}/{len(left)} {result['key']}"), soft_wrap=True)


def _read(kept: Path) -> dict[str, Any]:
    done = {}
    if kept.exists():
        for line in kept.read_text(encoding="utf-8").splitlines():
            try:
                run = json.loads(line)
            except ValueError:  # stopped in the middle of it
                continue
            done[run["key"]] = run
    return done


def _fingerprint() -> str:
    """Of the simulator and the core: figures of another one are not to be mixed with."""
    here = Path(__file__).resolve().parent.parent
    files = [here / name for name in _MODEL] + [here.parent / "core"]
    digest = sha256()
    for path in files:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
