"""Tiles over engines that are far away or schedule a step ahead: the loop's delay is learnt, the deadline kept."""

import pytest

from proxy.core.config import SchedulerConfig
from proxy.core.request import STRICT
from proxy.core.scheduler import Scheduler
from proxy.core.tiles import TileConfig
from proxy.sim.engine import EngineConfig
from proxy.sim.simulator import SimulationConfig, _Run
from proxy.sim.workload import draw_workload, sharegpt_like

TRACE = sharegpt_like(2000)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("network_seconds", [0.001, 0.02, 0.05])
@pytest.mark.parametrize("seed", [1, 2])
def test_tiles_keep_the_strict_deadline_whatever_the_delay(
    network_seconds: float, async_scheduling: bool, seed: int
) -> None:
    requests = draw_workload(TRACE, rate=1.3, requests=200, seed=seed)
    engine = EngineConfig(token_budget=8192, async_scheduling=async_scheduling)
    scheduler = Scheduler(SchedulerConfig(tiles=TileConfig()))
    run = _Run(requests, SimulationConfig(engine, network_seconds=network_seconds), scheduler, None)
    run.clock.run()
    records = run.records.values()
    assert all(record.completed for record in records)

    gaps = sorted(gap for r in records if r.request.request_class == STRICT for gap in r.gaps)
    assert len(gaps) > 1000
    assert STRICT.tbt_seconds == 0.1
    assert gaps[int(0.99 * len(gaps))] <= 0.1
    assert sum(gap > 0.1 for gap in gaps) < 0.002 * len(gaps)

    (belief,) = scheduler.engines
    truth, started_at = 2 * network_seconds, scheduler.config.gate.feedback_seconds
    assert belief.delay.steps == async_scheduling
    # No prompt comes so close to a step's beginning as to tell 2 ms from 5.
    assert truth * 0.95 <= belief.delay.seconds <= max(1.3 * truth, started_at)
    assert belief.delay.least_seconds <= truth
    assert belief.model.prompt_errors.p95 < 0.025
