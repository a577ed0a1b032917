"""``--policy MODULE:NAME``: what users may bring."""

import json
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.sim.custom import load
from proxy.sim.policies import find_policy
from proxy.sim.simulator import SimulationConfig

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(policies: str, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    argv = f"simulate --policy {policies} --rate 2.5 --requests 60 --seeds 1 --jobs 1 --json"
    assert main(argv.split()) == 0
    return {run["policy"]: run["ttft_s"]["p50"] for run in json.loads(capsys.readouterr().out)["runs"]}


def test_the_examples_run_and_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = ["my_policies:in_lanes", "my_policies:PayingPromptsLookShort"]
    found = run(",".join(["fcfs", "gate-fcfs", *names]), capsys)
    assert found[names[0]] < found["gate-fcfs"]
    assert found[names[1]] < found["fcfs"]


def test_an_order_that_is_the_proxys_own_gives_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_same.py").write_text(
        "from proxy.core.ordering import AGING_SECONDS, ShortestPromptFirst\n"
        "from proxy.sim.policies import POLICIES\n"
        "spf = ShortestPromptFirst(AGING_SECONDS)\n"
        "whole = POLICIES['slai-engine']\n"
    )
    found = run("gate,mine_same:spf,slai-engine,mine_same:whole", capsys)
    assert found["gate"] == found["mine_same:spf"]
    assert found["slai-engine"] == found["mine_same:whole"]


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        ("", "no_such_module_here:X", "No module named .*; modules of the working directory, "),
        ("", "mine_empty:X", "no attribute 'X'"),
        ("1 / 0", "mine_broken:X", "ZeroDivisionError"),
        ("X = 3", "mine_number:X", "is not an order"),
        ("def X(p, a): return 'first'", "mine_text:X", "a key is a number"),
    ],
)
def test_what_is_no_policy_is_told(
    text: str, spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    if text or "empty" in spec:
        (tmp_path / f"{spec.partition(':')[0]}.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_policy(spec)


def test_an_engine_scheduler_is_put_into_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = "my_policies:PayingPromptsLookShort"
    assert find_policy(spec).simulation(SimulationConfig(), 1).engine.scheduler is load(spec)
