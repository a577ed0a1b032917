"""The part of a command line that says what load is wanted; ``run`` and ``plan`` have it in common."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from loadgen.arrivals import Arrivals, Process, Rate, parse_arrivals, parse_rate
from loadgen.inspect_command import window
from loadgen.load import SearchedLoad
from loadgen.planning import Demand, Plan, PlanError, SharedPrefix, plan, without_longer
from loadgen.schedule import Schedule
from loadgen.traces import load
from loadgen.traces.rows import Window
from proxy.sim.workload import PAPER_CLASSES, SHAREGPT_LIKE, ClassShare, parse_class, parse_tenants

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadgen.traces import RowTrace

_T = TypeVar("_T")

LOAD_NOTES = """\
Open loop: a request leaves at its own time whether or not the ones before it have been answered, as independent users
do. TTFT counts from that intended time, so time spent in any queue counts. One --seed gives the same lengths, times,
classes and texts at every rate and for every server, each from a stream of its own: changing one leaves the others.

times        --rate 2                     Poisson arrivals, 2 per second on average
             --rate 2 --arrivals gamma:3  bursts: intervals of a coefficient of variation of 3
             --rate 2@60,8@30,2@60        steps: 60 s at 2, 30 s at 8, then 2 for good
             --rate 1..5@600              a ramp over 600 s
             (no --rate)                  the trace's own times; --speedup 4 and --window 0:600 change them
             --concurrency 16             closed loop: 16 users, each waits for the answer before the next request
turns        --turns sessions             a conversation's next turn waits for the answer before, and --think
texts        unique, so that no prefix cache flatters; blocks that a trace names (Mooncake, Qwen-Bailian) are shared,
             and --share-prefix 512:20 begins each prompt with one of 20 texts of 512 tokens
"""


def add_load_arguments(parser: argparse.ArgumentParser, *, searched: bool = False) -> None:
    """Add the options to a command; of one that chooses the rates itself, without those that would fix it."""
    add = parser.add_argument_group("load").add_argument
    if searched:
        parser.set_defaults(rate=None, seconds=None, concurrency=None, speedup=1.0, turns="history", think=None)
        add("--requests", type=count, default=1000, metavar="N", help="requests in a run (default: 1000)")
    else:
        add(
            "--rate",
            type=_rate,
            metavar="R",
            help="requests per second on average, or steps R@SECONDS,... and ramps R..R@SECONDS, the last of"
            " whose rates goes on until --requests or --seconds end it",
        )
        add("--requests", type=count, metavar="N", help="how many requests to send")
        add("--seconds", type=positive, metavar="S", help="send for so long, instead of or besides --requests")
    add(
        "--trace",
        default=SHAREGPT_LIKE,
        metavar="FILE",
        help="what to send: a trace (see slai-loadgen inspect), a schedule written by slai-loadgen plan, or "
        f"{SHAREGPT_LIKE!r}, the built-in default",
    )
    add(
        "--arrivals",
        type=_told(parse_arrivals),
        metavar="HOW",
        help="poisson, gamma:CV or constant (default: poisson)"
        if searched
        else "poisson, gamma:CV, constant or trace (default: poisson with a --rate, without one the trace's own times)",
    )
    if not searched:
        add("--concurrency", type=count, metavar="N", help="a closed loop of N users instead of a rate")
        add("--speedup", type=positive, default=1.0, metavar="K", help="the trace's own times pass K times as fast")
    add(
        "--window",
        type=window,
        default=Window(),
        metavar="START:END",
        help="only this part of the trace, in seconds since its first request",
    )
    if not searched:
        _add_turns(add)
    add(
        "--share-prefix",
        type=_shared_prefix,
        metavar="TOKENS[:GROUPS]",
        help="begin each prompt with one of GROUPS (default: 1) texts of so many tokens, as a system prompt",
    )
    add("--no-sharing", action="store_true", help="unique texts also where the trace names blocks to be shared")
    add(
        "--class",
        dest="classes",
        action="append",
        type=_class,
        metavar="NAME:SHARE[:tbt=S][:ttft=S]",
        help="a class of users, its share of the requests and its deadlines in seconds; repeat for each class "
        "(default: strict:0.05:tbt=0.1 and relaxed:0.95:tbt=0.5). Only the deadlines are sent, a proxy accounts the "
        "requests under its default class; see --send-class of slai-loadgen run",
    )
    add(
        "--tenants",
        type=_told(parse_tenants),
        metavar="NAME=PART[,..]",
        help="tenants and their parts of the rate, e.g. calm=1,flood=10, told by the header x-slai-tenant (a proxy "
        "believes it with --tenants-from header)",
    )
    add("--seed", type=int, default=0, metavar="N", help="draws lengths, times, classes and texts (default: 0)")
    add("--max-prompt-tokens", type=count, metavar="N", help="clip longer prompts to N tokens")
    add("--max-output-tokens", type=count, metavar="N", help="clip longer outputs to N tokens")
    add(
        "--max-total-tokens",
        type=count,
        metavar="N",
        help="clip prompt and output in proportion to N tokens together, as a model's context has",
    )
    add(
        "--too-long",
        choices=("clip", "drop"),
        default="clip",
        help="clip what is over these limits (default), or leave the row out; either is counted",
    )
    add("--scale-lengths", type=positive, default=1.0, metavar="F", help="multiply all lengths by F, before clipping")


def _add_turns(add: Callable[..., object]) -> None:
    add(
        "--turns",
        choices=("history", "sessions"),
        default="history",
        help="conversations as requests of their own with all that came before in the prompt (default), or as sessions",
    )
    add(
        "--think",
        type=_not_negative,
        metavar="S",
        help="mean time from an answer to the user's next turn, where the trace tells none (default: 5, and 0 between "
        "the requests of a closed loop)",
    )


def searched_load(args: argparse.Namespace, tell: Callable[[str], None]) -> SearchedLoad:
    """Read the trace whose requests come at rates that a search chooses.

    Raises:
        PlanError: it cannot be used for that.
        TraceError: the trace cannot be read.
    """
    classes = _class_shares(args)
    trace = load(args.trace, seed=args.seed, window=args.window)
    if isinstance(trace, Schedule):
        raise PlanError(f"{args.trace} is a schedule, whose times are fixed; a search chooses the rate: give a trace")
    demand = _demand(args, classes)
    if demand.arrivals.process is Process.TRACE:
        if args.arrivals is not None:
            raise PlanError("--arrivals trace: a search chooses the rate, and a trace's own times have one")
        demand = replace(demand, arrivals=Arrivals())
    _tell_of(trace, tell)
    return SearchedLoad(trace, demand)


def _class_shares(args: argparse.Namespace) -> list[ClassShare]:
    classes: list[ClassShare] = args.classes or list(PAPER_CLASSES)
    if len({c.request_class.name for c in classes}) < len(classes):
        raise PlanError("--class: two classes have the same name")
    return classes


def _tell_of(trace: RowTrace, tell: Callable[[str], None]) -> None:
    if trace.dropped:
        reasons = ", ".join(f"{n} x {reason}" for reason, n in trace.dropped.most_common())
        tell(f"{trace.name}: {trace.dropped.total()} of {trace.rows_read} rows left out: {reasons}")
    for note in trace.notes:
        tell(f"{trace.name}: {note}")


def plan_load(args: argparse.Namespace, tell: Callable[[str], None]) -> tuple[RowTrace | None, Plan]:
    """Read the trace that ``args`` name and decide every request; ``tell`` hears what was left out and put right.

    There is no trace where the file is a schedule, which is replayed as it is.

    Raises:
        PlanError: it cannot be planned.
        TraceError: the trace cannot be read.
    """
    classes = _class_shares(args)
    if args.concurrency is not None and args.tenants:
        # Their parts of a rate that nobody sets would be parts of the users, which is another question.
        raise PlanError("--tenants are parts of a rate, and a closed loop has none")
    trace = load(args.trace, seed=args.seed, window=args.window)
    if isinstance(trace, Schedule):
        if args.rate or args.arrivals or args.concurrency or args.classes or args.tenants or args.turns == "sessions":
            raise PlanError(f"{args.trace} is a schedule: when and by whom each request comes is decided already")
        return None, Plan(trace)
    demand = _demand(args, classes)
    if demand.drop_longer:
        trace = without_longer(trace, demand)
    _tell_of(trace, tell)
    return trace, plan(trace, demand)


def _demand(args: argparse.Namespace, classes: list[ClassShare]) -> Demand:
    closed = args.concurrency is not None
    drawn = args.rate is not None or closed
    think = args.think if args.think is not None else 0.0 if closed and args.turns == "history" else 5.0
    return Demand(
        arrivals=args.arrivals or Arrivals(Process.POISSON if drawn else Process.TRACE),
        rate=args.rate,
        concurrency=args.concurrency,
        requests=args.requests,
        seconds=args.seconds,
        seed=args.seed,
        classes=classes,
        tenants=args.tenants or {},
        speedup=args.speedup,
        sessions=args.turns == "sessions",
        think_seconds=think,
        share=not args.no_sharing,
        shared_prefix=args.share_prefix,
        scale_lengths=args.scale_lengths,
        max_prompt_tokens=args.max_prompt_tokens,
        max_output_tokens=args.max_output_tokens,
        max_total_tokens=args.max_total_tokens,
        drop_longer=args.too_long == "drop",
    )


def positive(text: str) -> float:
    """Read a positive number."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def count(text: str) -> int:
    """Read a positive whole number."""
    with suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")


def _not_negative(text: str) -> float:
    return 0.0 if text == "0" else positive(text)


def _told(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Let argparse tell what a parser of ours finds wrong."""

    def read(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _rate(text: str) -> Rate:
    plain = not any(mark in text for mark in ("@", ",", ".."))
    return Rate.constant(positive(text)) if plain else _told(parse_rate)(text)


def _shared_prefix(text: str) -> SharedPrefix:
    tokens, colon, groups = text.partition(":")
    return SharedPrefix(count(tokens), count(groups) if colon else 1)


def _class(text: str) -> ClassShare:
    if any(term.startswith("weight=") for term in text.split(":")[2:]):
        raise argparse.ArgumentTypeError("weight is the proxy's affair: give it in its configuration")
    return _told(parse_class)(text)
