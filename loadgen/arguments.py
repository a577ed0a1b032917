"""The command line of ``slai-loadgen``: what may be asked for, and the help that explains it."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from loadgen.client import Api
from loadgen.demo import DemoPlan
from loadgen.inspect_command import add_inspect
from proxy import __version__
from proxy.sim.workload import SHAREGPT_LIKE, ClassShare, parse_class, parse_tenants

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXAMPLES = """\
examples:
  see what the proxy does, with simulated servers, in a minute
    slai-loadgen demo

  what can one server do at 2 requests per second?
    slai-loadgen run --url http://localhost:8000 --trace sharegpt-like --rate 2 --requests 600

  the same requests to the servers directly, then through the proxy in front of them
    slai-loadgen run --url http://gpu1:8000,http://gpu2:8000 --rate 4 --requests 2000 --json direct.json
    slai-loadgen run --url http://127.0.0.1:8000 --rate 4 --requests 2000 --json proxy.json
    slai-loadgen compare direct.json proxy.json
"""

_RUN_NOTES = """\
The load is an open loop: a request leaves at its own (Poisson) time whether or not the ones before it have been
answered, as independent users do. TTFT counts from that intended time, so time spent in any queue counts.
One --seed gives the same lengths, times and classes at every rate and for every server; the prompts' content is new in
each run, so that prefix caching does not flatter.

examples:
  paying users' 100 ms between tokens, free users' 500 ms, and a first token within 2 s for both
    slai-loadgen run --url http://localhost:8000 --rate 2 --requests 600 \\
        --class paying:0.05:tbt=0.1:ttft=2 --class free:0.95:tbt=0.5:ttft=2

  lengths of your own traffic: a CSV with prompt_tokens and output_tokens, or a ShareGPT JSON file
    slai-loadgen run --url http://localhost:8000 --trace traffic.csv --rate 5 --requests 3000 --json out.json

  a small model on a CPU: a tenth of every length
    slai-loadgen run --url http://localhost:8000 --rate 1 --requests 60 --scale-lengths 0.1 --max-prompt-tokens 900

exit status: 0 fine; 1 nothing completed, or the run is not valid; 2 wrong usage; 130 interrupted
"""


_DEMO_DESCRIPTION = """\
Start two simulated vLLM servers and the proxy, send the same ShareGPT-like requests straight to the servers and then
through the proxy, and set both beside each other and beside what the simulator predicts. Rates, times and deadlines
are in the simulated servers' own time.
"""

_DEMO_NOTES = """\
exit status: 0 fine; 1 it did not come to a valid comparison; 2 wrong usage; 130 interrupted
"""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a command line.

    Raises:
        SystemExit: it asked for help, or it is wrong and that has been told.
    """
    return _parser().parse_args(argv)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One clear line; argparse would print the whole usage before it.
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slai-loadgen",
        description="Send realistic load to OpenAI-compatible servers (vLLM) and report TTFT, TBT and SLO attainment.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slai-loadgen {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(
        commands.add_parser(
            "run",
            help="send a workload and report",
            description="Send a workload to one or more servers and report what its users would have seen.",
            epilog=_RUN_NOTES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    _add_demo(
        commands.add_parser(
            "demo",
            help="show on simulated servers what the proxy does",
            description=_DEMO_DESCRIPTION,
            epilog=_DEMO_NOTES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    add_inspect(commands)
    compare = commands.add_parser("compare", help="set two reports side by side")
    compare.add_argument("a", metavar="A.json", help="report of the first run, written by run --json")
    compare.add_argument("b", metavar="B.json", help="report of the second run")
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--url", required=True, type=_urls, metavar="URL[,URL]", help="servers; several get the requests in turn"
    )
    load.add_argument("--rate", required=True, type=_positive, metavar="R", help="requests per second, on average")
    load.add_argument("--requests", required=True, type=_count, metavar="N", help="how many requests to send")
    load.add_argument(
        "--trace",
        default=SHAREGPT_LIKE,
        metavar="FILE",
        help=f"lengths of prompts and outputs: a CSV or ShareGPT JSON file, or {SHAREGPT_LIKE!r}, the built-in default",
    )
    load.add_argument(
        "--class",
        dest="classes",
        action="append",
        type=_class,
        metavar="NAME:SHARE[:tbt=S][:ttft=S]",
        help="a class of users, its share of the requests and its deadlines in seconds; repeat for each class "
        "(default: strict:0.05:tbt=0.1 and relaxed:0.95:tbt=0.5). Only the deadlines are sent, a proxy accounts the "
        "requests under its default class; see --send-class",
    )
    load.add_argument(
        "--send-class",
        action="store_true",
        help="send the class's name too, as x-slo-class; a proxy that does not know it answers 400",
    )
    load.add_argument(
        "--tenants",
        type=_tenants,
        metavar="NAME=PART[,..]",
        help="tenants and their parts of the rate, e.g. calm=1,flood=10, told by the header x-slai-tenant (a proxy "
        "believes it with --tenants-from header)",
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="draws lengths, times and classes (default: 0)")
    load.add_argument("--max-prompt-tokens", type=_count, metavar="N", help="clip longer prompts to N tokens")
    load.add_argument("--max-output-tokens", type=_count, metavar="N", help="clip longer outputs to N tokens")
    load.add_argument(
        "--scale-lengths", type=_positive, default=1.0, metavar="F", help="multiply all lengths by F, before clipping"
    )

    how = parser.add_argument_group("how it is sent")
    how.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that the server lists)")
    how.add_argument(
        "--api",
        type=Api,
        choices=list(Api),
        default=Api.COMPLETIONS,
        help="completions sends token ids of exact number (default); chat sends text of about that length",
    )
    how.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="S", help="give a request up after S seconds (default: 600)"
    )
    how.add_argument(
        "--wait", type=_positive, default=10.0, metavar="S", help="wait S seconds for the servers (default: 10)"
    )
    how.add_argument(
        "--time-scale",
        type=_positive,
        default=1.0,
        metavar="K",
        help="for a simulated engine that runs K times faster than real: send K times faster, and report in its time",
    )
    report = parser.add_argument_group("report")
    report.add_argument("--json", metavar="OUT", help="write the whole report to this file; - for standard output")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    plan = DemoPlan()
    parser.add_argument(
        "--rate",
        type=_positive,
        default=plan.rate,
        metavar="R",
        help=f"requests per second to both servers together (default: {plan.rate:g}, near what they can do)",
    )
    parser.add_argument(
        "--requests",
        type=_count,
        default=plan.requests,
        metavar="N",
        help=f"how many requests to send to each side (default: {plan.requests})",
    )
    parser.add_argument(
        "--speed",
        type=_positive,
        default=plan.speed,
        metavar="K",
        help=f"run the servers K times as fast as real ones (default: {plan.speed:g}); "
        "more than this machine can do spoils the figures",
    )
    parser.add_argument(
        "--seed", type=int, default=plan.seed, metavar="N", help=f"draws the requests (default: {plan.seed})"
    )
    parser.add_argument("--json", metavar="OUT", help="write both reports to this file; - for standard output")


def _urls(text: str) -> list[str]:
    urls = [part.strip().rstrip("/").removesuffix("/v1") for part in text.split(",")]
    for url in urls:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # A port that is no number, an unclosed bracket.
            usable = False
        if not usable:
            raise argparse.ArgumentTypeError(f"{url!r} is not a URL such as http://localhost:8000")
    return urls


def _class(text: str) -> ClassShare:
    if any(term.startswith("weight=") for term in text.split(":")[2:]):
        raise argparse.ArgumentTypeError("weight is the proxy's affair: give it in its configuration")
    try:
        return parse_class(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _tenants(text: str) -> dict[str, float]:
    try:
        return parse_tenants(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def _count(text: str) -> int:
    with suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
