"""``python -m bench overhead|memory|queue``."""

from __future__ import annotations

import argparse
import sys

import uvloop

from bench import memory, overhead, queue


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    of_overhead = commands.add_parser("overhead", help="CPU per request and per token, beside a plain relay")
    of_overhead.add_argument("--rounds", type=int, default=5)
    of_overhead.add_argument("--serve", default="", help="more arguments of slai-proxy serve, in one word")
    of_memory = commands.add_parser("memory", help="bytes per idle stream and per waiting request")
    of_memory.add_argument("--most", type=int, default=4000, help="streams, reached in four parts")
    of_queue = commands.add_parser("queue", help="pauses of arrivals and releases before a long queue")
    of_queue.add_argument("--waiting", type=int, default=100_000)
    args = parser.parse_args()
    match args.command:
        case "overhead":
            print(uvloop.run(overhead.measure(args.rounds, args.serve.split())))
        case "memory":
            print(uvloop.run(memory.measure(args.most)))
        case _:
            print(queue.measure(args.waiting))
    return 0


if __name__ == "__main__":
    sys.exit(main())
