"""The part of a command line that says what is measured: servers at URLs, or simulated ones."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from loadgen.client import Api
from loadgen.load_arguments import count, positive
from loadgen.runner import wait_until_ready
from loadgen.servers import LiveServer
from loadgen.simulated import SimulatedServer, simulated_servers
from proxy.sim.engine import EngineConfig
from proxy.sim.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def add_server_arguments(parser: argparse.ArgumentParser, *, sides: bool = False) -> None:
    """Add what is measured and how it is sent; with ``sides`` the servers are named elsewhere."""
    how = parser.add_argument_group("how it is sent")
    if not sides:
        how.add_argument("--url", type=urls, metavar="URL[,URL]", help="servers; several get the requests in turn")
    how.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that the server lists)")
    how.add_argument(
        "--api",
        type=Api,
        choices=list(Api),
        default=Api.COMPLETIONS,
        help="completions sends token ids of exact number (default); chat sends text, of exactly that length where the "
        "server has vLLM's /tokenize",
    )
    how.add_argument(
        "--api-key-env", metavar="NAME", help="send the key that the environment variable NAME holds as a bearer token"
    )
    how.add_argument(
        "--standard-only",
        action="store_true",
        help="only fields of OpenAI's own API, for servers that refuse min_tokens and ignore_eos: outputs then end "
        "where the model ends them",
    )
    how.add_argument(
        "--timeout", type=positive, default=600.0, metavar="S", help="give a request up after S seconds (default: 600)"
    )
    how.add_argument(
        "--wait", type=positive, default=10.0, metavar="S", help="wait S seconds for the servers (default: 10)"
    )
    how.add_argument(
        "--processes",
        type=count,
        default=1,
        metavar="N",
        help="send from N processes (default: 1); slai-loadgen selftest tells what one can do on this machine",
    )
    how.add_argument(
        "--time-scale",
        type=positive,
        default=1.0,
        metavar="K",
        help="for a simulated engine that runs K times faster than real: send K times faster, and report in its time",
    )
    how.add_argument(
        "--send-class",
        action="store_true",
        help="send the class's name too, as x-slo-class; a proxy that does not know it answers 400",
    )
    add_simulation_arguments(parser, sides=sides)


def add_simulation_arguments(parser: argparse.ArgumentParser, *, sides: bool) -> None:
    """Add ``--simulate`` and what goes with it."""
    standard = EngineConfig()
    group = parser.add_argument_group("instead of servers, the simulator in virtual time")
    group.add_argument(
        "--simulate",
        choices=list(PROFILES),
        metavar="PROFILE",
        help=f"no server and no waiting: simulated engines on this GPU ({', '.join(PROFILES)})",
    )
    if not sides:
        group.add_argument(
            "--policy",
            default="fcfs",
            metavar="NAME",
            help="what stands in front of the engines, by the names of slai-proxy simulate (default: fcfs, nothing)",
        )
    group.add_argument("--engines", type=count, default=1, metavar="N", help="how many engines (default: 1)")
    group.add_argument(
        "--token-budget",
        type=count,
        default=standard.token_budget,
        metavar="N",
        help=f"tokens in a step (default: {standard.token_budget})",
    )
    group.add_argument(
        "--max-num-seqs",
        type=count,
        default=standard.max_num_seqs,
        metavar="N",
        help=f"sequences in a step (default: {standard.max_num_seqs})",
    )
    group.add_argument("--jitter", action="store_true", help="steps take a little longer, at random")


def simulated(args: argparse.Namespace, policies: Sequence[str]) -> list[SimulatedServer]:
    """Make the simulated servers that ``args`` ask for, one for each policy.

    Raises:
        ValueError: an unknown policy.
    """
    return simulated_servers(
        args.simulate,
        policies,
        engines=args.engines,
        token_budget=args.token_budget,
        max_num_seqs=args.max_num_seqs,
        jitter=args.jitter,
    )


async def live(args: argparse.Namespace, addresses: Sequence[str], tell: Callable[[str], None]) -> LiveServer:
    """Wait until the servers at ``addresses`` are ready.

    Raises:
        NotReadyError: they are not in time.
        ValueError: there is no key where one should be.
    """
    api_key = None
    if args.api_key_env is not None:
        api_key = os.environ.get(args.api_key_env)
        if not api_key:
            raise ValueError(f"--api-key-env: there is no environment variable {args.api_key_env}, or it is empty")
    model = await wait_until_ready(
        addresses,
        patience_seconds=args.wait,
        model=args.model,
        api_key=api_key,
        on_wait=lambda reason: tell(f"waiting up to {args.wait:g} s for {reason}"),
    )
    return LiveServer(
        tuple(addresses),
        model,
        args.api,
        args.time_scale,
        args.timeout,
        args.send_class,
        args.processes,
        api_key,
        args.standard_only,
        tell,
    )


def urls(text: str) -> list[str]:
    """Read addresses with commas between."""
    found = [part.strip().rstrip("/").removesuffix("/v1") for part in text.split(",")]
    for url in found:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # A port that is no number, an unclosed bracket.
            usable = False
        if not usable:
            raise argparse.ArgumentTypeError(f"{url!r} is not a URL such as http://localhost:8000")
    return found


def allow_many_sockets() -> None:
    """Raise the soft limit on open files: an overloaded server leaves thousands of streams open at once."""
    with suppress(ImportError, ValueError, OSError):
        import resource  # noqa: PLC0415 - not on Windows

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_output(option: str, target: str | None) -> str | None:
    """Find out before a long run, not after it, that its report cannot be written; return why."""
    if target in (None, "-"):
        return None
    path = Path(target or "")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        return f"{option}: cannot write to {target}"
    return None
