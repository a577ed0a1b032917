"""``slai-proxy bound``: the most that engines can serve of some traffic, what binds, and how near policies come."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from proxy.sim.argtypes import count, list_of, positive, told
from proxy.sim.bound import Bound, Limits, Needs, best_budget, bound, budgets
from proxy.sim.bound_live import LiveError, watch
from proxy.sim.bound_lp import SolverMissingError, lp_bound
from proxy.sim.bound_tables import print_bound, print_live, print_mix, print_shares
from proxy.sim.engine import EngineConfig
from proxy.sim.parallel import WorkerError, run_parallel, usable_cores
from proxy.sim.policies import PolicyOptions, find_policy
from proxy.sim.profiles import PROFILES, checked_profile, find_profile
from proxy.sim.simulator import SimulationConfig
from proxy.sim.study import RunFigures, RunTask, perform
from proxy.sim.workload import PAPER_CLASSES, SHAREGPT_LIKE, draw_workload, load_trace, parse_class

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from proxy.sim.workload import ClassShare, Trace

_FINE, _FAILED, _USAGE, _INTERRUPTED = 0, 1, 2, 130
_OVERLOAD = 1.15
"""Of the bound: as much is offered to find what a policy completes."""

_DESCRIPTION = """\
Tell how many requests per second engines can serve at most, whatever schedules them: from the lengths of the requests,
the time that steps take, and what a step can hold. It says which limit binds (token budget, KV cache or sequence
slots), and which token budget is best with TBT deadlines and without. With --simulate, policies show how near they
come; with --live, a running proxy tells how near its engines are."""

_EPILOG = """\
examples:
  what can one RTX 6000 Ada do for the paper's users, and what binds?
    slai-proxy bound --profile rtx6000ada

  two H100s under your own traffic, with vLLM's usual flags, and how near policies come
    slai-proxy bound --profile h100 --engines 2 --token-budget 2048 --max-num-seqs 256 --trace traffic.csv \\
        --simulate fcfs,gate,tiles,slai-engine,deadline

  how near is the proxy that runs here (slai-proxy serve --debug-port 9090)?
    slai-proxy bound --live http://127.0.0.1:9090

exit status: 0 fine; 1 the proxy of --live does not answer, or a process was lost; 2 wrong usage; 130 interrupted
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``bound`` to a program's commands."""
    parser = commands.add_parser(
        "bound",
        help="tell how much engines can serve at most, and what binds",
        usage="slai-proxy bound [--profile NAME|FILE] [--trace FILE] [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    standard = EngineConfig()
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--trace",
        default=SHAREGPT_LIKE,
        metavar="FILE",
        help=f"lengths of prompts and outputs: a trace file, or {SHAREGPT_LIKE!r}, the built-in default",
    )
    group.add_argument(
        "--class",
        "--slo",
        dest="classes",
        action="append",
        type=told(parse_class),
        metavar="NAME:SHARE[:tbt=S]",
        help="a class of users, its share and its deadline; repeat for each class (default: the paper's, strict:0.05:"
        "tbt=0.1 and relaxed:0.95:tbt=0.5). The tightest TBT deadline limits the token budget",
    )
    group = parser.add_argument_group("engines (the flags of vllm serve, where it has them)")
    group.add_argument(
        "--profile",
        type=told(checked_profile),
        default=standard.profile.name,
        metavar="NAME|FILE",
        help=f"GPU: {', '.join(PROFILES)}; or a file that slai-proxy calibrate has written (default: rtx6000ada)",
    )
    group.add_argument("--engines", type=count, default=1, metavar="N", help="how many of them (default: 1)")
    group.add_argument("--token-budget", type=count, default=standard.token_budget, metavar="N", help="(default: 512)")
    group.add_argument("--max-num-seqs", type=count, default=standard.max_num_seqs, metavar="N", help="(default: 128)")
    group.add_argument(
        "--tile", type=count, default=128, metavar="N", help="budgets to compare are multiples of it (default: 128)"
    )
    group.add_argument(
        "--tiled-steps", action="store_true", help="steps cost what their tokens cost when rounded up to whole tiles"
    )
    group = parser.add_argument_group("how")
    group.add_argument("--lp", action="store_true", help="also by a linear program over kinds of steps (needs scipy)")
    group.add_argument(
        "--simulate",
        type=list_of(lambda name: find_policy(name).name),
        metavar="NAME[,NAME]",
        help="policies (see slai-proxy simulate --help): what each completes when offered 15 %% more than the bound",
    )
    group.add_argument("--requests", type=count, default=2000, metavar="N", help="of such a run (default: 2000)")
    group.add_argument("--jobs", type=count, default=usable_cores(), metavar="N", help="processes (default: per core)")
    group.add_argument("--live", metavar="URL", help="a running proxy's --debug-port, instead of all of the above")
    group.add_argument("--seconds", type=positive, default=20.0, metavar="S", help="to watch it for (default: 20)")
    group.add_argument("--json", action="store_true", help="write all figures to standard output; tables go to stderr")


def run(args: argparse.Namespace) -> int:
    """Carry out ``slai-proxy bound`` and return the exit status."""
    notes = Console(stderr=True)
    out = Console(stderr=args.json)
    out = out if out.is_terminal else Console(stderr=args.json, width=160)
    try:
        document = _live(args, out, notes) if args.live else _planned(args, out, notes)
    except (LiveError, WorkerError) as error:
        _tell(notes, f"slai-proxy bound: {error}")
        return _FAILED
    except (ValueError, SolverMissingError) as error:
        _tell(notes, f"slai-proxy bound: {error}")
        return _USAGE
    except KeyboardInterrupt:
        return _INTERRUPTED
    if args.json:
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return _FINE


def _live(args: argparse.Namespace, out: Console, notes: Console) -> dict[str, Any]:
    _tell(notes, f"watching {args.live} for {args.seconds:g} s ...")
    engines = watch(args.live, args.seconds)
    print_live(out, engines)
    return {"engines": [asdict(engine) for engine in engines]}


def _planned(args: argparse.Namespace, out: Console, notes: Console) -> dict[str, Any]:
    trace = load_trace(args.trace)
    profile = find_profile(args.profile)
    if args.tiled_steps:
        profile = replace(profile, step=replace(profile.step, tile=args.tile))
    config = EngineConfig(profile, args.token_budget, args.max_num_seqs)
    classes = tuple(args.classes or PAPER_CLASSES)
    deadlines = [c.request_class.tbt_seconds for c in classes if c.request_class.tbt_seconds is not None]
    needs, limits = Needs.of(trace.lengths), Limits.of(config)
    found = bound(profile.step, limits, needs)
    rows = budgets(profile.step, limits, trace.lengths, args.tile, min(deadlines, default=None))
    print_bound(out, needs, found, rows, engines=args.engines)
    best = {
        "any": best_budget(rows, within_tbt=False),
        "within_tbt": best_budget(rows, within_tbt=True),
    }
    document: dict[str, Any] = {
        "trace": trace.name,
        "profile": profile.name,
        "engines": args.engines,
        "needs": asdict(needs),
        "bound": asdict(found),
        "fleet_requests_per_second": args.engines * found.requests_per_second,
        "best_token_budget": {name: None if row is None else row.token_budget for name, row in best.items()},
        "token_budgets": [asdict(row) for row in rows],
    }
    if args.lp:
        rate, mix = lp_bound(profile.step, limits, needs)
        print_mix(out, rate, mix)
        document["lp"] = {"requests_per_second": rate, "mix": [asdict(kind) for kind in mix]}
    if args.simulate:
        simulation = SimulationConfig(config, args.engines)
        with closing(_shares(args, trace, simulation, classes)) as results:
            found_shares = []
            for share in results:
                found_shares.append(share)
                _tell(notes, f"{len(found_shares)}/{len(args.simulate)} {share.policy}: {100 * share.share:.1f} %")
        found_shares.sort(key=lambda s: args.simulate.index(s.policy))
        print_shares(out, found_shares)
        document["policies"] = [asdict(share) for share in found_shares]
    return document


def _shares(
    args: argparse.Namespace, trace: Trace, simulation: SimulationConfig, classes: Sequence[ClassShare]
) -> Generator[Share, None, None]:
    return shares(args.simulate, trace, simulation, requests=args.requests, jobs=args.jobs, classes=classes)


@dataclass(frozen=True, slots=True)
class Share:
    """What a policy completes when it is offered more than can be served."""

    policy: str
    completed_per_second: float
    bound_per_second: float
    """Of engines as this policy has them, all together."""
    share: float
    binds: str
    figures: RunFigures


def shares(
    policies: Sequence[str],
    trace: Trace,
    simulation: SimulationConfig,
    *,
    requests: int,
    jobs: int,
    classes: Sequence[ClassShare] = PAPER_CLASSES,
    seed: int = 1,
) -> Generator[Share, None, None]:
    """Simulate each policy beyond the bound and yield what it reaches, in the order in which they end.

    The time in which the last streams end, fewer and fewer, counts as well: long runs come nearer to the bound.
    """
    needs = Needs.of(trace.lengths)
    tasks, bounds = [], dict[str, Bound]()
    for name in policies:
        engine = find_policy(name).simulation(simulation, seed).engine
        found = bounds[name] = bound(engine.profile.step, Limits.of(engine), needs)
        rate = _OVERLOAD * found.requests_per_second * simulation.engines
        drawn = draw_workload(trace, rate=rate, requests=requests, seed=seed, classes=classes)
        tasks.append(RunTask(name, rate, seed, drawn, simulation, PolicyOptions()))
    for figures in run_parallel(perform, tasks, min(jobs, len(tasks))):
        found = bounds[figures["policy"]]
        most, done = found.requests_per_second * simulation.engines, figures["completed_per_s"] or 0.0
        yield Share(figures["policy"], done, most, done / most, found.binds, figures)


def _tell(notes: Console, line: str) -> None:
    notes.print(Text(line), soft_wrap=True)
