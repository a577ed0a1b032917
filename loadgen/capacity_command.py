"""``slai-loadgen capacity``: the largest rate at which a service level objective holds."""

from __future__ import annotations

import argparse
import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from loadgen import eventloop
from loadgen.capacity import Measurement, capacity_figures, search_live, search_simulated
from loadgen.capacity_text import capacity_table, conclusion, run_line
from loadgen.load_arguments import add_load_arguments, count, positive, searched_load
from loadgen.output import Format, add_report_arguments, publish, refuse_unwritable, table_console
from loadgen.progress import open_display
from loadgen.report import SCHEMA_VERSION, Document, describe_classes, show
from loadgen.server_arguments import add_server_arguments, allow_many_sockets, live, simulated
from loadgen.slo import EXAMPLE, Slo, parse_slo
from loadgen.statefile import StateFile
from proxy import __version__
from proxy.sim.parallel import WorkerError, usable_cores
from proxy.sim.search import SearchPlan
from proxy.sim.workload import PAPER_CLASSES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadgen.load import SearchedLoad
    from loadgen.servers import LiveServer
    from loadgen.simulated import SimulatedServer
    from proxy.sim.search import Finding, Outcome, Trial

_FINE, _FAILED, _INTERRUPTED = 0, 1, 130

DESCRIPTION = """\
Find the largest rate of requests at which all limits of a service level objective (SLO) hold. From --start the rate is
doubled or halved until the limits hold at one rate and not at another; then bisection narrows the two down to
--tolerance. Each rate is measured with several seeds, the same ones at every rate, until the 95 % interval of each
figure lies on one side of its limit, or --seeds are used up; a run that is clear is enough alone. A rate at which the
queue only grows does not count as kept, whatever its median says.
"""

NOTES = f"""\
limits       {EXAMPLE}
             ttft, tbt, tpot, e2e with _p50 ... _p99.9, _mean or _max, in s or ms; [class] takes the requests of one
             class; attainment is the share within all deadlines of their class, completed that of any answer at all.
             What fails or is refused has missed: it never had its first token.
runs         A run sends --requests at one rate; its first tenth (--warmup) is not judged. Its lengths are an even
             sample of the trace and its mean rate is exactly the asked one, so that seeds differ in the order of the
             requests and little else. Runs that are too short find too high a capacity: a queue needs time to grow.
stopping     Ctrl-C shows what is known by then. With --state FILE nothing is lost: the same command goes on.

examples:
  what can my server do if half of the users are to see the first token within half a second?
    slai-loadgen capacity --url http://localhost:8000 --slo 'ttft_p50<=0.5s' --start 2 --state search.jsonl

  the same of a simulated GPU, without and with the proxy, in a minute and without any server
    slai-loadgen capacity --simulate rtx6000ada --policy fcfs --slo 'ttft_p50<=0.5s, tbt_p99[strict]<=100ms'
    slai-loadgen capacity --simulate rtx6000ada --policy gate --slo 'ttft_p50<=0.5s, tbt_p99[strict]<=100ms'

exit status: 0 found; 1 not found in the range, or the client was late; 2 wrong usage; 130 interrupted
"""


def add_capacity(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "capacity",
        help="find the largest rate at which an SLO holds",
        description=DESCRIPTION,
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("what to find")
    group.add_argument(
        "--slo", required=True, metavar="LIMITS", help=f"limits with commas between: '{EXAMPLE}'".replace("%", "%%")
    )
    group.add_argument(
        "--start", type=positive, default=1.0, metavar="R", help="the first rate, in requests per second (default: 1)"
    )
    group.add_argument(
        "--tolerance",
        type=positive,
        default=0.025,
        metavar="SHARE",
        help="how close the rates at which it holds and breaks are to be (default: 0.025)",
    )
    group.add_argument("--seeds", type=count, default=6, metavar="N", help="at most N runs at a rate (default: 6)")
    group.add_argument(
        "--least-seeds", type=count, default=3, metavar="N", help="runs at a rate where one is not clear (default: 3)"
    )
    group.add_argument("--lowest", type=positive, metavar="R", help="no rate below R is tried")
    group.add_argument("--highest", type=positive, metavar="R", help="no rate above R is tried")
    group.add_argument(
        "--warmup",
        type=_share,
        default=0.1,
        metavar="SHARE",
        help="share of each run, at its beginning, that is not judged (default: 0.1)",
    )
    group.add_argument("--state", metavar="FILE", help="keep each finished run here, and go on from those in it")
    group.add_argument(
        "--jobs",
        type=count,
        default=usable_cores(),
        metavar="N",
        help="simulated runs at once (default: one for each core)",
    )
    add_load_arguments(parser, searched=True)
    add_server_arguments(parser)
    add_report_arguments(parser, Format.JSON, Format.HTML)


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(text)) < 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")


def run_capacity(args: argparse.Namespace) -> int:
    """Carry out ``slai-loadgen capacity`` and return the exit status.

    Raises:
        ValueError: the arguments do not go together, or a file they name cannot be used.
        NotReadyError: a server is not.
    """
    notes = Console(stderr=True)
    if (args.url is None) == (args.simulate is None):
        raise ValueError("capacity measures servers (--url) or the simulator (--simulate): give one of them")
    refuse_unwritable(args)
    slo = parse_slo(args.slo)
    load = searched_load(args, lambda line: _tell(notes, line))
    slo.check_classes(c.request_class.name for c in load.demand.classes)
    _remark_on_attainment(slo, load, notes)
    seeds = tuple(range(args.seed, args.seed + args.seeds))
    plan = SearchPlan(
        args.start,
        seeds,
        min(args.least_seeds, args.seeds),
        args.tolerance,
        args.lowest or 0.0,
        args.highest or float("inf"),
        args.jobs if args.simulate else 1,
    )
    measurement = Measurement(load, slo, args.warmup)
    if args.simulate:
        (server,) = simulated(args, [args.policy])
        server.check(load.draw(args.start, args.seed))
        return _simulated(args, plan, measurement, server, notes)
    return eventloop.run(_live(args, plan, measurement, notes))


def _remark_on_attainment(slo: Slo, load: SearchedLoad, notes: Console) -> None:
    deadlines = [c.request_class for c in load.demand.classes if c.request_class.ttft_seconds is not None]
    if any(limit.metric == "attainment" for limit in slo.limits) and not deadlines:
        _tell(notes, "note: no --class has a ttft, so attainment judges the gaps between tokens only")


class _Search:
    """What one search needs besides the runs: its state on disk, and what it says while it goes on."""

    def __init__(
        self,
        args: argparse.Namespace,
        measurement: Measurement,
        server: SimulatedServer | LiveServer,
        notes: Console,
    ) -> None:
        self._notes = notes
        self._slo = measurement.slo
        self.config = _config(args, measurement, server)
        self._file = None if args.state is None else StateFile(args.state, _identity(self.config))
        self.findings: dict[Trial, Finding] = dict(self._file.findings) if self._file else {}
        if self.findings:
            _tell(notes, f"{args.state}: going on from {len(self.findings)} finished runs")

    def on_finding(self, finding: Finding) -> None:
        if self._file is not None:
            self._file.add(finding)
        _tell(self._notes, run_line(finding, self._slo))


def _simulated(
    args: argparse.Namespace, plan: SearchPlan, measurement: Measurement, server: SimulatedServer, notes: Console
) -> int:
    search = _Search(args, measurement, server, notes)
    outcome, interrupted = None, False
    try:
        outcome = search_simulated(plan, search.findings, measurement, server, search.on_finding)
    except KeyboardInterrupt:
        interrupted = True
    except WorkerError as error:
        _tell(notes, f"slai-loadgen: {error}")
    return _finish(args, plan, search, outcome, interrupted=interrupted)


async def _live(args: argparse.Namespace, plan: SearchPlan, measurement: Measurement, notes: Console) -> int:
    server = await live(args, args.url, lambda line: _tell(notes, line))
    allow_many_sockets()
    search = _Search(args, measurement, server, notes)
    seconds = (args.requests or 0) / args.start / args.time_scale
    _tell(notes, f"a run at {args.start:g} req/s takes {seconds:.0f} s and the last answer; a search has 15 to 40 runs")
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        outcome = await search_live(
            plan,
            search.findings,
            measurement,
            server,
            search.on_finding,
            stop=stop,
            display=lambda: open_display(notes),
        )
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return _finish(args, plan, search, outcome, interrupted=outcome is None)


def _finish(
    args: argparse.Namespace, plan: SearchPlan, search: _Search, outcome: Outcome | None, *, interrupted: bool
) -> int:
    figures = capacity_figures(plan, search.findings, outcome)
    reason = _why_invalid(figures, interrupted=interrupted)
    document: Document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "capacity",
        "config": {
            **search.config,
            "start": args.start,
            "seeds": list(plan.seeds),
            "least_seeds": plan.least_seeds,
            "tolerance": plan.tolerance,
            "lowest": args.lowest,
            "highest": args.highest,
        },
        "capacity": figures,
        "interrupted": interrupted,
        "valid": reason is None,
        "invalid_reason": reason,
    }
    console = table_console(stderr=args.json == "-")
    show(console, capacity_table(document))
    for line in conclusion(document):
        console.print(Text(line), soft_wrap=True)
    if interrupted and args.state:
        console.print(Text(f"Interrupted; the same command goes on from {args.state}."), soft_wrap=True)
    publish(args, document)
    if interrupted:
        return _INTERRUPTED
    return _FINE if reason is None else _FAILED


def _why_invalid(figures: Mapping[str, Any], *, interrupted: bool) -> str | None:
    if interrupted:
        return "interrupted before its end"
    if not figures["complete"]:
        return "not all runs could be made"
    if figures["kept_at"] is None:
        return f"a limit is broken even at {figures['broken_at']:g} req/s, the lowest rate tried"
    if figures["broken_at"] is None:
        return f"all limits hold even at {figures['kept_at']:g} req/s, the highest rate tried"
    late = [
        point["rate"]
        for point in figures["points"]
        for run in point["runs"]
        # A tenth of the median, as for a single run: less changes no verdict.
        if (run["schedule_delay_p99_s"] or 0.0) > max(0.01, 0.1 * (run["ttft_p50_s"] or 0.0))
    ]
    if late:
        return f"the client was late at {', '.join(f'{rate:g}' for rate in sorted(set(late)))} req/s; it needs more CPU"
    return None


def _config(args: argparse.Namespace, measurement: Measurement, server: SimulatedServer | LiveServer) -> dict[str, Any]:
    trace, demand = measurement.load.trace, measurement.load.demand
    return {
        "version": __version__,
        "slo": str(measurement.slo),
        "server": server.describe(),
        "trace": {"name": trace.name, "rows": len(trace.rows), "sha256": trace.sha256},
        "requests": demand.requests,
        "arrivals": str(demand.arrivals),
        "even": measurement.load.even,
        "warmup": measurement.warmup,
        "classes": describe_classes(args.classes or PAPER_CLASSES),
        "tenants": args.tenants,
        "scale_lengths": args.scale_lengths,
        "max_prompt_tokens": args.max_prompt_tokens,
        "max_output_tokens": args.max_output_tokens,
    }


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """What findings belong to; a trace may lie elsewhere now."""
    trace = {key: value for key, value in config["trace"].items() if key != "name" or not config["trace"]["sha256"]}
    return {**config, "trace": trace}


def _tell(notes: Console, line: str) -> None:
    notes.print(Text(line), soft_wrap=True)
