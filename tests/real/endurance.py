"""An engine with the plugin under a random load that leaves it no KV cache: does it go on, and does everybody get on?

    PYTHONPATH=.:tests/support .venv/bin/python tests/real/endurance.py --venv .real/vllm --model .real/model

Clients send prompts of all lengths, strict and relaxed, some shaped by a schema, some for several answers; a third of
them leave at any moment. The KV cache holds not two of the longest prompts, so there is never enough of it.
Exit status 0: the engine lives and has no fault, every request that stayed was answered whole, nothing is left running
or waiting, and nobody was overtaken by one who came later than the plugin's ageing allows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from real_engine import RealEngine
from rich.console import Console

_FIRST_ID, _IDS = 1000, 2048
_BLOCK_TOKENS = 32
_LONGEST = 6000
_SCHEMA = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
_ON_THE_WAY_SECONDS = 5.0
"""From a client to the engine's queue, on a machine with other things to do."""
_IDLE_SECONDS = 60.0


@dataclass(slots=True)
class Sent:
    """A request that stayed to its first token, or to its end."""

    prompt_tokens: int
    at: float
    first_at: float | None = None
    gap_seconds: float = 0.0


@dataclass(slots=True)
class Load:
    """What the clients have seen."""

    ended: Counter[str] = field(default_factory=Counter)
    sent: list[Sent] = field(default_factory=list)


async def client(engine: RealEngine, session: aiohttp.ClientSession, load: Load, draw: Random, until: float) -> None:
    """Send one request after another."""
    while time.monotonic() < until:
        body = request(draw)
        leaves_after = draw.expovariate(1 / 3.0) if draw.random() < 1 / 3 else 600.0
        sent = Sent(len(body["prompt"]), time.monotonic())
        load.sent.append(sent)
        try:
            async with asyncio.timeout(leaves_after):
                load.ended[await follow(engine, session, body, sent)] += 1
        except TimeoutError:
            load.ended["left" if leaves_after < 600 else "stuck"] += 1
        except aiohttp.ClientError as error:
            load.ended[type(error).__name__] += 1
        await asyncio.sleep(draw.expovariate(1 / 0.2))


def request(draw: Random) -> dict[str, Any]:
    """Draw a request."""
    low, high = draw.choices(((1, 60), (60, 800), (800, 3000), (3000, _LONGEST)), (0.4, 0.4, 0.14, 0.06))[0]
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [_FIRST_ID + draw.randrange(_IDS) for _ in range(draw.randint(low, high))],
        "max_tokens": draw.randint(1, 400),
        "stream": True,
        "ignore_eos": True,
        "vllm_xargs": {"slai_tbt_ms": draw.choice((1, 50, 300, 1500, 60_000))},
    }
    if draw.random() < 0.1:
        body |= {"structured_outputs": {"json": _SCHEMA}, "ignore_eos": False}
    if draw.random() < 0.1:
        body |= {"n": 3}
    if draw.random() < 0.1:
        body |= {"priority": draw.randint(-1, 1)}
    return body


async def follow(engine: RealEngine, session: aiohttp.ClientSession, body: dict[str, Any], sent: Sent) -> str:
    """Read an answer to its end and say how it ended."""
    async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            return f"http {answer.status}"
        last_at, finished = None, 0
        async for line in answer.content:
            now = time.monotonic()
            if line == b"data: [DONE]\n":
                return "whole" if finished == body.get("n", 1) else "cut"
            if not line.startswith(b"data: "):
                continue
            told = json.loads(line[6:])
            if "error" in told:
                return "error event"
            finished += sum(choice["finish_reason"] is not None for choice in told["choices"])
            if last_at is None:
                sent.first_at = now
            else:
                sent.gap_seconds = max(sent.gap_seconds, now - last_at)
            last_at = now
        return "cut"


def overtaken(sent: list[Sent], aging_seconds: float) -> int:
    """How many were overtaken by one who came later than the longest time that ageing lets anybody be passed for."""
    begun = [s for s in sent if s.first_at is not None]
    found = 0
    for one in begun:
        assert one.first_at is not None
        late = one.at + aging_seconds * log(max(1, one.prompt_tokens)) + _ON_THE_WAY_SECONDS
        found += any(other.at > late and (other.first_at or 0.0) < one.first_at for other in begun)
    return found


async def endure(args: argparse.Namespace, notes: Console) -> bool:
    """Run it all and say whether everything was well."""
    with tempfile.TemporaryDirectory() as directory:
        blocks = str(args.kv_tokens // _BLOCK_TOKENS)
        flags = "--num-gpu-blocks-override", blocks, "--max-num-batched-tokens", str(args.budget)
        engine = RealEngine(
            args.venv.absolute(),
            args.model.absolute(),
            Path(directory) / "log",
            *(*flags, *args.flags.split()),
            plugin=args.policy,
            aging_seconds=args.aging_seconds,
        )
        notes.print("starting the engine", markup=False)
        await asyncio.to_thread(engine.start)
        try:
            return await _endure(engine, args, notes)
        finally:
            engine.stop()
            if args.log is not None:
                args.log.write_text(engine.said(), encoding="utf-8")


async def _endure(engine: RealEngine, args: argparse.Namespace, notes: Console) -> bool:
    load, until = Load(), time.monotonic() + args.seconds
    connections = aiohttp.TCPConnector(limit=0, force_close=True)  # the server closes those that were idle for long
    async with aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(total=None)) as session:
        clients = asyncio.gather(
            *(client(engine, session, load, Random(f"{args.seed}:{n}"), until) for n in range(args.clients))
        )
        while not clients.done():
            await asyncio.wait((clients,), timeout=30.0)
            left = max(0, round(until - time.monotonic()))
            notes.print(f"{left} s left, {len(load.sent)} sent: {dict(load.ended)}", markup=False, highlight=False)
            if not engine.alive():
                clients.cancel()
                notes.print(engine.said()[-3000:], markup=False)
                break
    figures = await asyncio.to_thread(_figures, engine) if engine.alive() else {}
    passed = overtaken(load.sent, args.aging_seconds)
    waits = sorted(s.first_at - s.at for s in load.sent if s.first_at is not None)
    told = {
        "ended": dict(load.ended),
        "overtaken beyond the bound": passed,
        "longest wait for a first token (s)": round(waits[-1], 2) if waits else None,
        "longest gap between tokens (s)": round(max((s.gap_seconds for s in load.sent), default=0.0), 2),
        **figures,
    }
    Console().print_json(json.dumps(told))
    well = set(load.ended) <= {"whole", "left"} and not passed
    return well and engine.alive() and figures["plugin"] == 1 and not figures["left over"]


def _figures(engine: RealEngine) -> dict[str, float]:
    end = time.monotonic() + _IDLE_SECONDS
    while (left := engine.running()) and time.monotonic() < end:
        time.sleep(0.2)
    return {
        "left over": left,
        "plugin": engine.figure("slai_plugin_info"),
        "steps": engine.figure("slai_plugin_steps"),
        "held": engine.figure("slai_plugin_held"),
        "preemptions": engine.figure("vllm:num_preemptions_total"),
    }


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--venv", type=Path, required=True, help="environment with a vLLM, as install_engine.py makes it")
    add("--model", type=Path, required=True, help="model, as make_model.py makes it")
    add("--seconds", type=float, default=600.0, help="how long (default: 600)")
    add("--policy", default="deadline", help="of the plugin (default: deadline)")
    add("--clients", type=int, default=40, help="each sends one request after another (default: 40)")
    add("--budget", type=int, default=512, help="tokens in a step (default: 512)")
    add("--kv-tokens", type=int, default=10_240, help="size of the KV cache (default: 10240)")
    add("--aging-seconds", type=float, default=3.0, help="of the plugin (default: 3, so that the bound is tried)")
    add("--flags", default="", help="further flags of the engine")
    add("--seed", type=int, default=0, help="draws the load (default: 0)")
    add("--log", type=Path, help="keep what the engine says in this file")
    args = parser.parse_args()
    return 0 if asyncio.run(endure(args, Console(stderr=True))) else 1


if __name__ == "__main__":
    sys.exit(main())
