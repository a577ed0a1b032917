"""The comparison of tiles on real engines: its command line, its figures, and a whole run over simulated engines."""

import json
import sys
from pathlib import Path

import pytest
from builders import make_record
from rich.console import Console

from compare.tiles import Figures, costs, figures, hit_rate, main, parse_arguments, read_metrics, table
from proxy.core.request import RELAXED, STRICT

ENGINE = f"{sys.executable} -m proxy engine --ports {{port}} --token-budget {{budget}} --speed 20"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--rate", "1"], "--engine, or else --large and --small, is needed"),
        (["--rate", "1", "--large", "http://a", "--sides", "direct,gate"], "--engine, or else --small, is needed"),
        (["--engine", "x"], "--rate is needed"),
        (["--engine", "x", "--rate", "1", "--sides", "direct,twice"], "--sides: no twice; there are direct,"),
    ],
)
def test_what_is_missing_is_told(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(argv)
    assert told in capsys.readouterr().err


def test_only_the_engines_that_are_compared_are_needed() -> None:
    args = parse_arguments(["--rate", "1", "--large", "http://a", "--sides", "direct,tiles"])
    assert [(c.request_class.name, c.request_class.tbt_seconds) for c in args.classes] == [
        ("strict", 0.3),
        ("relaxed", 1.5),
    ]


def test_the_strict_class_is_judged_by_every_gap_and_those_that_failed_count_as_late() -> None:
    steady, late_once = [0.5 + 0.05 * n for n in range(100)], [0.5 + 0.05 * n + 0.3 * (n > 50) for n in range(100)]
    in_time, late = (make_record(*times, request_class=STRICT) for times in (steady, late_once))
    failed = make_record(request_class=STRICT, error="http 503")
    relaxed = make_record(0.8, 1.2, request_class=RELAXED)
    found = figures([in_time, late, failed, relaxed], "tiles", 0, STRICT)
    assert (found.completed, found.requests) == (3, 4)
    assert found.ttft[0] == pytest.approx(0.65), "a first token that never comes counts as one that comes last"
    assert found.strict_in_time == pytest.approx(1 / 3)
    assert found.strict_tbt_p99 == pytest.approx(0.05)


def test_the_proxys_metrics_are_read_without_the_engines_address() -> None:
    text = (
        '# HELP slai_slices_total x\nslai_slices_total 7.0\nslai_slice_prefix_tokens_total{cached="yes"} 90.0\n'
        'slai_slice_prefix_tokens_total{cached="no"} 10.0\nslai_engine_step_model_trusted{engine="http://a:1"} 1.0\n'
        'slai_requests_total{class="strict"} 3.0\n'
    )
    found = read_metrics(text)
    assert found["slai_slices_total"] == 7
    assert found["slai_engine_step_model_trusted"] == 1
    assert "slai_requests_total" not in "".join(found)
    assert hit_rate(found) == 0.9
    assert hit_rate({}) is None


def test_each_side_is_a_row_with_its_rounds_in_order() -> None:
    runs = [
        Figures("direct", 0, 9, 9, (1.0, 2.0, 3.0), 0.5, 0.25, 1.5),
        Figures("tiles", 0, 9, 9, (0.5, 2.0, 3.0), 0.2, 1.0, 1.5, 0.99),
        Figures("direct", 1, 9, 9, (3.0, 2.0, 3.0), None, None, 1.5),
    ]
    console = Console(width=160, record=True)
    console.print(table(runs))
    text = console.export_text()
    assert "1.00 / 3.00 (2.00)" in text
    assert "0.500 / -" in text
    assert "99.0%" in text


def test_costs_are_told_per_slice_and_beside_the_gates() -> None:
    sent = {"slai_slice_tokens_total": 500.0, 'slai_slice_prefix_tokens_total{cached="yes"}': 1500.0}
    gate = Figures("gate", 0, 10, 10, (), None, None, 1.0, prompt_tokens=1000)
    gate.metrics = {"process_cpu_seconds_total": 1.0}
    tiles = Figures("tiles", 0, 10, 10, (), None, None, 1.0, prompt_tokens=1000)
    tiles.metrics = {"process_cpu_seconds_total": 1.1, "slai_slices_total": 50.0} | sent
    told = costs([gate, tiles])
    assert told[0].startswith("slices: 5.0 per request")
    assert "2.0 tokens in them for each" in told[0]
    assert told[1].endswith("gate 100.0 ms, tiles 110.0 ms per request; 2.00 ms more per slice")
    assert costs([gate]) == []


@pytest.mark.e2e
def test_a_whole_comparison_over_simulated_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    argv = ["--engine", ENGINE, "--rate", "20", "--requests", "12", "--rounds", "1", "--sides", "direct,tiles"]
    limits = ["--max-num-seqs", "128", "--large-budget", "8192", "--json", str(out)]
    assert main([*argv, *limits]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert [(run["side"], run["completed"]) for run in runs] == [("direct", 12), ("tiles", 12)]
    assert runs[1]["metrics"]["slai_engine_step_model_steps"] > 0
    assert runs[0]["measured"]["all"]["requests"] == 12
    assert "tiles" in capsys.readouterr().out


@pytest.mark.e2e
def test_an_engine_that_does_not_come_up_is_told_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--engine", f"{sys.executable} -c 'raise SystemExit(\"no such model\")'", "--rate", "1"]
    assert main([*argv, "--sides", "direct"]) == 1
    assert "no such model" in capsys.readouterr().err
