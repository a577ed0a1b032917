"""Tiles over an engine whose steps without prompts are short and whose slices cost half as much as such a step.

As a vLLM 0.32 on one CPU core with a model of 23M parameters (docs/tiles.md). Constants that went by a GPU's steps made
slices for it that cost more than they held.
"""

from dataclasses import replace
from statistics import median

from proxy.core.config import SchedulerConfig
from proxy.core.request import RequestClass
from proxy.core.tiles import TileConfig
from proxy.sim.engine import EngineConfig
from proxy.sim.profiles import Profile, StepModel
from proxy.sim.records import RequestRecord
from proxy.sim.simulator import SimulationConfig, simulate
from proxy.sim.workload import ClassShare, Lengths, draw_workload, sharegpt_like

STEP = StepModel(5.0, 0.0, 1.0, 0.18, 2.0, 0.5, 1e-4, 2e-6, host_per_prompt=3.0)
CPU = Profile(
    "cpu", STEP, 60_000, "strict p99 TBT with budgets of 2048 and 448, steps without prompts, cost of a slice"
)
STRICT = RequestClass("strict", tbt_seconds=0.3)
CLASSES = (ClassShare(STRICT, 0.15), ClassShare(RequestClass("relaxed", tbt_seconds=1.5), 0.85))
_WHOLE = sharegpt_like(20_000)
TRACE = replace(
    _WHOLE, lengths=tuple(Lengths(max(1, r.prompt_tokens // 3), min(60, r.output_tokens)) for r in _WHOLE.lengths)
)


def run(seed: int, token_budget: int, tiles: TileConfig | None = None) -> list[RequestRecord]:
    requests = draw_workload(TRACE, rate=4.0, requests=160, seed=seed, classes=CLASSES)
    engine = EngineConfig(CPU, token_budget=token_budget, max_num_seqs=64, block_size=32)
    scheduler = None if tiles is None else SchedulerConfig(tiles=tiles)
    return simulate(requests, SimulationConfig(engine, network_seconds=0.0045), scheduler).records


def ttft(records: list[RequestRecord], share: float) -> float:
    seconds = sorted(r.ttft_seconds for r in records if r.ttft_seconds is not None)
    return seconds[int(share * len(seconds))]


def test_tiles_are_worth_it_over_an_engine_with_short_steps() -> None:
    medians, ends = [], []
    for seed in range(4):
        direct, small, tiled = run(seed, 2048), run(seed, 448), run(seed, 2048, TileConfig())
        assert all(r.completed for r in tiled)
        late = [gap for r in direct if r.request.request_class == STRICT for gap in r.gaps if gap > 0.3]
        assert late, "the engine itself does not keep the deadline"
        assert max(gap for r in tiled if r.request.request_class == STRICT for gap in r.gaps) <= 0.3
        medians.append(ttft(tiled, 0.5) / ttft(small, 0.5))
        ends.append(max(r.finished_at or 0.0 for r in tiled) / max(r.finished_at or 0.0 for r in direct))
    assert median(medians) <= 0.65
    assert max(ends) <= 1.01
