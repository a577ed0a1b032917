"""Let a fleet fail in all ways that are known here, and tell what its clients saw.

Starts a Redis server, two engines that count, and replicas as processes; every fault has a world of its own. With the
default sizes one takes half a minute to a minute and a half.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fleet.faults import FAULTS, Outcome, Size, try_fault


def main() -> int:
    parser = argparse.ArgumentParser("python -m fleet", description=__doc__)
    known = "; ".join(f"{name}: {(fault.__doc__ or '').strip().rstrip('.')}" for name, fault in FAULTS.items())
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"which (default: all). {known}")
    parser.add_argument("--replicas", type=int, default=Size.replicas)
    parser.add_argument("--running", type=int, default=Size.running, help="requests of each replica that run")
    parser.add_argument("--waiting", type=int, default=Size.waiting, help="requests of each replica that wait")
    parser.add_argument("--logs", type=Path, help="keep the replicas' logs there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    if unknown := [name for name in options.faults if name not in FAULTS]:
        parser.error(f"no fault is called {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    size = Size(options.replicas, options.running, options.waiting)
    console = Console(width=150)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.faults or FAULTS:
            print(f"{name} ...", file=sys.stderr, flush=True)
            logs = (options.logs or Path(scratch)) / name
            logs.mkdir(parents=True, exist_ok=True)
            outcome = asyncio.run(try_fault(name, logs, size))
            outcomes.append(outcome)
            console.print(_table([outcome]))
            if options.json:
                options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    console.print(_table(outcomes))
    return int(any(o.left or o.most_at_an_engine > o.most_allowed for o in outcomes))


def _table(outcomes: list[Outcome]) -> Table:
    table = Table()
    for column in ("fault", "clients saw, by replica", "longest pause", "most at an engine", "left", "then"):
        table.add_column(column)
    for o in outcomes:
        seen = "\n".join(
            f"{name}: " + ", ".join(f"{count} {what}" for what, count in sorted(s.outcomes.items()))
            for name, s in o.seen.items()
        )
        pause = "-" if o.recovered_seconds is None else f"{o.recovered_seconds:.2f} s"
        left = "\n".join(f"{what} {count:g}" for what, count in o.left.items()) or "nothing"
        table.add_row(
            o.fault,
            seen,
            pause,
            f"{o.most_at_an_engine} (slots {o.slots}, at most {o.most_allowed:.0f})",
            left,
            "\n".join(o.roles.values()),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
