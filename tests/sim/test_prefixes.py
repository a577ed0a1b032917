"""Prompts that begin alike, in the simulator: what it brings to know which engine has their beginning."""

from dataclasses import replace
from random import Random
from statistics import fmean, median

import pytest
from invariants import check_records

from proxy.core.actions import Dispatch
from proxy.core.config import SchedulerConfig
from proxy.core.prefix import NO_BLOCKS
from proxy.core.request import RELAXED
from proxy.sim import simulator
from proxy.sim.engine import EngineConfig, SimulatedEngine
from proxy.sim.simulator import SimulationConfig, SimulationResult, simulate
from proxy.sim.workload import ScheduledRequest

TWO_ENGINES = SimulationConfig(EngineConfig(), engines=2)


def conversations(seed: int, *, rate: float = 3.0, requests: int = 800, groups: int = 100) -> list[ScheduledRequest]:
    """Prompts of ``groups`` common beginnings of 4,000 tokens: two engines' caches hold a hundred, one's does not."""
    rng, at, found = Random(seed), 0.0, list[ScheduledRequest]()
    for index in range(requests):
        at += rng.expovariate(rate)
        tail, output = 1 + int(rng.lognormvariate(5.3, 0.8)), rng.randint(20, 250)
        found.append(
            ScheduledRequest(index, at, 4000 + tail, output, RELAXED, index, f"group {rng.randrange(groups)}", 4000)
        )
    return found


def ttfts(result: SimulationResult) -> list[float]:
    check_records(result.records)
    return [r.ttft_seconds for r in result.records if r.ttft_seconds is not None]


@pytest.mark.parametrize("seed", [1, 2])
def test_knowing_where_beginnings_are_cached_halves_the_ttft(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = conversations(seed)
    with_index = ttfts(simulate(requests, TWO_ENGINES, SchedulerConfig()))
    monkeypatch.setattr(simulator, "blocks_of", lambda _: NO_BLOCKS)
    without = ttfts(simulate(requests, TWO_ENGINES, SchedulerConfig()))
    told = f"means {fmean(without):.3f} {fmean(with_index):.3f}, medians {median(without):.3f} {median(with_index):.3f}"
    assert len(with_index) == len(without) == len(requests)
    assert fmean(with_index) < 0.75 * fmean(without), told
    assert median(with_index) < 0.5 * median(without), told


def test_a_group_stays_on_its_engine_when_there_is_time() -> None:
    places: dict[str, set[str]] = {}
    requests = [replace(r, at_seconds=5.0 * r.index) for r in conversations(1, requests=60, groups=6)]

    def note(action: object, _: float) -> None:
        assert isinstance(action, Dispatch)
        places.setdefault(requests[int(action.request_id)].prefix, set()).add(action.engine_id)

    simulate(requests, TWO_ENGINES, SchedulerConfig(), note)
    assert len(places) == 6
    assert all(len(engines) == 1 for engines in places.values())


# The simulated engine's cache, where only the beginning of prompts is common.


def prefill(engine: SimulatedEngine, *sequence_ids: str) -> list[int]:
    """Step until all of these have their first token; the prompt tokens of each step."""
    steps, waiting = list[int](), set(sequence_ids)
    while waiting:
        engine.start_step()
        steps.append(engine.step_load.prefill_tokens)
        waiting -= {p.sequence_id for p in engine.finish_step()}
    return steps


def test_only_the_common_tokens_are_found() -> None:
    engine = SimulatedEngine(EngineConfig(token_budget=8192))
    engine.add("a", 1000, 2, "group", common=320)
    assert prefill(engine, "a") == [1000]
    engine.add("b", 1000, 2, "group", common=320)
    assert prefill(engine, "b") == [680], "from one that still runs"
    while engine.running:
        engine.start_step()
        engine.finish_step()
    engine.add("c", 330, 2, "group", common=320)
    engine.add("d", 1000, 2, "other", common=320)
    assert prefill(engine, "c", "d") == [10 + 1000], "from one that has ended"


def test_several_take_the_beginning_from_one_and_leave_it_behind() -> None:
    engine = SimulatedEngine(EngineConfig(token_budget=8192))
    for name in "abc":
        engine.add(name, 1000, 3, "group", common=512)
    assert prefill(engine, "a", "b", "c") == [1000 + 488 + 488]
    while engine.running:
        engine.start_step()
        engine.finish_step()
    assert engine.kv_tokens_used == 0
    engine.add("d", 600, 1, "group", common=512)
    assert prefill(engine, "d") == [88]
