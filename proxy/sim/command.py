"""``slai-proxy simulate``: compare policies on simulated engines, in virtual time."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from proxy import __version__
from proxy.sim.capacity import capacities
from proxy.sim.engine import EngineConfig
from proxy.sim.learning import judge_learning
from proxy.sim.options import DESCRIPTION, EPILOG, add_options
from proxy.sim.parallel import WorkerError, run_parallel
from proxy.sim.policies import PolicyOptions, find_policy
from proxy.sim.profiles import Jitter, find_profile
from proxy.sim.simulator import SimulationConfig, limits_of
from proxy.sim.study import SCHEMA_VERSION, RunFigures, Study, perform, summarise_study
from proxy.sim.tables import print_capacities, print_learning, print_study, seconds
from proxy.sim.workload import PAPER_CLASSES, SHAREGPT_LIKE, TraceError, load_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FINE, _FAILED, _USAGE, _INTERRUPTED = 0, 1, 2, 130


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``simulate`` to a program's commands; its ``args.run`` is this module's ``run``."""
    parser = subparsers.add_parser(
        "simulate",
        help="compare scheduling policies on simulated engines",
        usage="slai-proxy simulate --rate R[,R] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out ``slai-proxy simulate`` and return the exit status."""
    notes = Console(stderr=True)
    try:
        study = _plan(args, notes)
        config = _config(args, study)
        for remark in _remarks(args, study):
            _tell(notes, f"note: {remark}")
        if args.step_model:
            return _judge_learning(study, config, args, notes)
        return _carry_out(study, config, args, notes)
    except ValueError as error:  # A TraceError is one, too.
        _tell(notes, f"slai-proxy simulate: {error}")
        return _USAGE
    except KeyboardInterrupt:
        return _INTERRUPTED


def _carry_out(study: Study, config: dict[str, Any], args: argparse.Namespace, notes: Console) -> int:
    runs: list[RunFigures] = []
    status = _FINE
    try:
        with closing(run_parallel(perform, study.tasks(), min(args.jobs, len(study)))) as results:
            _follow(results, runs, len(study), notes)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except WorkerError as error:
        _tell(notes, f"slai-proxy simulate: {error}")
        status = _FAILED
    if status != _FINE:
        _tell(notes, f"stopped: {len(runs)} of {len(study)} runs are complete")
    rates, policies, seeds = study.rates, study.policies, study.seeds
    runs.sort(key=lambda r: (rates.index(r["rate"]), policies.index(r["policy"]), seeds.index(r["seed"])))
    summary = summarise_study(study, runs)
    if runs:
        print_study(_output(stderr=args.json), summary, runs, study.surge)
    document = {"schema_version": SCHEMA_VERSION, "config": config, "complete": status == _FINE}
    document |= {"runs": runs, "summary": summary}
    if args.capacity is not None:
        found = capacities(study, runs, args.capacity)
        print_capacities(_output(stderr=args.json), found, args.capacity)
        document["capacity"] = {policy: capacity.as_json() for policy, capacity in found.items()}
    if args.json:
        _write(document)
    return status


def _judge_learning(study: Study, config: dict[str, Any], args: argparse.Namespace, notes: Console) -> int:
    """Carry out ``--step-model``."""
    tasks = [task for task in study.tasks() if find_policy(task.policy).scheduler(task.options) is not None]
    if not tasks:
        raise ValueError("--step-model: the proxy is who learns, and none of the policies has one")
    judged: list[dict[str, Any]] = []
    try:
        with closing(run_parallel(judge_learning, tasks, min(args.jobs, len(tasks)))) as results:
            for result in results:
                judged.append(result)
                _tell(notes, f"{len(judged)}/{len(tasks)} {_name(result)}")
    except WorkerError as error:
        _tell(notes, f"slai-proxy simulate: {error}")
        return _FAILED
    judged.sort(key=lambda run: (study.policies.index(run["policy"]), run["rate"], run["seed"]))
    print_learning(_output(stderr=args.json), judged)
    if args.json:
        _write({"schema_version": SCHEMA_VERSION, "config": config, "step_model": judged})
    return _FINE


def _write(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def _plan(args: argparse.Namespace, notes: Console) -> Study:
    """Make the study that the arguments ask for.

    Raises:
        ValueError: they do not go together, or the trace cannot be used.
    """
    profile = find_profile(args.profile)
    engine = EngineConfig(
        replace(profile, step=replace(profile.step, tile=args.tile)),
        args.token_budget,
        args.max_num_seqs,
        watermark=args.watermark,
        async_scheduling=args.async_scheduling,
        jitter=Jitter() if args.jitter else None,
    )
    simulation = SimulationConfig(
        engine,
        args.engines,
        args.network_ms / 1e3,
        retries=args.retries,
        quotas=args.quota,
        message_seconds=args.message_ms / 1e3,
    )
    for option, named in (("--quota", args.quota), ("--guarantee", args.guarantee)):
        if strangers := named.keys() - (args.tenants or {}).keys():
            raise ValueError(f"{option}: {', '.join(sorted(strangers))} is none of --tenants")
    classes = tuple(args.classes or PAPER_CLASSES)
    if len({c.request_class.name for c in classes}) < len(classes):
        raise ValueError("--class: two classes have the same name")
    options = PolicyOptions(
        args.backlog_factor,
        args.aging_seconds,
        max(PolicyOptions().feedback_seconds, 2 * simulation.network_seconds),
        args.tenant_headroom,
        args.guarantee,
    )
    trace = load_trace(args.trace)
    if trace.dropped:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in trace.dropped.most_common())
        _tell(notes, f"{trace.name}: {trace.dropped.total()} of {trace.rows_read} rows left out: {reasons}")
    longest = max(size.prompt_tokens + size.output_tokens for size in trace.lengths)
    capacity = limits_of(engine).kv_tokens or 0
    if longest > capacity:
        raise TraceError(f"{trace.name}: a request of {longest:,} tokens can never fit the KV cache of {capacity:,}")
    if abs((shares := sum(c.share for c in classes)) - 1) > 1e-6:
        raise ValueError(f"--class: the shares add up to {shares:g}, not 1")
    study = Study(
        trace,
        tuple(_with_replicas(args.policy, args.replicas)),
        tuple(args.rate),
        tuple(args.seeds),
        args.requests,
        classes,
        args.surge,
        simulation,
        options,
        args.tenants,
        args.decision_log,
    )
    if args.decision_log is not None:
        alone = len(study) == 1 and args.capacity is None and not args.step_model
        if not alone or find_policy(study.policies[0]).scheduler(options) is None or args.replicas != ["1"]:
            raise ValueError("--decision-log is for one run, with a proxy (as of --policy gate --seeds 1)")
        try:
            if args.decision_log.exists() and args.decision_log.stat().st_size:
                raise ValueError(f"--decision-log: {args.decision_log} is there already, and is not overwritten")
            args.decision_log.touch()
        except OSError as error:
            raise ValueError(f"--decision-log: cannot write {args.decision_log}: {error.strerror}") from None
    return study


def _with_replicas(policies: Sequence[str], replicas: Sequence[str]) -> Iterator[str]:
    """Give the names of the policies with each number of replicas; without a proxy there are none."""
    for name in policies:
        has_proxy = find_policy(name).scheduler(PolicyOptions()) is not None and "@" not in name
        yield from (name if count == "1" else f"{name}@{count}" for count in (replicas if has_proxy else ["1"]))


def _remarks(args: argparse.Namespace, study: Study) -> Iterator[str]:
    """Say what of the command line does less than it looks like."""
    surge = study.surge
    if surge is not None:
        last = {task.rate: task.workload[-1].at_seconds for task in study.tasks()}
        for rate, at in last.items():
            if at <= surge.seconds:
                yield (
                    f"--surge: at --rate {rate:g} all {study.requests:,} requests come within its {surge.seconds:g} s; "
                    "more --requests show what comes after it"
                )
    limited = [name for name in study.policies if find_policy(name).limits_ttft]
    if limited and all(c.request_class.ttft_seconds is None for c in study.classes):
        yield f"--policy {limited[0]} refuses by the ttft of a --class, and none has one: it refuses nobody by it"
    if args.step_model and args.capacity is not None:
        yield "--step-model compares no policies: --capacity is left aside"
    elif args.capacity is not None and len(study.rates) == 1:
        yield "--capacity lies between two rates, and there is one: give several, such as --rate 1.5,1.7,1.9"


def _config(args: argparse.Namespace, study: Study) -> dict[str, Any]:
    """Return all that it takes to run the study again."""
    trace = study.trace
    built_in = trace.name == SHAREGPT_LIKE
    return {
        "version": __version__,
        "policies": study.policies,
        "rates": study.rates,
        "seeds": study.seeds,
        "requests": study.requests,
        "surge": None if study.surge is None else {"factor": study.surge.factor, "s": study.surge.seconds},
        "retries": study.simulation.retries,
        "trace": {
            "name": trace.name,
            "rows_read": trace.rows_read,
            "rows_dropped": dict(trace.dropped),
            "sha256": None if built_in else hashlib.sha256(Path(trace.name).read_bytes()).hexdigest(),
        },
        "classes": [
            {
                "name": c.request_class.name,
                "share": c.share,
                "ttft_s": c.request_class.ttft_seconds,
                "tbt_s": c.request_class.tbt_seconds,
                "weight": c.request_class.weight,
            }
            for c in study.classes
        ],
        "tenants": study.tenants,
        "guarantees": dict(study.options.guarantees),
        "quotas": dict(study.simulation.quotas),
        "profile": args.profile,
        "engines": study.simulation.engines,
        "token_budget": study.simulation.engine.token_budget,
        "max_num_seqs": study.simulation.engine.max_num_seqs,
        "tile": study.simulation.engine.profile.step.tile,
        "watermark": study.simulation.engine.watermark,
        "async_scheduling": study.simulation.engine.async_scheduling,
        "jitter": study.simulation.engine.jitter is not None,
        "network_s": study.simulation.network_seconds,
        "message_s": study.simulation.message_seconds,
        "backlog_factor": study.options.backlog_factor,
        "aging_s": study.options.aging_seconds,
        "tenant_headroom": study.options.tenant_headroom,
    }


def _follow(results: Iterator[RunFigures], runs: list[RunFigures], total: int, notes: Console) -> None:
    """Collect results into ``runs`` as they come, and show how far it is: a bar, or lines without a terminal."""
    if not notes.is_terminal:
        for result in results:
            runs.append(result)
            _tell(notes, f"{len(runs)}/{total} {_line(result)}")
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=notes, transient=True) as progress:
        bar = progress.add_task("", total=total)
        for result in results:
            runs.append(result)
            progress.update(bar, advance=1, description=_line(result))


def _line(result: RunFigures) -> str:
    return f"{_name(result)}: median TTFT {seconds(result['ttft_s']['p50'])} s"


def _name(result: RunFigures) -> str:
    return f"{result['policy']} at {result['rate']:g} req/s, seed {result['seed']}"


def _tell(notes: Console, line: str) -> None:
    notes.print(Text(line), soft_wrap=True)


def _output(*, stderr: bool) -> Console:
    console = Console(stderr=stderr)
    # A pipe has no width; rich would take 80 columns and cut the tables.
    return console if console.is_terminal else Console(stderr=stderr, width=160)
