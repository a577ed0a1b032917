"""``slai-proxy engine``: simulated vLLM servers on ports of this machine."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from math import inf

from proxy.sim.engine import EngineConfig
from proxy.sim.http.app import start_engines, stop_engines
from proxy.sim.profiles import PROFILES, find_profile

_LAST_PORT = 65535


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "engine",
        help="start simulated vLLM servers",
        description="Start simulated vLLM servers in this process, until Ctrl-C. They answer like vLLM, at the pace of "
        "the GPU that they imitate.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="example: slai-proxy engine --ports 8101,8102 --speed 4",
    )
    parser.add_argument(
        "--ports", default="8101", help="one engine for each of these ports, with commas; 0 is any free one"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--profile",
        default="rtx6000ada",
        metavar="NAME|FILE",
        help=f"GPU to imitate: {', '.join(PROFILES)}; or a file that slai-proxy calibrate has written",
    )
    parser.add_argument("--token-budget", type=int, default=512, help="--max-num-batched-tokens of each engine")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="--max-num-seqs of each engine")
    parser.add_argument(
        "--async-scheduling",
        action="store_true",
        help="compose each step while the one before it runs, as vLLM does on GPUs: a prompt waits a step longer",
    )
    parser.add_argument("--model", default="simulated", help="name of the model that they serve")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times faster than real time")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    try:
        ports = [_port(port.strip()) for port in options.ports.split(",")]
        _check(options)
        config = EngineConfig(
            find_profile(options.profile),
            options.token_budget,
            options.max_num_seqs,
            async_scheduling=options.async_scheduling,
        )
    except ValueError as error:
        print(f"slai-proxy engine: {error}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        asyncio.run(_serve(options, ports, config))
    except OSError as error:
        print(f"slai-proxy engine: cannot listen: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _port(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= _LAST_PORT:
        return int(text)
    raise ValueError(f"--ports: {text!r} is not a port (0 to {_LAST_PORT})")


def _check(options: argparse.Namespace) -> None:
    """Make sure of the numbers.

    Raises:
        ValueError: one is of no use; the message names its flag.
    """
    numbers = {
        "--token-budget": options.token_budget,
        "--max-num-seqs": options.max_num_seqs,
        "--speed": options.speed,
    }
    for flag, number in numbers.items():
        if not 0 < number < inf:
            raise ValueError(f"{flag}: {number:g} is not a positive number")
    if options.token_budget < options.max_num_seqs:
        raise ValueError(
            f"--token-budget: {options.token_budget} does not hold one token of each of --max-num-seqs "
            f"{options.max_num_seqs} sequences"
        )


async def _serve(options: argparse.Namespace, ports: list[int], config: EngineConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engines = await start_engines(ports, config, model=options.model, speed=options.speed, host=options.host)
    urls = ",".join(engine.url for engine in engines)
    limits = f"--token-budget {options.token_budget} --max-num-seqs {options.max_num_seqs}"
    print(  # noqa: T201
        f"simulated engines at {urls}",
        f"for a proxy in front: slai-proxy serve --engines {urls} {limits}",
        sep="\n",
        flush=True,
    )
    await stop.wait()
    await stop_engines(engines)
