"""One tenant sends ten times what another does, and far more than the engine can do."""

from collections import Counter
from dataclasses import replace

import pytest

from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
from proxy.core.request import RequestClass
from proxy.core.tiles import TileConfig
from proxy.sim.engine import EngineConfig
from proxy.sim.simulator import SimulationConfig, simulate
from proxy.sim.workload import ClassShare, draw_workload, sharegpt_like


def worst_ttft_of_the_calm(rate: float, requests: int, tiles: TileConfig | None, *, told_apart: bool) -> float:
    drawn = draw_workload(
        sharegpt_like(2000), rate=rate, requests=requests, seed=1, tenants={"calm": 1.0, "flood": 10.0}
    )
    calm = {r.index for r in drawn if r.tenant == "calm"}
    sent = drawn if told_apart else [replace(r, tenant="") for r in drawn]
    engine = EngineConfig(token_budget=512 if tiles is None else 8192)
    result = simulate(sent, SimulationConfig(engine), SchedulerConfig(tiles=tiles, max_wait_seconds=20.0))
    return max(r.ttft_seconds or float("inf") for r in result.records if r.request.index in calm)


@pytest.mark.parametrize("tiles", [None, TileConfig()], ids=["whole", "tiles"])
def test_a_tenant_within_its_share_hardly_waits_behind_a_flood(tiles: TileConfig | None) -> None:
    """What is overdue of the flood does not go before others' new requests."""
    assert worst_ttft_of_the_calm(5.5, 400, tiles, told_apart=False) > 30
    assert worst_ttft_of_the_calm(5.5, 400, tiles, told_apart=True) < 6


def test_a_flood_leaves_head_room_only_for_as_long_as_others_are_about() -> None:
    """Shorter steps for who shares the engine with a flood; a tenant that is alone loses nothing by it."""
    both = draw_workload(sharegpt_like(2000), rate=5.5, requests=700, seed=2, tenants={"calm": 1.0, "flood": 10.0})
    alone = [r for r in both if r.tenant == "flood"][:200]
    median_ttft: list[float] = []
    decisions: list[list[str]] = []
    for headroom in (0.0, 0.6):
        config = SchedulerConfig(gate=GateConfig(tenant_headroom=headroom), queue_timeout_seconds=60.0)
        result = simulate(both, SimulationConfig(), config)
        of_calm = sorted(r.ttft_seconds or float("inf") for r in result.records if r.request.tenant == "calm")
        median_ttft.append(of_calm[len(of_calm) // 2])
        decisions.append([])
        simulate(alone, SimulationConfig(), config, lambda action, now: decisions[-1].append(f"{action} {now}"))
    assert median_ttft[1] < 0.8 * median_ttft[0]
    assert decisions[0] == decisions[1]


def test_the_flood_is_refused_and_not_the_calm() -> None:
    users = RequestClass("users", ttft_seconds=5.0, ttft_limit_seconds=5.0)
    drawn = draw_workload(
        sharegpt_like(2000),
        rate=5.5,
        requests=400,
        seed=1,
        classes=[ClassShare(users, 1.0)],
        tenants={"calm": 1.0, "flood": 10.0},
    )
    for config in (SchedulerConfig(), SchedulerConfig(max_queue_requests=10)):
        result = simulate(drawn, SimulationConfig(), config)
        refused = Counter(r.request.tenant for r in result.records if r.error)
        assert refused["flood"] > 100
        assert refused["calm"] == 0


def ttft_of_the_calm(flood: float, config: SchedulerConfig) -> list[float]:
    """Sorted. The calm tenant's requests are the same, and come at the same times, whatever the other sends."""
    drawn = draw_workload(
        sharegpt_like(2000),
        rate=0.5 * (1 + flood),
        requests=round(150 * (1 + flood)),
        seed=1,
        tenants={"calm": 1.0, "flood": flood},
    )
    result = simulate(drawn, SimulationConfig(), config)
    return sorted(r.ttft_seconds or float("inf") for r in result.records if r.request.tenant == "calm")[-150:]


def test_with_guarantees_and_head_room_a_flood_hardly_moves_the_ttft_of_another() -> None:
    """Beside ten times what the other was guaranteed as beside once."""
    config = SchedulerConfig(gate=GateConfig(tenant_headroom=0.8), tenant_guarantees={"calm": 170_000, "flood": 85_000})
    beside, flooded, shared = (
        ttft_of_the_calm(flood, found)
        for flood, found in ((1.0, SchedulerConfig()), (10.0, config), (10.0, SchedulerConfig()))
    )
    for half in (slice(0, 75), slice(75, 150)):
        assert sum(flooded[half]) < 1.1 * sum(beside[half])
        assert sum(shared[half]) > 1.5 * sum(beside[half])


def test_two_tenants_that_both_flood_lose_nothing_by_head_room() -> None:
    drawn = draw_workload(sharegpt_like(2000), rate=8.0, requests=800, seed=1, tenants={"one": 1.0, "other": 1.0})
    done: list[int] = []
    for config in (
        SchedulerConfig(),
        SchedulerConfig(gate=GateConfig(tenant_headroom=0.8), tenant_guarantees={"one": 60_000}),
    ):
        result = simulate(drawn, SimulationConfig(), config)
        last = max(r.request.at_seconds for r in result.records)
        done.append(sum(r.completed and (r.finished_at or last) < last for r in result.records))
    assert done[1] > 0.95 * done[0]
