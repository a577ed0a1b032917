"""Let a fleet fail in all ways that are known here, and tell what its clients saw.

Starts a Redis server, two engines that count, and replicas as processes; every fault has a world of its own. The
clients keep all slots and as many places in the queue taken until 10 s after the fault. With the default sizes one
takes a minute or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from itertools import product
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
    parser.add_argument("--rounds", type=int, default=1, help="how often each is tried")
    parser.add_argument("--logs", type=Path, help="keep the replicas' logs there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    if unknown := [name for name in options.faults if name not in FAULTS]:
        parser.error(f"no fault is called {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    size = Size(options.replicas, options.running, options.waiting)
    console = Console(width=150)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        for round_number, name in product(range(options.rounds), options.faults or FAULTS):
            print(f"{name} ...", file=sys.stderr, flush=True)
            logs = (options.logs or Path(scratch)) / f"{name}-{round_number}"
            logs.mkdir(parents=True, exist_ok=True)
            outcome = asyncio.run(try_fault(name, logs, size))
            outcomes.append(outcome)
            console.print(_table([outcome]))
            if options.json:
                options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    console.print(_table(outcomes))
    return int(not all(o.good for o in outcomes))


def _table(outcomes: list[Outcome]) -> Table:
    table = Table()
    for column in ("fault", "clients saw, by replica", "without a release", "gap", "one queue", "most", "left", "load"):
        table.add_column(column)
    for o in outcomes:
        seen, pauses, gaps = [], [], []
        for name, of in o.seen.items():
            mark = "*" if name == o.hit else ""
            seen.append(f"{name}{mark}: " + ", ".join(f"{count} {what}" for what, count in sorted(of.outcomes.items())))
            pauses.append(f"{o.pauses[name]:.2f} s")
            gaps.append(f"{of.longest_gap_seconds:.2f} s")
        table.add_row(
            o.fault if o.good else f"[red]{o.fault}",
            "\n".join(seen),
            "\n".join((*pauses, f"all: {o.pauses['all']:.2f} s")),
            "\n".join(gaps),
            "never" if o.united_seconds is None else f"{o.united_seconds:.2f} s",
            f"{o.most_at_an_engine} of {o.slots}\n(may be {o.most_allowed:.0f})",
            "\n".join(f"{what} {count:g}" for what, count in o.left.items()) or "nothing",
            f"{o.load_average:.1f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
