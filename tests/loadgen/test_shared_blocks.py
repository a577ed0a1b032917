"""What a trace says that prompts have in common is found by a prefix cache, and nothing else is."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from loadgen.arrivals import Rate
from loadgen.cli import main
from loadgen.inspection import inspect
from loadgen.planning import Demand, SharedPrefix, plan
from loadgen.results import Result
from loadgen.runner import run_workload
from loadgen.traces import Format, Row, RowTrace, load
from proxy.sim.engine import EngineConfig
from proxy.sim.http import start_engines, stop_engines
from proxy.sim.profiles import PROFILES
from proxy.sim.workload import ScheduledRequest

BLOCK = 16
"""Of the simulated engine, as of vLLM's."""


async def serve_one_after_another(requests: tuple[ScheduledRequest, ...]) -> list[Result]:
    queue = [replace(r, at_seconds=0.0, after=r.index - 1 if r.index else None) for r in requests]
    engines = await start_engines([0], EngineConfig(PROFILES["h100"], token_budget=8192), model="m", speed=1000.0)
    try:
        return await run_workload(queue, [engines[0].url], model="m")
    finally:
        await stop_engines(engines)


def mooncake(path: Path, rows: int) -> RowTrace:
    """A trace in which each prompt begins as one before it does, up to some block."""
    rng, known, names = Random(1), [list[int]()], iter(range(10**6))
    with path.open("w") as file:
        for number in range(rows):
            begins = rng.choice(known)
            blocks = [*begins[: rng.randrange(len(begins) + 1)], *(next(names) for _ in range(rng.randrange(1, 4)))]
            known.append(blocks)
            length = 512 * len(blocks) - rng.randrange(0, 512, BLOCK) - 1
            record = {"timestamp": 100 * number, "input_length": length, "output_length": 2, "hash_ids": blocks}
            file.write(json.dumps(record) + "\n")
    found = load(str(path))
    assert isinstance(found, RowTrace)
    return found


async def test_blocks_of_a_trace_are_found_by_a_prefix_cache_as_inspect_says(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "mooncake.jsonl", 40)
    promised = inspect(trace, "")["sharing"]["found_tokens"]
    assert promised > 10_000
    demand = Demand(rate=Rate.constant(1.0), requests=40)
    results = await serve_one_after_another(plan(trace, demand).schedule.requests)
    assert all(r.completed and r.prompt_tokens == r.request.prompt_tokens for r in results)
    assert sum(r.cached_tokens or 0 for r in results) == pytest.approx(promised, rel=0.1)
    alone = await serve_one_after_another(plan(trace, replace(demand, share=False)).schedule.requests)
    assert sum(r.cached_tokens or 0 for r in alone) == 0


async def test_prompts_are_unique_unless_a_prefix_is_asked_for() -> None:
    rows = tuple(Row(600 + n, 2) for n in range(20))
    trace = RowTrace("t", Format.LENGTHS, rows, 20, 20)
    demand = Demand(rate=Rate.constant(1.0), requests=20)
    alone = await serve_one_after_another(plan(trace, demand).schedule.requests)
    assert sum(r.cached_tokens or 0 for r in alone) == 0
    shared = replace(demand, shared_prefix=SharedPrefix(10 * BLOCK, 2))
    results = await serve_one_after_another(plan(trace, shared).schedule.requests)
    assert len({r.request.prefix for r in results}) == 2
    # All but the first of each group find it.
    assert sum(r.cached_tokens or 0 for r in results) == (20 - 2) * 10 * BLOCK


def test_the_simulator_says_that_it_knows_no_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mooncake.jsonl"
    mooncake(path, 5)
    arguments = ["run", "--simulate", "h100", "--trace", str(path), "--rate", "5", "--requests", "5", "--json", "-"]
    assert main(arguments) == 2
    assert "add --no-sharing" in capsys.readouterr().err
    main([*arguments, "--no-sharing"])
    assert json.loads(capsys.readouterr().out)["counts"]["completed"] == 5
