"""The comparison at several loads: its command line, its tables, and a run over simulated engines that goes on."""

import json
import sys
from pathlib import Path

import pytest

from compare.loads import main, parse_arguments

ENGINE = f"{sys.executable} -m proxy engine --ports {{port}} --token-budget {{budget}} --speed 20"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--engine", "x", "--rates", "fast"], "--rates: 'fast' are no numbers"),
        (["--engine", "x", "--rate", "3"], "several loads are compared here"),
        (["--rates", "3"], "--engine is needed for an engine with our scheduler inside"),
        (["--engine", "x", "--sides", "gate,twice"], "--sides: no twice"),
    ],
)
def test_what_makes_no_sense_is_told(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(argv)
    assert told in capsys.readouterr().err


@pytest.mark.e2e
def test_each_side_is_measured_once_at_each_load_and_a_second_call_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    argv = ["--engine", ENGINE, "--sides", "direct,gate", "--requests", "8", "--json", str(out)]
    argv += ["--max-num-seqs", "128", "--large-budget", "8192", "--small-budget", "512"]
    assert main([*argv, "--shares", "0.04,0.08", "--rounds", "1"]) == 0
    told = json.loads(out.read_text())
    one, two = told["rates"]
    assert [(run["side"], run["rate"]) for run in told["runs"]] == [
        *(("direct", one), ("gate", one), ("gate", two), ("direct", two))
    ]
    assert all(run["completed"] == 8 for run in told["runs"])
    assert main([*argv, "--rounds", "2"]) == 0
    again = json.loads(out.read_text())
    assert again["rates"] == told["rates"], "what the engine can do is not measured anew"
    assert again["runs"][:4] == told["runs"]
    assert [run["round"] for run in again["runs"]] == [0] * 4 + [1] * 4
    shown = capsys.readouterr().out
    assert f"{two:g} requests/s, by prompt tokens" in shown
    assert "4 runs are there already" not in shown
