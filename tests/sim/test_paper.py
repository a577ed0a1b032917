"""``make paper``: a small run of it, resumed; and the paper's definitions worked out by hand."""

import json
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
from builders import make_scheduled

from proxy.sim.paper import __main__ as command
from proxy.sim.paper import plan
from proxy.sim.paper.plan import Size, Task, perform, tasks, workloads
from proxy.sim.records import RequestRecord
from proxy.sim.workload import draw_workload, sharegpt_like

SMALL = Size((1.0, 2.5), (1,), 40, 20, (11,))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "QUICK", SMALL)
    monkeypatch.setattr(plan, "POLICIES", ("sarathi", "slai-engine"))
    monkeypatch.setattr(plan, "MEASURED_AS_THE_PAPER_DOES", ("sarathi", "slai-engine"))
    monkeypatch.setattr(plan, "BOUND_PROFILES", ("h100",))
    monkeypatch.setattr(plan, "BOUND_POLICIES", ("fcfs",))


@pytest.mark.usefixtures("small")
def test_it_simulates_writes_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--quick", "--jobs", "1", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert command.main(argv) == 0
    page = (tmp_path / "out" / "paper.md").read_text()
    assert "Capacity **+26 %** in the paper" in page
    assert "| SLAI, SPF, dynamic offset |" in page
    assert "| h100 | long prompts |" in page
    fresh = page.split("### Seeds that nothing was chosen on")[1].split("##")[0]
    assert "seeds 11, at 1.7 requests" in fresh
    assert "| ours: deadline (in the engine) |" in fresh
    (kept,) = (tmp_path / "cache").iterdir()
    lines = kept.read_text().splitlines()
    kept.write_text("\n".join(lines[:5]) + "\n" + lines[5][:50])  # as if stopped in the middle of a line
    capsys.readouterr()
    assert command.main(argv) == 0
    assert "5 of" in capsys.readouterr().err
    assert (tmp_path / "out" / "paper.md").read_text() == page
    assert command.main([*argv, "--draw-only"]) == 0


def test_no_such_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--trace", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err


def test_the_papers_definitions() -> None:
    record = RequestRecord(make_scheduled(0, 1.0, 10, 4), first_token_at=2.0, finished_at=5.0, tokens=4)
    record.gaps = array("d", [2.0, 0.5, 0.5])  # the first is left out, and two zeros come in
    late = RequestRecord(make_scheduled(1, 1.0, 10, 4), first_token_at=2.0, finished_at=3000.0, tokens=4)
    late.gaps = array("d", [9.0, 9.0, 9.0])
    counted = plan._as_the_paper_counts([record, late])
    assert counted["requests"] == 1
    (tbt,) = counted["tbt_s"].values()
    assert tbt["p99"] == pytest.approx(0.5)
    assert counted["ttft_s"]["p50"] == 1.0


def test_capped_gaps_are_at_most_three_means_and_bursts_keep_the_rate() -> None:
    trace = sharegpt_like(3000)

    def task(arrivals: str) -> Task:
        return Task("", "fcfs", trace, 2.0, 1, 3000, arrivals)

    drawn = draw_workload(trace, rate=2.0, requests=3000, seed=1)
    times = {how: [r.at_seconds for r in plan._with_arrivals(drawn, task(how))] for how in ("capped", "bursty")}
    gaps = {how: [b - a for a, b in pairwise(t)] for how, t in times.items()}
    assert max(gaps["capped"]) == pytest.approx(1.5)
    assert 3000 / times["capped"][-1] == pytest.approx(2.0 * 1.052, rel=0.05), "5 % more than the label says"
    assert 3000 / times["bursty"][-1] == pytest.approx(2.0, rel=0.2)
    mean = sum(gaps["bursty"]) / len(gaps["bursty"])
    deviation = (sum((g - mean) ** 2 for g in gaps["bursty"]) / len(gaps["bursty"])) ** 0.5
    assert deviation / mean == pytest.approx(3.0, rel=0.25)


def test_every_key_is_one_simulation_and_the_quick_ones_are_among_all() -> None:
    trace = sharegpt_like(200)
    every, quick = ([task.key for task in tasks(size, trace, None)] for size in (plan.FULL, plan.QUICK))
    assert len(set(every)) == len(every)
    assert set(quick) <= set(every)
    assert len(workloads(trace, None)) == 5


def test_a_simulation_is_the_same_again() -> None:
    task = next(iter(tasks(SMALL, sharegpt_like(200), None)))
    first, second = perform(task), perform(task)
    assert json.dumps(first) == json.dumps(second)
