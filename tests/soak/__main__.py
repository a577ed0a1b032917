"""The command: how many requests, how many at once, how often an engine is killed."""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict
from math import inf
from pathlib import Path

from soak.run import check, soak


def main() -> int:
    parser = argparse.ArgumentParser("python -m soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="default: 100,000")
    parser.add_argument("--at-once", type=int, default=120, help="requests under way at a time (default: 120)")
    parser.add_argument("--engines", type=int, default=3, help="engine processes (default: 3)")
    parser.add_argument("--kill-seconds", type=float, default=4.0, help="time between two kills (default: 4)")
    parser.add_argument("--most-seconds", type=float, default=inf, help="end after this, with fewer requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    begun = time.monotonic()

    def tell(done: int, resident: int) -> None:
        rate = done / (time.monotonic() - begun)
        print(f"{done:7} of {options.requests}, {rate:.0f}/s, proxy {resident / 1e6:.1f} MB", flush=True)

    result = asyncio.run(
        soak(
            options.requests,
            at_once=options.at_once,
            engines=options.engines,
            kill_seconds=options.kill_seconds,
            seed=options.seed,
            most_seconds=options.most_seconds,
            tell=tell,
        )
    )
    wrong = check(result)
    resident = [size for _, size in result.samples]
    later = resident[len(resident) // 3 :]
    print(
        f"\n{result.requests} requests in {result.seconds:.0f} s, engines killed {result.killed} times\n"
        f"clients saw: {json.dumps(result.went, sort_keys=True)}\n"
        f"the proxy began {result.after['begun']}, outcomes {json.dumps(result.after['outcomes'], sort_keys=True)}\n"
        f"memory: {result.before['resident_bytes'] / 1e6:.1f} MB after the first, then {min(later) / 1e6:.1f} to "
        f"{max(later) / 1e6:.1f} MB over the later two thirds ({result.growth_bytes():+.1f} bytes per request)\n"
        f"at the end: held {result.after['left_over'] or 'nothing'}, {result.after['tasks']} tasks "
        f"({result.before['tasks']} before), {result.after['files']} files ({result.before['files']} before), "
        f"{result.after['idle_upstream']} idle connections to engines\n"
        + ("WRONG: " + "; ".join(wrong) if wrong else "all is well")
    )
    if options.json:
        options.json.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
