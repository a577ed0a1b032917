"""``slai-proxy calibrate``: measure a live engine and write its profile."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from proxy.sim.argtypes import count
from proxy.sim.calibrate import NEEDS_SCIPY, CalibrationError, EngineFacts, Fit, Observation, fit, measure
from proxy.sim.profiles import Profile, write_profile

_FINE, _FAILED, _USAGE, _INTERRUPTED = 0, 1, 2, 130
_GOOD_ENOUGH = 0.15

_DESCRIPTION = """\
Measure an engine that serves nobody else just now, and write how long its steps take as a profile: a file that
--profile of slai-proxy simulate, bound and engine accept. It sends some hundred short requests for a minute or two:
prompts alone, streams alone, and a long prompt beside streams."""

_EPILOG = """\
example:
  slai-proxy calibrate --engine http://gpu1:8000 --token-budget 2048 --max-num-seqs 256 --out gpu1.json
  slai-proxy simulate --profile gpu1.json --token-budget 2048 --max-num-seqs 256 --rate 4,6,8 --policy fcfs,gate

exit status: 0 fine; 1 the engine does not answer as it should, or scipy is missing; 2 wrong usage; 130 interrupted
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``calibrate`` to a program's commands."""
    parser = commands.add_parser(
        "calibrate",
        help="measure a live engine and write its profile",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engine", required=True, metavar="URL", help="of the vLLM server")
    parser.add_argument(
        "--out", type=Path, default=Path("profile.json"), metavar="FILE", help="(default: profile.json)"
    )
    parser.add_argument(
        "--token-budget", type=count, default=2048, metavar="N", help="its --max-num-batched-tokens (default: 2048)"
    )
    parser.add_argument(
        "--max-num-seqs", type=count, default=128, metavar="N", help="its --max-num-seqs (default: 128)"
    )
    parser.add_argument(
        "--kv-tokens", type=count, metavar="N", help="room in its KV cache, if its /metrics do not tell (default: ask)"
    )
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="of each prompt (default: 3)")


def run(args: argparse.Namespace) -> int:
    """Carry out ``slai-proxy calibrate`` and return the exit status."""
    notes = Console(stderr=True)

    def tell(line: str) -> None:
        notes.print(Text(line), soft_wrap=True)

    if find_spec("scipy") is None:  # told before the minutes of measuring, not after
        tell(f"slai-proxy calibrate: {NEEDS_SCIPY}")
        return _FAILED
    try:
        facts, observations = asyncio.run(
            measure(
                args.engine.rstrip("/"),
                token_budget=args.token_budget,
                max_num_seqs=args.max_num_seqs,
                repeats=args.repeats,
                tell=tell,
            )
        )
        found = fit(observations)
    except CalibrationError as error:
        tell(f"slai-proxy calibrate: {error}")
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    kv_tokens = args.kv_tokens or facts.kv_tokens
    if kv_tokens is None:
        tell("slai-proxy calibrate: the engine's /metrics do not tell how large its KV cache is: give --kv-tokens")
        return _USAGE
    document = _document(args, facts, found, observations, kv_tokens)
    try:
        args.out.write_text(document, encoding="utf-8")
    except OSError as error:
        tell(f"slai-proxy calibrate: cannot write {args.out}: {error.strerror}")
        return _USAGE
    _report(args, found)
    return _FINE


def _document(
    args: argparse.Namespace, facts: EngineFacts, found: Fit, observations: list[Observation], kv_tokens: int
) -> str:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    source = f"measured by slai-proxy calibrate, model {facts.model}"
    return write_profile(
        Profile(args.out.stem, found.step, kv_tokens, source),
        token_budget=args.token_budget,
        max_num_seqs=args.max_num_seqs,
        request_overhead_ms=1e3 * found.overhead_seconds,
        fit={"r2": found.r2, "relative_error": found.errors, "load_average": load},
        observations=[asdict(observation) for observation in observations],
    )


def _report(args: argparse.Namespace, found: Fit) -> None:
    step = found.step
    out = sys.stdout
    errors = "; ".join(
        f"{kind}: median {e['median']:.1%}, 90 % within {e['p90']:.1%} ({e['count']:.0f} measurements)"
        for kind, e in found.errors.items()
    )
    out.write(
        f"a step takes {step.host:.2f} ms, {step.floor:.2f} ms to read the weights or {step.per_token:.4f} ms for each "
        f"token (p = {step.p:.1f}),\n{step.per_decode:.4f} ms for each stream, {1e3 * step.per_kv_token:.4f} ms for "
        f"each 1,000 tokens of context; a request {1e3 * found.overhead_seconds:.1f} ms on its way\n"
        f"fit: R2 {found.r2:.4f}; relative error {errors}\n"
    )
    if any(e["median"] > _GOOD_ENOUGH for e in found.errors.values()):
        out.write(
            "the fit is poor: was the engine busy with others, or are --token-budget and --max-num-seqs not its own?\n"
        )
    out.write(
        f"wrote {args.out}; use it as --profile {args.out} --token-budget {args.token_budget} --max-num-seqs "
        f"{args.max_num_seqs} --network-ms {500 * found.overhead_seconds:.1f}\n"
    )
