"""``slai-loadgen``: load for OpenAI-compatible servers, and figures to judge them by."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from loadgen import eventloop
from loadgen.arguments import parse_arguments
from loadgen.capacity_command import run_capacity
from loadgen.children import ChildError
from loadgen.compare_command import run_compare
from loadgen.demo import DemoPlan, run_demo
from loadgen.demo_text import show_introduction, show_outcome
from loadgen.inspect_command import run_inspect
from loadgen.inspection import arrivals
from loadgen.load_arguments import plan_load
from loadgen.output import publish, refuse_unwritable, table_console, write_json
from loadgen.planning import PlanError
from loadgen.processes import ProcessError
from loadgen.progress import open_display
from loadgen.report import (
    Document,
    build_document,
    compat_notes,
    compat_tables,
    describe_classes,
    remarks,
    run_tables,
    show,
)
from loadgen.runner import NotReadyError
from loadgen.schedule import write_schedule
from loadgen.selftest_command import run_selftest
from loadgen.server_arguments import allow_many_sockets, live, simulated
from proxy import __version__
from proxy.sim.workload import PAPER_CLASSES, ClassShare, TraceError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from loadgen.schedule import Schedule
    from loadgen.traces import RowTrace
    from proxy.sim.records import RequestRecord

_FINE, _FAILED, _USAGE, _INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """The command line asks for something that cannot be done; the message is for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return the exit status."""
    try:
        args = parse_arguments(argv)
    except SystemExit as stop:  # --help, or a usage error that has been told already.
        return stop.code if isinstance(stop.code, int) else _USAGE
    try:
        if args.command == "compare":
            return run_compare(args)
        if args.command == "demo":
            return _demo(args)
        if args.command == "inspect":
            return run_inspect(args)
        if args.command == "selftest":
            allow_many_sockets()
            return run_selftest(args)
        if args.command == "plan":
            return _write_plan(args)
        if args.command == "capacity":
            return run_capacity(args)
        return eventloop.run(run_command(args))
    except (UsageError, PlanError, TraceError, ValueError) as error:
        print(f"slai-loadgen: {error}", file=sys.stderr)
        return _USAGE
    except (ChildError, NotReadyError, ProcessError) as error:
        print(f"slai-loadgen: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED


async def run_command(args: argparse.Namespace) -> int:
    """Carry out ``slai-loadgen run`` and return the exit status."""
    if (args.url is None) == (args.simulate is None):
        raise UsageError("run sends to servers (--url) or to the simulator (--simulate): give one of them")
    trace, planned = plan_load(args, _tell)
    workload = planned.schedule.requests
    described = _describe(args.trace, trace, len(workload))
    refuse_unwritable(args)
    nonce = secrets.randbits(53)  # As large as any JSON reader holds exactly.
    stop = asyncio.Event()
    records: Sequence[RequestRecord]
    if args.simulate is not None:
        (simulator,) = simulated(args, [args.policy])
        simulator.check(workload)
        records, measured = simulator.serve(workload, args.seed), simulator.describe()
    else:
        server = await live(args, args.url, _tell)
        allow_many_sockets()
        measured = server.describe()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop.set)
        try:
            with open_display(Console(stderr=True)) as display:
                records = await server.serve(workload, nonce=nonce, progress=display, stop=stop)
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    document = build_document(
        records,
        planned=len(workload),
        config={**_config(args, trace, planned.schedule), **measured, "prompt_nonce": nonce},
        trace=described,
        clipped=planned.clipped,
        interrupted=stop.is_set(),
        compat=args.compat,
    )
    _publish(args, document, records)
    if stop.is_set():
        return _INTERRUPTED
    return _FINE if document["valid"] else _FAILED


def _write_plan(args: argparse.Namespace) -> int:
    """Carry out ``slai-loadgen plan`` and return the exit status."""
    _, planned = plan_load(args, _tell)
    try:
        write_schedule(args.out, planned.schedule)
    except OSError as error:
        raise UsageError(f"cannot write {args.out}: {error.strerror}") from error
    requests = planned.schedule.requests
    print(
        f"{args.out}: {len(requests):,} requests in {requests[-1].at_seconds:,.1f} s, {planned.clipped:,} of them "
        f"clipped; sha256 of the load {planned.schedule.digest}"
    )
    planned_arrivals = _arrivals(planned.schedule)
    rate, cv = planned_arrivals["mean_per_s"], planned_arrivals["interval_cv"]
    if rate is not None and cv is not None:
        print(f"  {rate:.3g} arrivals per second, coefficient of variation of the intervals {cv:.2f}")
    return _FINE


def _config(args: argparse.Namespace, trace: RowTrace | None, schedule: Schedule) -> dict[str, Any]:
    rate = args.rate and (args.rate.single or str(args.rate))
    return {
        "version": __version__,
        "rate": rate,
        "requests": len(schedule.requests),
        "seed": args.seed,
        "schedule_sha256": schedule.digest,
        "planned_arrivals": _arrivals(schedule),
        "origin": schedule.origin,
        "classes": _classes(args, trace, schedule),
        "tenants": args.tenants,
        "max_prompt_tokens": args.max_prompt_tokens,
        "max_output_tokens": args.max_output_tokens,
        "scale_lengths": args.scale_lengths,
    }


def _arrivals(schedule: Schedule) -> dict[str, Any]:
    """What the draw came to, which is not what was asked for; of requests that wait for no other."""
    found = arrivals([r.at_seconds for r in schedule.requests if r.after is None])
    return {name: found[name] for name in ("mean_per_s", "interval_cv")}


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def _classes(args: argparse.Namespace, trace: RowTrace | None, schedule: Schedule) -> list[dict[str, Any]]:
    """Describe the classes that were asked for, or those of a schedule with the shares that they have in it."""
    if trace is not None:
        return describe_classes(args.classes or PAPER_CLASSES)
    found = Counter(request.request_class for request in schedule.requests)
    return describe_classes(ClassShare(kind, n / len(schedule.requests)) for kind, n in found.items())


def _describe(name: str, trace: RowTrace | None, requests: int) -> dict[str, Any]:
    if trace is None:  # a schedule, of which every line is a request
        sha256 = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        return {"name": name, "rows_read": requests, "rows_dropped": {}, "sha256": sha256}
    return {
        "name": trace.name,
        "rows_read": trace.rows_read,
        "rows_dropped": dict(trace.dropped),
        "sha256": trace.sha256,
    }


def _publish(args: argparse.Namespace, document: Document, records: Sequence[RequestRecord]) -> None:
    """Print the tables, and write the files that are wanted."""
    console = table_console(stderr=args.json == "-")
    show(console, run_tables(document))
    if document["compat"]:
        show(console, *compat_tables(document))
    for remark in (*compat_notes(document), *remarks(document)):
        console.print(remark, markup=False, highlight=False, soft_wrap=True)
    publish(args, document, records)


def _demo(args: argparse.Namespace) -> int:
    refuse_unwritable(args)
    allow_many_sockets()
    plan = DemoPlan(args.rate, args.requests, args.speed, args.seed)
    notes = Console(stderr=True)
    show_introduction(plan, notes)
    outcome = run_demo(plan, notes)
    show_outcome(outcome, table_console(stderr=args.json == "-"))
    write_json(outcome.document(), args.json)
    if outcome.failure is not None:
        print(f"slai-loadgen: {outcome.failure}", file=sys.stderr)
    if outcome.interrupted:
        return _INTERRUPTED
    return _FINE if outcome.valid else _FAILED
