import json
from dataclasses import replace

import pytest

from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
from proxy.core.request import RELAXED
from proxy.sim.records import summarise
from proxy.sim.simulator import SimulationConfig, SimulationResult, simulate
from proxy.sim.study import RunFigures, Study, perform, summarise_study
from proxy.sim.workload import ScheduledRequest, draw_workload, sharegpt_like


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(sharegpt_like(300), ("fcfs", "gate"), (2.5,), (1, 2, 3), 60)


@pytest.fixture(scope="module")
def runs(study: Study) -> list[RunFigures]:
    return [perform(task) for task in study.tasks()]


def _made_up(policy: str, seed: int, p50: float | None, **more: object) -> RunFigures:
    figures = {"ttft_s": {"p50": p50}, "preemptions": 0, "errors": {}, "decisions_sha256": "0"}
    return {"policy": policy, "rate": 2.5, "seed": seed, **figures, **more}


# -- runs --


def test_tasks_pair_the_policies_on_the_same_requests(study: Study) -> None:
    tasks = list(study.tasks())
    assert len(tasks) == len(study) == 6
    assert [(t.policy, t.seed) for t in tasks[:3]] == [("fcfs", 1), ("gate", 1), ("fcfs", 2)]
    assert tasks[0].workload == tasks[1].workload
    assert tasks[0].workload != tasks[2].workload


def test_run_has_all_the_figures_of_its_records(study: Study, runs: list[RunFigures]) -> None:
    drawn = draw_workload(study.trace, rate=2.5, requests=60, seed=1)
    expected = summarise(simulate(drawn, SimulationConfig(), None).records)
    assert runs[0].items() >= expected.items()
    assert {"policy": "fcfs", "rate": 2.5, "seed": 1, "preemptions": 0}.items() <= runs[0].items()
    assert set(runs[0]["ttft_s"]) == {"p50", "p90", "p99"}
    assert set(runs[0]["tbt_s"]["strict"]) == {"p50", "p99"}
    assert set(runs[0]["engine_queue_s"]) == {"p50", "p95"}


def test_run_is_plain_json(runs: list[RunFigures]) -> None:
    assert json.loads(json.dumps(runs, allow_nan=False)) == runs


def test_decisions_repeat_exactly_and_differ_between_seeds(study: Study, runs: list[RunFigures]) -> None:
    gate = [run for run in runs if run["policy"] == "gate"]
    again = next(task for task in study.tasks() if task.policy == "gate")
    assert perform(again) == gate[0]
    assert len({run["decisions_sha256"] for run in gate}) == 3


def test_no_proxy_takes_no_decisions(runs: list[RunFigures]) -> None:
    assert all(run["decisions_sha256"] is None and not run["starved_steps"] for run in runs if run["policy"] == "fcfs")


def test_gate_keeps_the_engines_own_queue_short(runs: list[RunFigures]) -> None:
    direct, gated = ([r for r in runs if r["policy"] == p] for p in ("fcfs", "gate"))
    assert all(2 * g["engine_queue_s"]["p95"] < d["engine_queue_s"]["p95"] for d, g in zip(direct, gated, strict=True))


# -- what the engines report --


def _request(index: int, at_seconds: float, prompt_tokens: int, output_tokens: int) -> ScheduledRequest:
    return ScheduledRequest(index, at_seconds, prompt_tokens, output_tokens, RELAXED, 0)


def test_prompt_waits_in_the_engine_for_the_end_of_the_step_under_way() -> None:
    alone, later = _request(0, 0.0, 10, 50), _request(1, 0.5, 10, 2)
    result = simulate([alone, later], SimulationConfig(), None)
    first, second = result.engine_queue_seconds
    assert first == 0.0
    assert 0.0 < second < 2 * result.step_seconds


def test_every_prompt_has_one_queue_time_even_if_it_is_preempted() -> None:
    engine = SimulationConfig().engine
    small = replace(engine, profile=replace(engine.profile, kv_tokens=1024), max_num_seqs=8)
    result = simulate([_request(i, 0.0, 100, 300) for i in range(6)], SimulationConfig(small), None)
    assert result.preemptions
    assert len(result.engine_queue_seconds) == 6


def test_step_seconds_is_the_mean_over_busy_time_only() -> None:
    config = SimulationConfig()
    result = simulate([_request(0, 0.0, 100, 1), _request(1, 60.0, 100, 1)], config, None)
    one = config.engine.profile.step.seconds(prefill_tokens=100, sequences=1, decodes=0, kv_tokens=0, attention=5000.0)
    assert result.steps == 2
    assert result.step_seconds == pytest.approx(one)


def _two_prompts_beside_a_stream(gate: GateConfig) -> SimulationResult:
    stream, first, second = _request(0, 0.0, 10, 60), _request(1, 0.5, 100, 5), _request(2, 0.502, 100, 5)
    return simulate([stream, first, second], SimulationConfig(), SchedulerConfig(gate=gate))


def test_step_that_the_gate_leaves_empty_is_starved() -> None:
    # Nothing is released while anything is unstarted: the second prompt leaves only when the first one's token is
    # seen, one network delay after the next step has begun without a prompt.
    assert _two_prompts_beside_a_stream(GateConfig(backlog_factor=1e-6)).starved_steps == 1


def test_step_that_lacks_room_for_the_waiting_prompt_is_not_starved() -> None:
    # Two sequences may grow by so much that a third finds no room; what waits does so for a reason.
    no_room = GateConfig(backlog_factor=1e-6, kv_growth_tokens=80_000)
    assert _two_prompts_beside_a_stream(no_room).starved_steps == 0


def test_default_gate_starves_no_step() -> None:
    assert _two_prompts_beside_a_stream(GateConfig()).starved_steps == 0


# -- side by side --


def test_summary_of_real_runs_covers_every_policy_and_figure(study: Study, runs: list[RunFigures]) -> None:
    rows = summarise_study(study, runs)["2.5"]
    assert list(rows) == ["fcfs", "gate"]
    assert rows["gate"]["seeds"] == [1, 2, 3]
    assert rows["fcfs"]["ratio"]["ttft_s"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    p50s = sorted(run["ttft_s"]["p50"] for run in runs if run["policy"] == "gate")
    assert rows["gate"]["median"]["ttft_s"]["p50"] == p50s[1]
    assert rows["gate"]["spread"]["ttft_s"]["p50"] == [p50s[0], p50s[2]]
    json.dumps(rows, allow_nan=False)


def test_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_the_medians(study: Study) -> None:
    made_up = [_made_up("fcfs", seed, p50) for seed, p50 in ((1, 1.0), (2, 2.0), (3, 10.0))]
    made_up += [_made_up("gate", seed, p50) for seed, p50 in ((1, 0.9), (2, 1.0), (3, 6.0))]
    rows = summarise_study(study, made_up)["2.5"]
    assert rows["gate"]["ratio"]["ttft_s"]["p50"] == pytest.approx(0.6)
    assert rows["gate"]["median"]["ttft_s"]["p50"] == 1.0


def test_percentile_that_never_came_counts_as_worse_than_any(study: Study) -> None:
    made_up = [_made_up("fcfs", seed, 1.0) for seed in (1, 2, 3)]
    made_up += [_made_up("gate", seed, p50) for seed, p50 in ((1, None), (2, None), (3, 0.5))]
    row = summarise_study(study, made_up)["2.5"]["gate"]
    assert row["median"]["ttft_s"]["p50"] is None
    assert row["ratio"]["ttft_s"]["p50"] is None
    assert row["spread"]["ttft_s"]["p50"] == [0.5, None]


def test_class_that_one_seed_lacks_does_not_count_against_the_others(study: Study) -> None:
    made_up = [_made_up("fcfs", 1, 1.0, tbt_s={"rare": {"p99": 0.08}}), _made_up("fcfs", 2, 1.0, tbt_s={})]
    row = summarise_study(study, made_up)["2.5"]["fcfs"]
    assert row["median"]["tbt_s"] == {"rare": {"p99": 0.08}}
    assert row["ratio"]["tbt_s"] == {"rare": {"p99": 1.0}}


def test_ratio_to_nothing_is_nothing(study: Study) -> None:
    made_up = [_made_up("fcfs", 1, 1.0), _made_up("gate", 1, 1.0, preemptions=3)]
    assert summarise_study(study, made_up)["2.5"]["gate"]["ratio"]["preemptions"] is None


def test_early_stop_leaves_a_summary_of_what_there_is(study: Study) -> None:
    rows = summarise_study(study, [_made_up("gate", 2, 1.0)])["2.5"]
    assert list(rows) == ["gate"]
    assert rows["gate"]["ratio"] is None
    assert summarise_study(study, []) == {"2.5": {}}
