"""``slai-loadgen selftest``: what the client itself can do here."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from loadgen import eventloop
from loadgen.load_arguments import positive
from loadgen.selftest import SelfTest, measure

if TYPE_CHECKING:
    from collections.abc import Iterator

_DESCRIPTION = """\
Measure the client itself against a server without a model, on this machine: how many requests and tokens per second one
process of it can take, and how late requests leave at half of that. A figure about a server is worth something only
where the client has room: a run that needs more than half of what is told here wants more --processes, or machines.
"""

_NOTES = """\
exit status: 0 requests leave in time at half of the ceilings; 1 they do not, or it could not be measured
"""


def add_selftest(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "selftest",
        help="what this client can do on this machine",
        description=_DESCRIPTION,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=positive, default=3.0, metavar="S", help="for each part of the test (default: 3)"
    )
    parser.add_argument("--json", metavar="OUT", help="write the result to this file; - for standard output")


def run_selftest(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit status.

    Raises:
        ChildError: the null server did not come up.
        OSError: the result cannot be written.
    """
    notes = Console(stderr=True)
    found = eventloop.run(
        measure(args.seconds, lambda line: notes.print(line, markup=False, highlight=False, soft_wrap=True))
    )
    text = json.dumps(found.document(), indent=2) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
    else:
        if args.json:
            Path(args.json).write_text(text, encoding="utf-8")
        console = Console()
        for line in describe(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if found.fit else 1


def describe(found: SelfTest) -> Iterator[str]:
    """Yield what a terminal shows."""
    ceilings = f"{found.requests_per_s:,.0f} requests/s, {found.tokens_per_s:,.0f} tokens/s"
    yield f"one process on a core of its own: {ceilings}"
    reached = f"{found.requests_per_s_reached:,.0f} requests/s, {found.tokens_per_s_reached:,.0f} tokens/s"
    yield f"  reached here: {reached} in {found.streams:,} streams"
    for name, phase in (("requests", found.at_half_requests), ("tokens", found.at_half_tokens)):
        p50, p99, most = (_milli(phase.delay_s[key]) for key in ("p50", "p99", "max"))
        alone = 100 * phase.reads / phase.tokens if phase.tokens else 0.0
        rates = f"{phase.offered_per_s or 0:,.0f} requests/s, {phase.offered_tokens_per_s:,.0f} tokens/s"
        yield f"at half the {name} ({rates}): left late by p50 {p50}, p99 {p99}, at most {most}"
        yield f"  {alone:.0f} % of the tokens were read alone, {phase.failed} requests failed"
    if not found.fit:
        yield "At half of its ceilings this client is late: this machine is busy with something else, or too slow."


def _milli(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f} ms"
