"""Prefill-decode disaggregation: half of the engines prefill, the others go on from the keys and values they send."""

from dataclasses import replace

import pytest
from builders import make_scheduled
from invariants import check_records

from proxy.sim.engine import EngineConfig, SimulatedEngine
from proxy.sim.policies import find_policy
from proxy.sim.profiles import PROFILES
from proxy.sim.simulator import SimulationConfig, simulate
from proxy.sim.workload import draw_workload, sharegpt_like

TWO = find_policy("disaggregated").simulation(SimulationConfig(engines=2), seed=1)


def step_seconds(*, prompt: int = 0, decodes: int = 0, kv_tokens: int = 0) -> float:
    return PROFILES["rtx6000ada"].step.seconds(
        prefill_tokens=prompt, sequences=1, decodes=decodes, kv_tokens=kv_tokens, attention=prompt**2 / 2
    )


def test_a_request_alone_has_its_first_token_from_one_engine_and_the_others_from_the_next() -> None:
    (record,) = simulate([make_scheduled(0, 1.0, 500, 3)], TWO, None).records
    assert record.ttft_seconds == pytest.approx(0.002 + step_seconds(prompt=500), abs=1e-5)
    moved = 500 * TWO.kv_transfer_seconds_per_token + 0.002  # and the network, there and on
    assert record.gaps[0] == pytest.approx(moved + step_seconds(decodes=1, kv_tokens=500), abs=1e-5)
    assert record.gaps[1] == pytest.approx(step_seconds(decodes=1, kv_tokens=501), abs=1e-5)
    check_records([record])


def test_an_answer_of_one_token_moves_nowhere() -> None:
    result = simulate([make_scheduled(0, 1.0, 500, 1)], TWO, None)
    assert result.steps == 1
    check_records(result.records)


def test_every_request_gets_all_its_tokens_and_no_prompt_delays_a_stream() -> None:
    requests = draw_workload(sharegpt_like(), rate=2.0, requests=150, seed=1)
    apart = simulate(requests, TWO, None)
    check_records(apart.records)
    assert all(r.completed for r in apart.records)
    mixed = simulate(requests, replace(TWO, prefill_engines=0), None)
    # The gap after the first token has the way to the other engine in it.
    longest = [max(g for r in result.records for g in r.gaps[1:]) for result in (apart, mixed)]
    assert longest[0] < longest[1]


def test_what_was_computed_elsewhere_is_lost_with_a_preemption() -> None:
    engine = SimulatedEngine(EngineConfig(replace(PROFILES["rtx6000ada"], kv_tokens=64), 64, 8))
    for name in "ab":
        engine.add(name, 31, 20, ready=30)
    tokens = 0
    while engine.start_step() is not None:
        tokens += len(engine.finish_step())
    assert tokens == 40
    assert engine.preemptions > 0
    assert engine.prompt_tokens > 0, "one was computed anew, here"


def test_only_all_but_the_last_token_can_be_ready() -> None:
    with pytest.raises(ValueError, match="all but the last token"):
        SimulatedEngine().add("a", 30, 20, ready=15)
