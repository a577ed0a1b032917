"""``proxy.sim.bound``: cases worked out by hand, and the formula against a linear program."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.cli import main
from proxy.configfile import ConfigError
from proxy.configload import load_settings
from proxy.core.config import SchedulerConfig
from proxy.core.events import EngineUp
from proxy.core.limits import EngineLimits
from proxy.core.scheduler import Scheduler
from proxy.core.snapshot import view_state
from proxy.sim.bound import Limits, Needs, best_budget, bound, budgets, depth_of_prompts
from proxy.sim.bound_command import shares
from proxy.sim.bound_live import LiveError, compare, watch
from proxy.sim.bound_lp import lp_bound
from proxy.sim.engine import EngineConfig
from proxy.sim.profiles import PROFILES, StepModel, find_profile, read_profile, write_profile
from proxy.sim.simulator import SimulationConfig, simulate
from proxy.sim.workload import Lengths, draw_workload, sharegpt_like

TOKENS_ONLY = StepModel(0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0)
"""A millisecond per token."""
ADA = PROFILES["rtx6000ada"]


# -- by hand --


def test_needs_of_a_request() -> None:
    needs = Needs.of([Lengths(100, 4)])
    assert (needs.prompt_tokens, needs.decodes) == (100, 3)
    assert needs.kv_tokens == 100 + 101 + 102
    assert needs.attention == 100 * 50
    assert Needs.of([Lengths(1, 1), Lengths(3, 5)]) == Needs(2.0, 2.0, (3 + 4 + 5 + 6) / 2, (0.5 + 4.5) / 2)
    with pytest.raises(ValueError, match="no requests"):
        Needs.of([])


def test_with_nothing_but_tokens_to_pay_for_it_is_the_papers_theorem_1() -> None:
    found = bound(TOKENS_ONLY, Limits(512, inf, inf), Needs(900, 100, 1e6, 1e6))
    assert found.requests_per_second == pytest.approx(1.0)  # a request has 1,000 tokens


@pytest.mark.parametrize(
    ("limits", "binds", "rate"),
    [  # a step takes 10 ms and 1 ms for each token; a request has 80 prompt tokens, 20 decodes and 4,000 of context
        (Limits(50, inf, inf), "token budget", 1 / (2 * 0.010 + 0.1)),
        (Limits(50, 4, inf), "sequence slots", 1 / (5 * 0.010 + 0.1)),
        (Limits(50, 4, 400), "KV cache", 1 / (10 * 0.010 + 0.1)),
        (Limits(inf, inf, inf), "token budget", 1 / 0.1),
    ],
)
def test_the_scarcest_thing_binds(limits: Limits, binds: str, rate: float) -> None:
    found = bound(replace(TOKENS_ONLY, host=10.0), limits, Needs(80, 20, 4000, 0))
    assert found.binds == binds
    assert found.requests_per_second == pytest.approx(rate, rel=1e-4)
    assert found.requests_per_second == pytest.approx(min(found.alone.values()))


def test_a_part_of_a_tile_costs_a_whole_one_unless_others_fill_it() -> None:
    tiled = replace(TOKENS_ONLY, tile=64, host=10.0)
    assert bound(tiled, Limits(64, inf, inf), Needs(64, 0, 0, 0)).requests_per_second == pytest.approx(1 / 0.074)
    few_slots = bound(tiled, Limits(64, 1, inf), Needs(1, 2, 0, 0))  # two steps of one and a half tokens at least
    assert few_slots.requests_per_second == pytest.approx(1 / (2 * 0.074))


def test_the_best_budget_is_the_smallest_that_is_nearly_best_and_the_deadline_can_forbid_it() -> None:
    rows = budgets(ADA.step, Limits(512, 128, ADA.kv_tokens), sharegpt_like(2000).lengths, 128, 0.1)
    assert [row.token_budget for row in rows][:4] == [128, 256, 384, 512]
    rates = [row.bound.requests_per_second for row in rows]
    assert rates == sorted(rates)
    free, within = best_budget(rows, within_tbt=False), best_budget(rows, within_tbt=True)
    assert free is not None
    assert within is not None
    assert free.token_budget >= within.token_budget
    assert within.full_step_seconds <= 0.1
    impossible = budgets(ADA.step, Limits(512, 128, ADA.kv_tokens), sharegpt_like(200).lengths, 128, 0.001)
    assert best_budget(impossible, within_tbt=True) is None


def test_depth_of_prompt_tokens() -> None:
    assert depth_of_prompts([Lengths(1000, 1)], 0.95) == pytest.approx(950)
    assert depth_of_prompts([Lengths(100, 1)] * 9 + [Lengths(1100, 1)], 0.5) == pytest.approx(100)


# -- by machine --


@settings(max_examples=15, derandomize=True, database=None, deadline=None)
@given(
    st.builds(
        StepModel,
        host=st.floats(0, 30),
        host_per_sequence=st.just(0.0),
        floor=st.floats(0, 30),
        per_token=st.floats(0.01, 0.2),
        p=st.floats(1, 3),
        per_decode=st.floats(0, 0.1),
        per_kv_token=st.floats(0, 3e-4),
        per_attention=st.just(1e-6),
        tile=st.sampled_from([1, 64, 128]),
    ),
    st.builds(Limits, st.sampled_from([128, 512, 1024]), st.integers(1, 128), st.integers(10_000, 400_000)),
    st.tuples(st.integers(1, 8000), st.integers(2, 1000)),
)
def test_a_linear_program_over_kinds_of_steps_finds_the_same(
    model: StepModel, limits: Limits, size: tuple[int, int]
) -> None:
    needs = Needs.of([Lengths(*size)])
    formula, (program, mix) = bound(model, limits, needs).requests_per_second, lp_bound(model, limits, needs, 4)
    assert program <= formula * (1 + 1e-6)
    assert program >= formula * (0.97 if model.tile > 1 else 1 - 1e-6)
    assert sum(kind.share for kind in mix) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("policy", ["fcfs", "sarathi-spf", "slai-engine", "rad-engine", "deadline", "gate", "tiles"])
def test_no_policy_completes_more_than_the_bound_when_it_is_overloaded(policy: str) -> None:
    (share,) = shares([policy], sharegpt_like(), SimulationConfig(), requests=250, jobs=1)
    assert 0.4 < share.share < 1


# -- a running proxy --


def state_of(scheduler: Scheduler, now: float) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(view_state(scheduler, now)))
    return decoded


@pytest.mark.parametrize(("rate", "least", "most"), [(1.0, 0.4, 0.65), (2.6, 0.85, 1.02)])
def test_a_live_proxy_is_at_the_share_of_the_bound_that_its_traffic_is(rate: float, least: float, most: float) -> None:
    schedulers: list[Scheduler] = []

    def make(config: SchedulerConfig) -> Scheduler:
        schedulers.append(Scheduler(config))
        return schedulers[0]

    looks: list[tuple[float, dict[str, Any]]] = []
    requests = draw_workload(sharegpt_like(), rate=rate, requests=600, seed=1)
    until = requests[-1].at_seconds

    def look(action: Any, now: float) -> None:
        if 0.2 * until < now < until and (not looks or now > looks[-1][0] + 20):
            looks.append((now, state_of(schedulers[0], now)))

    simulate(requests, SimulationConfig(), SchedulerConfig(), look, make_scheduler=make)
    (engine,) = compare(looks)
    assert engine.share is not None
    assert least < engine.share < most
    assert engine.trusted
    assert engine.binds == "token budget"
    assert engine.more_with["token budget"] > engine.more_with["sequence slots"] == 0
    assert engine.decodes * engine.steps_per_second == pytest.approx(437 * min(rate, 1.9), rel=0.2)


def test_an_engine_without_steps_has_no_share() -> None:
    scheduler = Scheduler(SchedulerConfig())
    scheduler.handle(EngineUp("a", EngineLimits()), 0.0)
    state = state_of(scheduler, 1.0)
    (engine,) = compare([(0.0, state), (5.0, state)])
    assert (engine.share, engine.binds) == (None, None)


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http://127.0.0.1:9", "ftp://x"])
def test_who_does_not_answer_is_told(url: str) -> None:
    with pytest.raises(LiveError, match="debug-port"):
        watch(url, 0.0, sleep=lambda _: None)


def test_another_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.sim.bound_live._state", lambda url: {"engines": [{}]})
    with pytest.raises(LiveError, match="not the state of a proxy"):
        watch("http://127.0.0.1:9", 1.0, sleep=lambda _: None)


# -- the command --


def test_the_command_says_what_binds_and_how_near_policies_come(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bound", "--engines", "2", "--lp", "--simulate", "fcfs", "--requests", "60", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "with 2 engines: token budget binds" in out
    assert "best token budget that keeps the tightest TBT deadline: 512" in out
    assert "by the linear program" in out
    assert "share of" in out


def test_the_command_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bound", "--profile", "h100", "--class", "all:1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bound"]["binds"] == "token budget"
    assert document["token_budgets"][0]["keeps"] is None
    assert document["fleet_requests_per_second"] == document["bound"]["requests_per_second"]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--trace", "/nowhere"], 2, "/nowhere"),
        (["--live", "http://127.0.0.1:9", "--seconds", "0.01"], 1, "debug-port"),
        (["--token-budget", "8"], 2, "token budget"),
    ],
)
def test_mistakes_are_told(argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bound", *argv]) == code
    assert message in capsys.readouterr().err


# -- profiles from files --


def test_a_profile_goes_through_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(write_profile(ADA, fit={"r2": 0.9}))
    assert find_profile(str(file)) == ADA
    assert find_profile("h100") is PROFILES["h100"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": None}, "an object 'step'"),
        ({"step": {}}, "has the entries floor, host"),
        ({"step": {"host": -1.0}}, "'host'"),
        ({"step": {"per_token": "1"}}, "'per_token'"),
        ({"step": {"p": 0.5}}, "'p'"),
        ({"step": {"tile": 1.5}}, "'tile'"),
        ({"kv_tokens": 0}, "'kv_tokens'"),
        ({"kv_tokens": True}, "'kv_tokens'"),
    ],
)
def test_what_is_no_profile_is_told(change: dict[str, Any], message: str) -> None:
    document = json.loads(write_profile(ADA))
    step = change.get("step")
    if step:
        change = {"step": document["step"] | step}
    with pytest.raises(ValueError, match=message):
        read_profile(json.dumps(document | change))


def test_no_such_profile() -> None:
    with pytest.raises(ValueError, match=r"no profile 'gtx': there are rtx6000ada, .* calibrate"):
        find_profile("gtx")


def test_a_simulation_can_use_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text(write_profile(ADA))
    figures = []
    for profile in ("rtx6000ada", str(file)):
        argv = f"simulate --policy fcfs --rate 1 --requests 20 --seeds 1 --jobs 1 --json --profile {profile}"
        assert main(argv.split()) == 0
        figures.append(json.loads(capsys.readouterr().out)["runs"])
    assert figures[0] == figures[1]
    assert EngineConfig().profile == ADA


def test_serve_takes_one_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(write_profile(ADA))
    settings, _ = load_settings(["--sim-profile", str(file)], "slai-proxy serve")
    assert settings.sim_profile == str(file)
    with pytest.raises(ConfigError, match="no profile 'gtx'"):
        load_settings(["--sim-profile", "gtx"], "slai-proxy serve")
