"""``slai-loadgen compare``: the same requests to two or more sides in turn; or two reports side by side."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from loadgen import eventloop
from loadgen.comparison import compare_rounds, is_share, order_of, run_rounds
from loadgen.load_arguments import add_load_arguments, count, plan_load
from loadgen.output import Format, add_report_arguments, publish, refuse_unwritable, table_console
from loadgen.page_parts import per_second, percent, seconds
from loadgen.progress import open_display
from loadgen.report import (
    SCHEMA_VERSION,
    Document,
    comparison_table,
    describe_classes,
    late_client,
    new_table,
    same_workload,
    show,
)
from loadgen.server_arguments import add_server_arguments, allow_many_sockets, live, simulated, urls
from proxy import __version__
from proxy.sim.workload import PAPER_CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.table import Table

    from loadgen.comparison import Records, Round, Serve
    from proxy.sim.workload import ScheduledRequest

_FINE, _FAILED, _INTERRUPTED = 0, 1, 130
_SIDES = "abcd"

DESCRIPTION = """\
Send the same requests at the same times to two sides (or up to four), in turn, round after round and each time in
another order, and say by how much they differ, with 95 % intervals. The requests of a round are the same for all sides,
so what makes one round harder than the next does not count as a difference; each draw behind an interval takes the same
requests on both sides. Or set two reports side by side that run --json has written.
"""

NOTES = """\
examples:
  what does the proxy do to my servers' users?
    slai-loadgen compare --a direct=http://gpu1:8000,http://gpu2:8000 --b proxy=http://127.0.0.1:8000 \\
        --rate 4 --requests 500 --rounds 4 --html compare.html

  the same question to the simulator, at once
    slai-loadgen compare --simulate h100 --engines 2 --a fcfs --b gate --rate 12 --requests 2000

  two reports of runs that were made earlier
    slai-loadgen compare direct.json proxy.json

exit status: 0 fine; 1 a side completed nothing, or the client was late; 2 wrong usage; 130 interrupted (whole rounds
are compared)
"""


def add_compare(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "compare",
        help="send the same requests to two sides in turn, and compare; or compare two reports",
        usage="slai-loadgen compare --a NAME=URL[,URL] --b NAME=URL[,URL] [options]\n"
        "       slai-loadgen compare A.json B.json",
        description=DESCRIPTION,
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reports", nargs="*", metavar="REPORT.json", help="two reports, written by run --json")
    sides = parser.add_argument_group("sides")
    for letter in _SIDES:
        told = "the side that the others are measured by" if letter == "a" else "another side"
        sides.add_argument(
            f"--{letter}", metavar="NAME=URL[,URL]", help=f"{told}; with --simulate its policy, as [NAME=]gate"
        )
    sides.add_argument("--rounds", type=count, default=3, metavar="N", help="how often each side runs (default: 3)")
    add_load_arguments(parser)
    add_server_arguments(parser, sides=True)
    add_report_arguments(parser, Format.JSON, Format.HTML)


def run_compare(args: argparse.Namespace) -> int:
    """Carry out ``slai-loadgen compare`` and return the exit status.

    Raises:
        ValueError: the arguments do not go together, or a file they name cannot be used.
        NotReadyError: a server is not.
    """
    named = {letter: value for letter in _SIDES if (value := getattr(args, letter)) is not None}
    if args.reports:
        if len(args.reports) != 2 or named:
            raise ValueError("compare two reports, or sides that --a and --b name")
        return _compare_reports(*args.reports)
    sides = _sides(named, simulated=args.simulate is not None)
    refuse_unwritable(args)
    if args.simulate is None:
        return eventloop.run(compare_live(args, sides))
    notes = Console(stderr=True)
    return _simulated(args, sides, _rounds(args, lambda line: _tell(notes, line)))


def _sides(named: Mapping[str, str], *, simulated: bool) -> dict[str, str]:
    """Return the sides by their names.

    Raises:
        ValueError: there are too few, or two have one name.
    """
    sides: dict[str, str] = {}
    for letter, value in named.items():
        name, equals, what = value.partition("=")
        if not equals or "://" in name:
            name, what = (value if simulated else letter), value
        if name in sides:
            raise ValueError(f"--{letter}: two sides are called {name!r}; write NAME={what}")
        sides[name] = what
    if len(sides) < 2:
        raise ValueError("compare needs two sides (--a and --b), or two reports")
    return sides


def _rounds(args: argparse.Namespace, tell: Callable[[str], None]) -> list[Sequence[ScheduledRequest]]:
    """Draw the requests of every round; a schedule is the same each time."""
    rounds: list[Sequence[ScheduledRequest]] = []
    for seed in range(args.seed, args.seed + args.rounds):
        # What was said of the trace once need not be said again.
        heard = tell if seed == args.seed else lambda _line: None
        trace, planned = plan_load(argparse.Namespace(**{**vars(args), "seed": seed}), heard)
        rounds.append(planned.schedule.requests)
        if trace is None:
            return rounds * int(args.rounds)
    return rounds


def _simulated(args: argparse.Namespace, sides: Mapping[str, str], rounds: Sequence[Sequence[ScheduledRequest]]) -> int:
    servers = dict(zip(sides, simulated(args, list(sides.values())), strict=True))
    done: list[dict[str, Records]] = []
    interrupted = False
    try:
        for number, workload in enumerate(rounds):
            done.append({})
            for name in order_of(list(servers), number):
                servers[name].check(workload)
                done[-1][name] = servers[name].serve(workload, args.seed + number)
    except KeyboardInterrupt:
        interrupted = True
    described = {name: server.describe() for name, server in servers.items()}
    return _finish(args, done, described, len(rounds[0]), interrupted=interrupted)


async def compare_live(args: argparse.Namespace, sides: Mapping[str, str]) -> int:
    """Compare servers, whose addresses ``sides`` has by their names, and return the exit status.

    Raises:
        ValueError: an address is none, or the load cannot be planned.
        NotReadyError: a server is not.
    """
    notes = Console(stderr=True)
    rounds = _rounds(args, lambda line: _tell(notes, line))
    try:
        addresses = {name: urls(what) for name, what in sides.items()}
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from error
    servers = {name: await live(args, where, lambda line: _tell(notes, line)) for name, where in addresses.items()}
    allow_many_sockets()
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    async def serve(name: str, workload: Sequence[ScheduledRequest]) -> Records:
        with open_display(notes) as display:
            return await servers[name].serve(workload, progress=display, stop=stop)

    serving: dict[str, Serve] = {name: partial(serve, name) for name in servers}
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        done = await run_rounds(
            serving,
            rounds,
            stop=stop,
            on_run=lambda number, name: _tell(notes, f"round {number + 1} of {len(rounds)}: {name}"),
        )
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    described = {name: server.describe() for name, server in servers.items()}
    return _finish(args, done, described, len(rounds[0]), interrupted=stop.is_set())


def _finish(
    args: argparse.Namespace,
    done: list[dict[str, Records]],
    described: Mapping[str, Any],
    requests: int,
    *,
    interrupted: bool,
) -> int:
    names = list(described)
    # An interrupted run is of no use to a comparison, and its round neither.
    whole = done[:-1] if interrupted else done
    console = table_console(stderr=args.json == "-")
    if not whole:
        console.print(Text("Interrupted before the first round was complete; there is nothing to compare."))
        return _INTERRUPTED
    document = _document(args, whole, names, described, requests, interrupted=interrupted)
    show(console, _table(document))
    for line in document["remarks"]:
        console.print(Text(line), soft_wrap=True)
    publish(args, document)
    if interrupted:
        return _INTERRUPTED
    return _FINE if document["valid"] else _FAILED


def _document(
    args: argparse.Namespace,
    rounds: Sequence[Round],
    names: Sequence[str],
    described: Mapping[str, Any],
    requests: int,
    *,
    interrupted: bool,
) -> Document:
    found = compare_rounds(rounds, names, args.seed)
    reason = _why_invalid(found["sides"], interrupted=interrupted)
    document: Document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "comparison",
        "config": {
            "version": __version__,
            "sides": dict(described),
            "rate": args.rate and (args.rate.single or str(args.rate)),
            "requests": requests,
            "rounds": len(rounds),
            "seed": args.seed,
            "trace": args.trace,
            "classes": describe_classes(args.classes or PAPER_CLASSES),
            "tenants": args.tenants,
            "scale_lengths": args.scale_lengths,
            "max_prompt_tokens": args.max_prompt_tokens,
            "max_output_tokens": args.max_output_tokens,
        },
        **found,
        "interrupted": interrupted,
        "valid": reason is None,
        "invalid_reason": reason,
    }
    document["table"] = list(_rows(document))
    document["remarks"] = list(_remarks(document))
    return document


def _why_invalid(sides: Mapping[str, Any], *, interrupted: bool) -> str | None:
    if interrupted:
        return "interrupted before its end; the whole rounds are compared"
    for name, side in sides.items():
        if not side["completed"]:
            return f"{name} completed nothing"
        if why := late_client(side["ttft_s"]["p50"], side["schedule_delay_s"]["p99"]):
            return f"{name}: {why}"
    return None


def _rows(document: Document) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of the table: each side's figure, and how the others relate to the first's."""
    sides, ratios = document["sides"].values(), document["ratios"]
    for label in next(iter(ratios.values())):
        cells = [_figure(side, label) for side in sides]
        yield label, [*cells, *(_related(rows[label], label) for rows in ratios.values())]
    first, *others = sides
    for label, key in (
        ("completed", "completed_per_s"),
        ("goodput", "attained_per_s"),
        ("output tokens", "tokens_per_s"),
    ):
        related = [f"{o[key] / first[key]:.3f}" if o[key] and first[key] else "-" for o in others]
        yield label, [*(per_second(side[key], 1 if key == "tokens_per_s" else 3) for side in sides), *related]
    yield "failed", [*(str(side["requests"] - side["completed"]) for side in sides), *("" for _ in others)]


def _figure(side: Mapping[str, Any], label: str) -> str:
    name, _, rest = label.partition(" ")
    if name == "attainment":
        return percent((side["by_class"][rest] if rest else side)["attainment"])
    quantile, _, group = rest.partition(" ")
    figures = side["by_class"][group] if group else side
    return seconds(figures[{"TTFT": "ttft_s", "TBT": "tbt_s", "end-to-end": "e2e_s"}[name]][quantile])


def _related(row: Mapping[str, Any], label: str) -> str:
    value, interval = row["value"], row["interval"]
    if value is None:
        return "-"

    def told(number: float | None) -> str:
        if number is None:
            return "never"
        return f"{100 * number:+.2f}" if is_share(label) else f"{number:.3f}"

    sure = f" ({told(interval[0])} to {told(interval[1])})" if interval else ""
    return f"{told(value)}{' points' if is_share(label) else ''}{sure}"


def _table(document: Document) -> Table:
    head = [f"{name} / {document['base']} (95 %)" for name in document["ratios"]]
    table = new_table("", *document["sides"], *head)
    for label, cells in document["table"]:
        table.add_row(label, *cells)
    return table


def _remarks(document: Document) -> Iterator[str]:
    rounds = document["config"]["rounds"]
    for name, rows in document["ratios"].items():
        each = [f"{value:.3f}" for value in rows["TTFT p50"]["rounds"] if value is not None]
        if len(each) > 1:
            yield f"TTFT p50 of {name} over that of {document['base']}, round by round: {', '.join(each)}."
    if rounds < 3:
        yield f"{rounds} round{'s' if rounds > 1 else ''} cannot tell what changes from one round to the next."
    for name, side in document["sides"].items():
        if side["errors"]:
            listed = ", ".join(f"{n} x {error}" for error, n in sorted(side["errors"].items(), key=lambda i: -i[1]))
            yield f"{name} failed {listed}. A failed request counts as a missed deadline."
    if not document["valid"]:
        yield f"Not valid: {document['invalid_reason']}."


def _compare_reports(first: str, second: str) -> int:
    a, b = _read_document(first), _read_document(second)
    names = (Path(first).stem, Path(second).stem)
    show(table_console(), comparison_table(a, b, names if names[0] != names[1] else (first, second)))
    notes = Console(stderr=True)
    if not same_workload(a, b):
        _tell(notes, "The two runs had different workloads; their difference says little.")
    for name, document in ((first, a), (second, b)):
        if not document["valid"]:
            _tell(notes, f"{name} is not valid: {document['invalid_reason']}.")
    return _FINE if a["valid"] and b["valid"] else _FAILED


def _read_document(name: str) -> Document:
    try:
        document = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{name}: not JSON ({error})") from error
    parts = {"config", "trace", "counts", "metrics", "valid", "invalid_reason"}
    known = isinstance(document, dict) and document.get("schema_version") == SCHEMA_VERSION
    if not known or not parts <= document.keys():
        raise ValueError(f"{name}: not a report of slai-loadgen run --json, or of another version of it")
    found: Document = document
    return found


def _tell(notes: Console, line: str) -> None:
    notes.print(Text(line), soft_wrap=True)
