import io
from dataclasses import replace

import pytest
from rich.console import Console

from proxy.sim.policies import POLICIES
from proxy.sim.study import RunFigures, Study, perform, summarise_study
from proxy.sim.tables import print_study, seconds
from proxy.sim.workload import parse_class, sharegpt_like


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(sharegpt_like(300), ("fcfs", "gate-fcfs"), (0.5, 2.5), (1, 2), 40)


@pytest.fixture(scope="module")
def runs(study: Study) -> list[RunFigures]:
    return [perform(task) for task in study.tasks()]


def _drawn(study: Study, runs: list[RunFigures], *, terminal: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
    print_study(console, summarise_study(study, runs), runs)
    return file.getvalue()


def test_each_rate_has_a_row_for_each_policy_in_three_tables(study: Study, runs: list[RunFigures]) -> None:
    text = _drawn(study, runs)
    low, high = text.split("requests per second")[1:3]
    for part in (low, high):
        assert [line.split()[0] for line in part.splitlines() if line.startswith(("fcfs", "gate"))] == [
            "fcfs",
            "gate-fcfs",
        ] * 3
    assert "0.5 requests per second" in text
    assert "2.5 requests per second" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_everything_fits_a_hundred_columns(study: Study, runs: list[RunFigures], terminal: bool) -> None:
    text = _drawn(study, runs, terminal=terminal)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100
    for heading in ("p50 (s)", "change", "offered", "TBT p99", "attained", "4096-", "starved", "goodput"):
        assert heading in text


@pytest.mark.parametrize("terminal", [False, True])
def test_the_longest_name_under_overload_fits_too(study: Study, runs: list[RunFigures], terminal: bool) -> None:
    slow = {"p50": 4512.3, "p90": 5512.4, "p99": 7512.5}
    row = {**runs[0], "policy": max(POLICIES, key=len), "ttft_s": slow, "engine_queue_s": {"p50": 1.0, "p95": 999.9}}
    both = [{**row, "seed": seed, "preemptions": 1000} for seed in (1, 2)]
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
    print_study(console, summarise_study(replace(study, policies=(row["policy"],)), both), both)
    assert "…" not in file.getvalue()
    assert "999,900" in file.getvalue()


def test_rules_are_for_terminals_only(study: Study, runs: list[RunFigures]) -> None:
    assert "───" in _drawn(study, runs, terminal=True)
    assert "─" not in _drawn(study, runs)


def test_first_policy_has_no_change_and_the_others_do(study: Study, runs: list[RunFigures]) -> None:
    rows = [line.split() for line in _drawn(study, runs).splitlines() if line.startswith(("fcfs", "gate"))]
    assert rows[0][3] == "-"
    assert rows[1][4] == "%"


def test_one_seed_has_no_range(study: Study, runs: list[RunFigures]) -> None:
    rows = [line.split() for line in _drawn(study, [r for r in runs if r["seed"] == 1]).splitlines()]
    assert next(row for row in rows if row[:1] == ["fcfs"])[2] == "-"


def test_failed_requests_are_told_and_their_ttft_is_never(study: Study, runs: list[RunFigures]) -> None:
    failed = {**runs[0], "errors": {"queue_timeout": 3}, "ttft_s": {"p50": 1.0, "p90": 2.0, "p99": None}}
    text = _drawn(study, [failed])
    assert "fcfs at 0.5 req/s, seed 1: of 40 requests failed 3 x queue_timeout." in text
    assert "never" in text.partition("Medians over the seeds")[0]
    assert "never: no first" in text  # says the legend


def test_early_stop_draws_what_there_is(study: Study, runs: list[RunFigures]) -> None:
    text = _drawn(study, [run for run in runs if run["policy"] != "fcfs" and run["rate"] == 2.5])
    assert "0.5 requests per second" not in text
    assert "gate-fcfs" in text


def test_own_classes_name_their_columns(study: Study) -> None:
    classes = (parse_class("paying:0.5:tbt=0.2"), parse_class("free:0.5"))
    own = Study(study.trace, ("fcfs",), (1.0,), (1,), 20, classes)
    text = _drawn(own, [perform(task) for task in own.tasks()])
    assert "paying" in text
    assert "free" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "0.012"), (9.5, "9.500"), (12.345, "12.35"), (123.45, "123.5"), (12345.6, "12346"), (None, "never")],
)
def test_seconds_take_five_characters(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_several_tenants_have_a_table_of_their_own() -> None:
    study = Study(sharegpt_like(300), ("gate",), (2.5,), (1,), 40, tenants={"calm": 1.0, "flood": 4.0})
    text = _drawn(study, [perform(task) for task in study.tasks()])
    assert "by tenant" in text
    assert "calm" in text
    assert "flood" in text


def test_one_tenant_has_no_table(study: Study, runs: list[RunFigures]) -> None:
    assert "by tenant" not in _drawn(study, runs)
