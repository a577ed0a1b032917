"""What a fleet costs.

latency: what a release takes from the client to an engine that has nothing to do. traffic: commands and bytes at Redis,
and CPU, for each request and token. capacity: how many letters a second one Redis carries. queue: what the leader's
decisions take with how many requests waiting. Without a name all of them, which takes some ten minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

import uvloop

from fleet.cost import capacity, latency, queue, traffic

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> int:
    parser = argparse.ArgumentParser("python -m fleet.cost", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="latency, traffic, capacity, queue (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement that is taken in turns")
    parser.add_argument("--requests", type=int, default=200, help="latency: of a round, each way")
    parser.add_argument("--rates", default="5,20,80", help="traffic: requests a second")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="traffic: at each rate; capacity: a third of it each"
    )
    parser.add_argument("--processes", type=int, default=2, help="capacity: that send to Redis")
    parser.add_argument("--connections", type=int, default=8, help="capacity: of each of them")
    parser.add_argument("--waiting", default="10,1000,10000,100000", help="queue: its lengths")
    options = parser.parse_args()
    # Of the processes that are started.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    parts: dict[str, Callable[[], object]] = {
        "latency": lambda: uvloop.run(latency.measure(options.rounds, options.requests)),
        "traffic": lambda: uvloop.run(traffic.measure([float(r) for r in options.rates.split(",")], options.seconds)),
        "capacity": lambda: uvloop.run(
            capacity.measure(options.processes, options.connections, options.rounds, options.seconds / 3)
        ),
        "queue": lambda: queue.measure([int(size) for size in options.waiting.split(",")], options.rounds),
    }
    if unknown := [name for name in options.parts if name not in parts]:
        parser.error(f"nothing is called {', '.join(unknown)}; there are {', '.join(parts)}")
    for name in options.parts or parts:
        began = os.getloadavg()[0]
        print(f"{name}\n{parts[name]()}\nload average {began:.1f} to {os.getloadavg()[0]:.1f}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
