"""``python -m bench overhead|memory|queue|streams|flame``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import uvloop

from bench import flame, memory, overhead, queue, streams


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    of_overhead = commands.add_parser("overhead", help="CPU per request and per token, beside a plain relay")
    of_overhead.add_argument("--rounds", type=int, default=5)
    of_overhead.add_argument("--serve", default="", help="more arguments of slai-proxy serve, in one word")
    of_overhead.add_argument("--tree", type=Path, help="measure the proxy of this checkout instead")
    of_memory = commands.add_parser("memory", help="bytes per idle stream and per waiting request")
    of_memory.add_argument("--most", type=int, default=4000, help="streams, reached in four parts")
    of_queue = commands.add_parser("queue", help="pauses of arrivals and releases before a long queue")
    of_queue.add_argument("--waiting", type=int, default=100_000)
    of_streams = commands.add_parser(
        "streams", help="very many streams at once: what gets through, how late, whose CPU"
    )
    of_streams.add_argument(
        "--streams", default="5000", help="how many; several numbers are measured in turn: 1000,2000"
    )
    of_streams.add_argument("--rate", type=float, default=20.0, help="tokens of each stream in a second")
    of_streams.add_argument("--seconds", type=float, default=300.0)
    of_streams.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of the proxy; all cores")
    of_streams.add_argument("--direct", action="store_true", help="without a proxy: what upstream and client carry")
    of_streams.add_argument("--serve", default="", help="more arguments of slai-proxy serve, in one word")
    of_flame = commands.add_parser("flame", help="a flame graph of the proxy under load, by py-spy")
    of_flame.add_argument("load", choices=flame.LOADS, help="answers of one token, or tokens that come one by one")
    of_flame.add_argument("--out", type=Path, required=True, help="SVG")
    of_flame.add_argument("--seconds", type=float, default=20.0)
    of_flame.add_argument("--tree", type=Path, help="draw the proxy of this checkout instead")
    args = parser.parse_args()
    match args.command:
        case "overhead":
            print(uvloop.run(overhead.measure(args.rounds, args.serve.split(), tree=args.tree)))
        case "memory":
            print(uvloop.run(memory.measure(args.most)))
        case "flame":
            flame.draw(args.load, args.out, args.seconds, args.tree)
        case "streams":
            for number in map(int, args.streams.split(",")):
                how = {"workers": args.workers, "direct": args.direct, "more": args.serve.split()}
                try:
                    print(uvloop.run(streams.measure(number, args.rate, args.seconds, **how)), flush=True)
                except RuntimeError as error:
                    print(f"{number} streams are not carried: {error}", flush=True)
        case _:
            print(queue.measure(args.waiting))
    return 0


if __name__ == "__main__":
    sys.exit(main())
