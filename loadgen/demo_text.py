"""What ``slai-loadgen demo`` says before and after."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.demo import CLASSES, DIRECT, ENGINES, OUTPUT_SCALE, PROFILE, PROXY, TOKEN_BUDGET
from loadgen.report import comparison_table, remarks, run_tables, show

if TYPE_CHECKING:
    from rich.console import Console

    from loadgen.demo import DemoPlan, Outcome
    from loadgen.report import Document

_MOST_COLUMNS = 80

# Measured and predicted figures further apart than this: the machine had other things to do.
_TOLERATED_DIFFERENCE = 0.2
_TOLERATED_ATTAINMENT = 0.1
"""Of all requests of a class: a class may have so few that one of them is a twentieth."""


def show_introduction(plan: DemoPlan, console: Console) -> None:
    """Say what is going to be compared."""
    seconds = plan.requests / plan.rate / plan.speed
    _say(
        console,
        f"slai-proxy demo: {plan.requests} requests with ShareGPT-like lengths (outputs times {OUTPUT_SCALE:g}, so "
        f"that the load is soon steady), {plan.rate:g} a second at random times, for {ENGINES} simulated vLLM engines "
        f"({PROFILE}, Mistral-7B, {TOKEN_BUDGET} tokens a step). First straight to the engines in turn, then the same "
        f"requests through the proxy. The engines run {plan.speed:g} times as fast as real ones, so that each side "
        f"takes about {seconds:.0f} s; all figures are in the engines' own time.",
    )


def show_outcome(outcome: Outcome, console: Console) -> None:
    """Print the table, the prediction beneath it, and what to make of both."""
    live, simulated = outcome.live, outcome.simulated
    if len(live) == 2:
        _say(console, "Measured over HTTP", bold=True)
        _show_comparison(live, console)
    elif live:
        _say(console, "Measured over HTTP, straight to the engines", bold=True)
        show(console, run_tables(live[DIRECT]))
    for side, document in live.items():
        for remark in remarks(document):
            _say(console, f"{side}: {remark}")
    if len(simulated) == 2:
        _say(console, "Predicted by the simulator, for the same requests at the same times", bold=True)
        _show_comparison(simulated, console)
        _show_conclusion(outcome, console)
        _show_next_steps(console)
    elif outcome.interrupted:
        _say(console, "Interrupted; this is what had been measured." if live else "Interrupted.")


def _show_comparison(sides: dict[str, Document], console: Console) -> None:
    show(console, comparison_table(sides[DIRECT], sides[PROXY], (DIRECT, PROXY), by_length=False))


def _show_conclusion(outcome: Outcome, console: Console) -> None:
    measured, predicted = (
        {side: _telling_figures(document) for side, document in documents.items()}
        for documents in (outcome.live, outcome.simulated)
    )
    if not all(value for figures in (*measured.values(), *predicted.values()) for value in figures.values()):
        return  # too little was answered
    ratios = [figures[PROXY]["TTFT p50"] / figures[DIRECT]["TTFT p50"] for figures in (measured, predicted)]
    _say(
        console,
        "Look at TTFT p50. A short prompt that goes straight to an engine waits behind every longer one before it; the "
        "proxy hands an engine its next prompt when it can begin it, the shortest first. The median TTFT was "
        f"{ratios[0]:.2f} times that of the direct run (predicted: {ratios[1]:.2f}). TBT and completed requests should "
        "be the same on both sides; what the longest prompts pay, if anything, shows in TTFT p99.",
    )
    kinds = [share.request_class for share in CLASSES]
    deadlines = ", ".join(f"{1000 * (kind.tbt_seconds or 0):g} ms ({kind.name})" for kind in kinds)
    _say(
        console,
        f"Attainment: share of the requests whose first token came within {kinds[0].ttft_seconds:g} s and that never "
        f"waited longer for another than {deadlines}.",
    )
    far = [
        f"{name} ({side}) by {value / predicted[side][name] - 1:+.0%}"
        for side, figures in measured.items()
        for name, value in figures.items()
        if abs(value / predicted[side][name] - 1) > _TOLERATED_DIFFERENCE
    ]
    far += [
        f"attainment {name} ({side}) {share:.0%} instead of {foreseen:.0%}"
        for side, document in outcome.live.items()
        for name, share in document["metrics"]["attainment"].items()
        if share is not None
        and (foreseen := outcome.simulated[side]["metrics"]["attainment"].get(name)) is not None
        and abs(share - foreseen) > _TOLERATED_ATTAINMENT
    ]
    if far:
        _say(
            console,
            f"Far from the prediction: {', '.join(far)}. This machine was too busy (a millisecond lost counts as "
            f"{outcome.plan.speed:g} ms here), and attainment suffers first. Try again when it is quiet, or with a "
            "smaller --speed.",
        )


def _telling_figures(document: Document) -> dict[str, float]:
    """The figures in which measurement and prediction have to agree, in seconds; zero where there is none."""
    metrics = document["metrics"]
    tbt = {f"TBT p99 {name}": row["p99"] or 0.0 for name, row in metrics["tbt_s"].items()}
    return {"TTFT p50": metrics["ttft_s"]["p50"] or 0.0, **tbt}


def _show_next_steps(console: Console) -> None:
    steps = {
        "make run ENGINES=http://gpu1:8000,...": "put the proxy before your vLLM",
        f"{_program('slai-loadgen')} run --help": "send load to any server",
        f"{_program('slai-proxy')} simulate --help": "try other loads, GPUs and policies",
    }
    console.out("Next:", highlight=False)
    for command, purpose in steps.items():
        console.out(f"  {command:<{max(map(len, steps))}}  {purpose}", highlight=False)


def _program(name: str) -> str:
    """Return what to type for one of our programs; make installs them where the shell does not look."""
    if shutil.which(name):
        return name
    path = Path(sys.executable).with_name(name)
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _say(console: Console, text: str, *, bold: bool = False) -> None:
    filled = textwrap.fill(text, min(console.width, _MOST_COLUMNS), break_long_words=False)
    console.print(filled + "\n", style="bold" if bold else None, markup=False, highlight=False, soft_wrap=True)
