"""Does an engine with the plugin say what a stock one says? Greedy requests to a real vLLM, token by token.

    PYTHONPATH=.:tests/support .venv/bin/python tests/real/identity.py --venv .real/vllm --model .real/model

A step's arithmetic depends a little on what else is in it, so where two tokens are as good as equally likely even a
stock engine may say another one the second time. So stock runs twice, and of each difference is told how far apart the
two likeliest tokens were: where more than a tie is decided otherwise, something else is computed. Exit status 0: no
output differs by more than ties, and the plugin has held back at least ``--held`` decodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from real_engine import RealEngine
from rich.console import Console
from rich.table import Table

_TIE = 0.05
"""Natural logarithms of probabilities; the models compute in 16 bits, of which logits have 8 to 9."""
_FIRST_ID, _IDS = 1000, 2048


@dataclass(frozen=True, slots=True)
class Asked:
    """A request."""

    prompt: list[int]
    tokens: int
    tbt_ms: int

    def body(self) -> dict[str, Any]:
        return {
            "model": "tiny",
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            "vllm_xargs": {"slai_tbt_ms": self.tbt_ms},
        }


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: its tokens, and for each by how much the likeliest was likelier than the next."""

    tokens: tuple[str, ...]
    leads: tuple[float, ...]


@dataclass(slots=True)
class Run:
    """What an engine said to all."""

    name: str
    said: list[Said]
    steps: int = 0
    held: int = 0


def ask(count: int, seed: int) -> list[Asked]:
    """Draw requests: mostly short prompts, some long ones, a sixth of them strict."""
    draw = Random(seed)
    found = []
    for _ in range(count):
        low, high = draw.choices(((20, 300), (300, 1500), (2000, 4000)), (0.7, 0.24, 0.06))[0]
        prompt = [_FIRST_ID + draw.randrange(_IDS) for _ in range(draw.randint(low, high))]
        found.append(Asked(prompt, draw.randint(16, 64), 100 if draw.random() < 1 / 6 else 1500))
    return found


def difference(one: Said, other: Said) -> float | None:
    """How decided the first token was in which two answers differ; ``None``: they are the same."""
    for mine, theirs, lead in zip(one.tokens, other.tokens, one.leads, strict=True):
        if mine != theirs:
            return lead
    return None


async def run(name: str, policy: str | None, asked: list[Asked], args: argparse.Namespace, notes: Console) -> Run:
    """Start an engine, send everything to it, so many at once, and note what it says."""
    notes.print(f"{name}: starting the engine", markup=False)
    with tempfile.TemporaryDirectory() as directory:
        budget = "--max-num-batched-tokens", str(args.budget)
        engine = RealEngine(
            args.venv.absolute(), args.model.absolute(), Path(directory) / "log", *budget, plugin=policy
        )
        await asyncio.to_thread(engine.start)
        try:
            turns, done = asyncio.Semaphore(args.at_once), 0

            async def send(session: aiohttp.ClientSession, request: Asked) -> Said:
                nonlocal done
                async with turns, session.post(f"{engine.url}/v1/completions", json=request.body()) as answer:
                    answer.raise_for_status()
                    told = (await answer.json())["choices"][0]["logprobs"]
                done += 1
                if done % 100 == 0:
                    notes.print(f"{name}: {done} of {len(asked)}", markup=False)
                best = [sorted(top.values(), reverse=True) for top in told["top_logprobs"]]
                return Said(tuple(told["tokens"]), tuple(two[0] - two[1] for two in best))

            connections = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=600)
            async with aiohttp.ClientSession(connector=connections, timeout=timeout) as session:
                found = Run(name, await asyncio.gather(*(send(session, request) for request in asked)))
            if policy is not None:
                found.steps = int(await asyncio.to_thread(engine.figure, "slai_plugin_steps"))
                found.held = int(await asyncio.to_thread(engine.figure, "slai_plugin_held"))
                if await asyncio.to_thread(engine.figure, "slai_plugin_info") != 1:
                    raise AssertionError(f"the plugin has a fault:\n{engine.said()[-3000:]}")
        finally:
            engine.stop()
    return found


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--venv", type=Path, required=True, help="environment with a vLLM, as install_engine.py makes it")
    add("--model", type=Path, required=True, help="model, as make_model.py makes it")
    add("--requests", type=int, default=500, help="default: 500")
    add("--policies", default="deadline,slai", help="of the plugin, one or several (default: deadline,slai)")
    add("--at-once", type=int, default=48, help="requests in flight (default: 48)")
    add("--budget", type=int, default=512, help="tokens in a step (default: 512: many steps, many to be held)")
    add("--held", type=int, default=1000, help="decodes that must have been held back, per policy (default: 1000)")
    add("--seed", type=int, default=0, help="draws the requests (default: 0)")
    add("--json", type=Path, metavar="OUT", help="write the figures to this file")
    args, notes = parser.parse_args(), Console(stderr=True)
    asked = ask(args.requests, args.seed)
    sides = [("stock", None), ("stock again", None), *((name, name) for name in args.policies.split(","))]
    runs = [asyncio.run(run(name, policy, asked, args, notes)) for name, policy in sides]
    stock, rows, good = runs[0], [], True
    for other in runs[1:]:
        found = [difference(a, b) for a, b in zip(stock.said, other.said, strict=True)]
        leads = sorted((lead for lead in found if lead is not None), reverse=True)
        ties = sum(lead <= _TIE for lead in leads)
        rows.append(
            {
                "compared with stock": other.name,
                "equal": len(found) - len(leads),
                "ties decided otherwise": ties,
                "others": len(leads) - ties,
                "widest lead": leads[0] if leads else 0.0,
                "steps": other.steps,
                "held": other.held,
            }
        )
        good &= len(leads) == ties and (other.name == "stock again" or other.held >= args.held)
    shown = Table(*rows[0])
    for row in rows:
        shown.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(shown)
    if args.json is not None:
        args.json.write_text(json.dumps({"requests": len(asked), "rows": rows}, indent=1), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
