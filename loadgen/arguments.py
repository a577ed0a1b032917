"""The command line of ``slai-loadgen``: what may be asked for, and the help that explains it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn

from loadgen.capacity_command import add_capacity
from loadgen.compare_command import add_compare
from loadgen.demo import DemoPlan
from loadgen.inspect_command import add_inspect
from loadgen.load_arguments import LOAD_NOTES, add_load_arguments, count, positive
from loadgen.output import Format, add_report_arguments
from loadgen.selftest_command import add_selftest
from loadgen.server_arguments import add_server_arguments
from proxy import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXAMPLES = """\
examples:
  see what the proxy does, with simulated servers, in a minute
    slai-loadgen demo

  what can one server do at 2 requests per second?
    slai-loadgen run --url http://localhost:8000 --trace sharegpt-like --rate 2 --requests 600

  the same requests to the servers directly and through the proxy in front of them, in turn
    slai-loadgen compare --a direct=http://gpu1:8000,http://gpu2:8000 --b proxy=http://127.0.0.1:8000 \\
        --rate 4 --requests 500 --html compare.html

  up to which rate does half a second to the first token hold?
    slai-loadgen capacity --url http://localhost:8000 --slo 'ttft_p50<=0.5s' --state search.jsonl
"""

_RUN_NOTES = f"""\
{LOAD_NOTES}
examples:
  paying users' 100 ms between tokens, free users' 500 ms, and a first token within 2 s for both
    slai-loadgen run --url http://localhost:8000 --rate 2 --requests 600 \\
        --class paying:0.05:tbt=0.1:ttft=2 --class free:0.95:tbt=0.5:ttft=2

  your own traffic, at its own times or at a rate
    slai-loadgen run --url http://localhost:8000 --trace traffic.csv --window 0:600 --json out.json
    slai-loadgen run --url http://localhost:8000 --trace traffic.csv --rate 5 --requests 3000 --json out.json

  the very same requests again, on another machine
    slai-loadgen plan --trace traffic.csv --rate 5 --requests 3000 --out load.jsonl.gz
    slai-loadgen run --url http://localhost:8000 --trace load.jsonl.gz

  a small model on a CPU: a tenth of every length
    slai-loadgen run --url http://localhost:8000 --rate 1 --requests 60 --scale-lengths 0.1 --max-prompt-tokens 900

exit status: 0 fine; 1 nothing completed, or the run is not valid; 2 wrong usage; 130 interrupted
"""


_PLAN_DESCRIPTION = """\
Decide every request of a load (when it leaves, its lengths, class, tenant and text) and write them to a file, which
slai-loadgen run --trace FILE sends just so, on any machine. Nothing is sent.
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
    add_capacity(commands)
    add_compare(commands)
    add_inspect(commands)
    add_selftest(commands)
    _add_plan(
        commands.add_parser(
            "plan",
            help="write a load to a file, to be sent any number of times",
            description=_PLAN_DESCRIPTION,
            epilog=LOAD_NOTES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser)
    add_server_arguments(parser)
    add_report_arguments(parser, Format.JSON, Format.HTML, Format.RECORDS)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser)
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="the file to write, JSON lines; compressed if its name ends in .gz"
    )


def _add_demo(parser: argparse.ArgumentParser) -> None:
    plan = DemoPlan()
    parser.add_argument(
        "--rate",
        type=positive,
        default=plan.rate,
        metavar="R",
        help=f"requests per second to both servers together (default: {plan.rate:g}, near what they can do)",
    )
    parser.add_argument(
        "--requests",
        type=count,
        default=plan.requests,
        metavar="N",
        help=f"how many requests to send to each side (default: {plan.requests})",
    )
    parser.add_argument(
        "--speed",
        type=positive,
        default=plan.speed,
        metavar="K",
        help=f"run the servers K times as fast as real ones (default: {plan.speed:g}); "
        "more than this machine can do spoils the figures",
    )
    parser.add_argument(
        "--seed", type=int, default=plan.seed, metavar="N", help=f"draws the requests (default: {plan.seed})"
    )
    parser.add_argument("--json", metavar="OUT", help="write both reports to this file; - for standard output")
