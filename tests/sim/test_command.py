import argparse
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import proxy.sim.command as command_module
from proxy.cli import main
from proxy.sim.command import add_parser, run
from proxy.sim.parallel import WorkerError
from proxy.sim.workload import Trace

Simulate = Callable[..., tuple[int, str, str]]

_SMALL = ("--rate", "1.5,2.5", "--requests", "30", "--seeds", "1,2", "--jobs", "1")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "lengths.csv"
    rows = "".join(f"{50 + 37 * i % 1500},{5 + i % 40}\n" for i in range(100))
    path.write_text(f"prompt_tokens,output_tokens\n{rows}")
    return str(path)


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Run the command and return (status, stdout, stderr)."""

    def call(*argv: str) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser(prog="slai-proxy")
        add_parser(parser.add_subparsers(required=True))
        args = parser.parse_args(["simulate", *argv])
        assert args.run is run
        status = args.run(args)
        return status, *capsys.readouterr()

    return call


def test_table_goes_to_stdout_and_progress_to_stderr(simulate: Simulate, trace: str) -> None:
    status, out, err = simulate(*_SMALL, "--trace", trace)
    assert status == 0
    assert out.count("requests per second") == 3  # two headings, and the legend's words
    assert out.splitlines()[0] == "1.5 requests per second"
    lines = err.splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("1/8 fcfs at 1.5 req/s, seed 1: median TTFT 0.")
    assert lines[-1].startswith("8/8 gate at 2.5 req/s, seed 2")


def test_json_has_every_run_and_the_summary(simulate: Simulate, trace: str) -> None:
    status, out, err = simulate(*_SMALL, "--trace", trace, "--policy", "fcfs,gate,gate-fcfs", "--json")
    assert status == 0
    document = json.loads(out)
    assert document["schema_version"] == 1
    assert document["complete"] is True
    assert [(r["rate"], r["policy"], r["seed"]) for r in document["runs"]] == [
        (rate, policy, seed) for rate in (1.5, 2.5) for policy in ("fcfs", "gate", "gate-fcfs") for seed in (1, 2)
    ]
    assert list(document["summary"]) == ["1.5", "2.5"]
    assert document["summary"]["1.5"]["gate"]["ratio"]["completed_per_s"] == pytest.approx(1.0, abs=0.1)
    assert "1.5 requests per second" in err


def test_json_tells_how_to_do_it_again(simulate: Simulate, trace: str) -> None:
    argv = ("--profile", "h100", "--engines", "2", "--network-ms", "4", "--class", "all:1:ttft=2", "--json")
    config = json.loads(simulate(*_SMALL, "--trace", trace, *argv)[1])["config"]
    digest = hashlib.sha256(Path(trace).read_bytes()).hexdigest()
    assert config["trace"] == {"name": trace, "rows_read": 100, "rows_dropped": {}, "sha256": digest}
    assert config["classes"] == [{"name": "all", "share": 1.0, "ttft_s": 2.0, "tbt_s": None, "weight": 1.0}]
    assert (config["profile"], config["engines"], config["network_s"]) == ("h100", 2, 0.004)
    assert (config["rates"], config["seeds"], config["policies"]) == ([1.5, 2.5], [1, 2], ["fcfs", "gate"])
    assert (config["token_budget"], config["watermark"], config["aging_s"]) == (512, 0.0, 3.0)


def test_processes_change_no_figure(simulate: Simulate, trace: str) -> None:
    argv = ("--rate", "2.5", "--requests", "30", "--seeds", "1,2", "--trace", trace, "--json")
    assert simulate(*argv, "--jobs", "2")[1] == simulate(*argv, "--jobs", "1")[1]


def test_options_reach_the_simulation(simulate: Simulate) -> None:
    base = ("--rate", "2.5", "--requests", "30", "--seeds", "1", "--policy", "gate", "--jobs", "1", "--json")

    def hash_with(*argv: str) -> Any:
        return json.loads(simulate(*base, *argv)[1])["runs"][0]["decisions_sha256"]

    variants = [
        (),
        ("--profile", "l40s"),
        ("--engines", "2"),
        ("--token-budget", "1024"),
        ("--network-ms", "30"),
        ("--async-scheduling",),
        ("--backlog-factor", "0.2"),
        ("--aging-seconds", "0.1"),
    ]
    assert len({hash_with(*argv) for argv in variants}) == len(variants)


def test_rows_left_out_of_a_trace_are_told(simulate: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("prompt_tokens,output_tokens\n10,5\n0,5\n12,6\n")
    status, _, err = simulate("--rate", "1", "--requests", "5", "--seeds", "1", "--jobs", "1", "--trace", str(path))
    assert status == 0
    assert err.splitlines()[0] == f"{path}: 1 of 3 rows left out: 1 x empty prompt or output"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--trace", "nowhere.csv"], "cannot read the trace 'nowhere.csv'"),
        (["--class", "a:0.5"], "--class: the shares add up to 0.5, not 1"),
        (["--class", "a:0.5", "--class", "a:0.5"], "--class: two classes have the same name"),
        (["--tenants", "a=1,b=2", "--quota", "c=5"], "--quota: c is none of --tenants"),
        (["--guarantee", "a=5"], "--guarantee: a is none of --tenants"),
        (["--token-budget", "64"], "the token budget must hold one token of every sequence"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(simulate: Simulate, argv: list[str], message: str) -> None:
    status, out, err = simulate("--rate", "1", *argv)
    assert (status, out) == (2, "")
    assert err.startswith("slai-proxy simulate: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("spelling", [("--surge", "-2:10"), ("--surge=-2:10",)])
def test_a_negative_surge_is_told_in_either_spelling(
    spelling: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["simulate", "--rate", "1", *spelling])
    assert stop.value.code == 2
    assert "--surge: a surge is FACTOR:SECONDS, both positive, not '-2:10'" in capsys.readouterr().err


_ONE = ("--rate", "2", "--requests", "20", "--seeds", "1", "--jobs", "1")


def notes_of(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("note: ")]


def test_a_surge_stands_in_the_heading(simulate: Simulate, trace: str) -> None:
    _, out, err = simulate(*_ONE, "--trace", trace, "--surge", "2.5:3")
    assert out.splitlines()[0] == "2 requests per second, 2.5 times as many for the first 3 s"
    assert notes_of(err) == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--surge", "2.5:600"], "--surge: at --rate 2 all 20 requests come within its 600 s"),
        (["--policy", "fcfs,gate-limit"], "--policy gate-limit refuses by the ttft of a --class, and none has one"),
        (["--capacity", "0.5"], "--capacity lies between two rates, and there is one"),
        (["--capacity", "0.5", "--step-model"], "--step-model compares no policies: --capacity is left aside"),
    ],
)
def test_what_does_less_than_it_looks_like_is_noted(
    simulate: Simulate, trace: str, argv: list[str], words: str
) -> None:
    status, _, err = simulate(*_ONE, "--trace", trace, *argv)
    assert status == 0
    (note,) = notes_of(err)
    assert words in note


def test_what_does_what_it_says_is_not_noted(simulate: Simulate, trace: str) -> None:
    argv = ("--policy", "gate-limit", "--class", "a:1:ttft=2", "--capacity", "0.5")
    assert notes_of(simulate(*_SMALL, "--trace", trace, *argv)[2]) == []


def test_a_decision_log_is_not_overwritten(simulate: Simulate, trace: str, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    argv = (*_ONE, "--trace", trace, "--policy", "gate", "--decision-log", str(log))
    assert simulate(*argv)[0] == 0
    first = log.read_bytes()
    status, out, err = simulate(*argv)
    assert (status, out) == (2, "")
    assert err == f"slai-proxy simulate: --decision-log: {log} is there already, and is not overwritten\n"
    assert log.read_bytes() == first != b""


def test_request_that_never_fits_the_gpu_is_told(simulate: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("prompt_tokens,output_tokens\n300000,5\n")
    status, _, err = simulate("--rate", "1", "--trace", str(path))
    assert status == 2
    assert "a request of 300,005 tokens can never fit the KV cache of 235,728" in err


def test_interrupt_prints_what_is_complete(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(call: Callable[[Any], Any], tasks: Iterable[Any], jobs: int) -> Iterator[Any]:
        for number, task in enumerate(tasks):
            if number == 3:
                raise KeyboardInterrupt
            yield call(task)

    monkeypatch.setattr(command_module, "run_parallel", interrupted)
    status, out, err = simulate(*_SMALL, "--json")
    assert status == 130
    assert "stopped: 3 of 8 runs are complete" in err
    document = json.loads(out)
    assert document["complete"] is False
    assert len(document["runs"]) == 3
    assert document["summary"]["1.5"]["gate"]["seeds"] == [1]
    assert document["summary"]["2.5"] == {}


def test_interrupt_before_the_first_run_is_as_quiet(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> Trace:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_module, "load_trace", interrupted)
    assert simulate(*_SMALL) == (130, "", "")


def test_lost_process_is_told(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> Iterator[Any]:
        yield from ()
        raise WorkerError("a worker process ended too early (exit code -9)")

    monkeypatch.setattr(command_module, "run_parallel", lost)
    status, out, err = simulate(*_SMALL)
    assert (status, out) == (1, "")
    assert "exit code -9" in err
    assert "stopped: 0 of 8 runs are complete" in err


def test_bar_on_a_terminal_leaves_no_trace_in_the_output(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    status, out, _ = simulate("--rate", "2.5", "--requests", "20", "--seeds", "1", "--jobs", "1")
    assert status == 0
    assert "2.5 requests per second" in out


def test_capacity_is_told_after_the_tables_and_in_json(simulate: Simulate, trace: str) -> None:
    _, out, _ = simulate(*_SMALL, "--trace", trace, "--capacity", "30")
    tail = out.split("capacity (median TTFT up to 30 s")[1].splitlines()
    assert [line.split()[:3] for line in tail if line.startswith(("fcfs", "gate"))] == [
        [policy, "2.5", "-"] for policy in ("fcfs", "gate")
    ]
    document = json.loads(simulate(*_SMALL, "--trace", trace, "--capacity", "0.0001", "--json")[1])
    assert document["capacity"]["fcfs"] == {
        "kept_at": None,
        "broken_at": 1.5,
        "estimate": None,
        "interval": None,
        "broken": "TTFT",
    }


def test_step_model_study_has_a_row_for_each_run_with_a_proxy(simulate: Simulate, trace: str) -> None:
    argv = ("--rate", "2.5", "--requests", "60", "--seeds", "1,2", "--jobs", "1", "--trace", trace)
    status, out, err = simulate(*argv, "--step-model", "--jitter")
    assert status == 0
    assert [line.split()[:4] for line in out.splitlines() if line.startswith("gate")] == [
        ["gate", "2.5", seed, steps] for seed in "12" for steps in ("10", "100", "500")
    ]
    assert err.splitlines()[-1] == "2/2 gate at 2.5 req/s, seed 2"
    document = json.loads(simulate(*argv, "--step-model", "--json")[1])
    assert document["config"]["jitter"] is False
    assert [run["seed"] for run in document["step_model"]] == [1, 2]


def test_step_model_study_needs_a_proxy(simulate: Simulate) -> None:
    status, out, err = simulate("--rate", "1", "--policy", "fcfs", "--step-model")
    assert (status, out) == (2, "")
    assert "--step-model" in err
