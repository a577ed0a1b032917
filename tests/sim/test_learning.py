from dataclasses import replace

import pytest

from proxy.sim.engine import EngineConfig
from proxy.sim.learning import judge_learning
from proxy.sim.policies import PolicyOptions
from proxy.sim.profiles import Jitter
from proxy.sim.simulator import SimulationConfig
from proxy.sim.study import RunTask
from proxy.sim.workload import draw_workload, sharegpt_like

_JITTERY = SimulationConfig(EngineConfig(jitter=Jitter()))


def task(policy: str = "gate", *, requests: int = 250, simulation: SimulationConfig = _JITTERY) -> RunTask:
    drawn = draw_workload(sharegpt_like(1000), rate=1.5, requests=requests, seed=1)
    return RunTask(policy, 1.5, 1, drawn, simulation, PolicyOptions())


def test_step_times_are_learnt_to_a_millisecond_or_two_in_spite_of_jitter() -> None:
    judged = judge_learning(task())["after_steps"]
    assert list(judged) == ["10", "100", "500", "2000"], "the run has no ten thousand steps"
    for steps in ("10", "100"):
        assert judged[steps]["error_s"]["mae"] < 0.25 * judged[steps]["step_s"]
    for row in (judged["500"], judged["2000"]):
        assert row["judged_steps"] == 500
        assert row["step_s"] > 0.03
        assert row["error_s"]["mae"] < 0.003
        assert row["error_s"]["p95"] < 0.006
        assert row["exact_share"] > 0.95
        assert abs(row["error_s"]["mean"]) <= row["error_s"]["mae"] <= row["error_s"]["p95"]


def test_without_jitter_both_errors_are_the_same() -> None:
    row = judge_learning(task(requests=100, simulation=SimulationConfig()))["after_steps"]["500"]
    assert row["error_s"] == row["error_with_jitter_s"]


def test_only_the_first_engine_is_judged() -> None:
    row = judge_learning(task(requests=200, simulation=replace(_JITTERY, engines=2)))["after_steps"]["500"]
    assert row["judged_steps"] <= 500
    assert row["exact_share"] > 0.95


def test_without_a_proxy_nobody_learns() -> None:
    with pytest.raises(ValueError, match="'fcfs' has no proxy"):
        judge_learning(task("fcfs", requests=1))
