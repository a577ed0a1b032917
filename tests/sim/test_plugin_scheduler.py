"""The plugin's policies in a simulated engine."""

import numpy as np
import pytest

from proxy.core.stepplan import EngineState, StepPlan, StepPolicy
from proxy.sim.engine import EngineConfig, SimulatedEngine
from proxy.sim.policies import PolicyOptions, find_policy
from proxy.sim.schedulers.plugin import PluginScheduler
from proxy.sim.simulator import SimulationConfig, SimulationResult, simulate
from proxy.sim.workload import draw_workload, sharegpt_like


class Told(PluginScheduler):
    """Does as a test says."""

    plan = StepPlan(10)
    seen: list[EngineState]

    def make_policy(self, config: EngineConfig) -> StepPolicy:
        del config
        self.seen = []
        outer = self

        class Policy:
            def plan(self, state: EngineState) -> StepPlan:
                outer.seen.append(state)
                return outer.plan

        return Policy()


def step(engine: SimulatedEngine, plan: StepPlan) -> dict[str, int]:
    engine._scheduler.plan = plan  # type: ignore[attr-defined]
    engine.start_step()
    batch = {sequence.id: tokens for sequence, tokens in engine._batch or ()}
    engine.finish_step()
    return batch


def test_a_plan_is_carried_out_as_vllm_does() -> None:
    engine = SimulatedEngine(EngineConfig(token_budget=100, max_num_seqs=8, scheduler=Told))
    for name in "abc":
        engine.add(name, 30, 9, tbt_seconds=0.1)
    assert step(engine, StepPlan(40, order=["c", "a", "b"])) == {"c": 30, "a": 10}
    assert step(engine, StepPlan(100, admits=False)) == {"c": 1, "a": 20}
    assert step(engine, StepPlan(100, frozenset("c"), chunk_tokens=5)) == {"a": 1, "b": 5}
    assert step(engine, StepPlan(100, frozenset("abc"))) == {"c": 1, "a": 1, "b": 25}, "nobody waits for nothing"
    seen: list[EngineState] = engine._scheduler.seen  # type: ignore[attr-defined]
    assert [p.id for p in seen[0].waiting] == ["a", "b", "c"]
    assert [(d.id, d.context) for d in seen[2].decodes] == [("c", 31), ("a", 30)]
    clock = seen[2].now
    assert [d.due_at for d in seen[2].decodes] == pytest.approx([clock + 0.1] * 2)
    assert [(p.id, p.remaining, p.computed) for p in seen[3].begun] == [("b", 25, 5)]


@pytest.mark.parametrize("seed", [1, 3])
def test_the_plugin_keeps_tight_deadlines_of_99_tokens_in_100_near_saturation(seed: int) -> None:
    policy = find_policy("plugin-deadline")
    requests = draw_workload(sharegpt_like(), rate=1.7, requests=200, seed=seed)
    result = simulate(requests, policy.simulation(SimulationConfig(), seed), policy.scheduler(PolicyOptions()))
    assert all(record.completed for record in result.records)
    tight = [gap for r in result.records if r.request.request_class.name == "strict" for gap in r.gaps]
    assert np.percentile(tight, 99) < 0.1


@pytest.mark.parametrize("seed", [1, 3])
def test_with_the_proxy_in_front_it_keeps_them_too_and_the_proxy_keeps_its_queue_short(seed: int) -> None:
    """It is told each request's deadline, and whom it would let pass it has at once."""
    requests = draw_workload(sharegpt_like(), rate=1.7, requests=200, seed=seed)
    results = {}
    for name in ("plugin-deadline", "gate-plugin-deadline"):
        policy = find_policy(name)
        results[name] = simulate(
            requests, policy.simulation(SimulationConfig(), seed), policy.scheduler(PolicyOptions())
        )
    gated, alone = results["gate-plugin-deadline"], results["plugin-deadline"]
    assert all(record.completed for record in gated.records)
    tight = [gap for r in gated.records if r.request.request_class.name == "strict" for gap in r.gaps]
    assert np.percentile(tight, 99) < 0.1
    assert np.percentile(gated.engine_queue_seconds, 95) < 0.8 * np.percentile(alone.engine_queue_seconds, 95)
    assert ttft(gated) < 1.1 * ttft(alone)


def ttft(result: SimulationResult) -> float:
    return float(np.median([r.ttft_seconds for r in result.records]))
