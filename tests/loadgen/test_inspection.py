import json
from pathlib import Path
from random import Random

import pytest

from loadgen.cli import main
from loadgen.draws import exponential
from loadgen.inspection import arrivals, bars, heights, inspect
from loadgen.traces import Format, Row, RowTrace, load


def trace_of(*rows: Row) -> RowTrace:
    return RowTrace("t", Format.MOONCAKE, rows, len(rows), len(rows))


def test_lengths_are_told_by_quantiles_and_a_histogram() -> None:
    found = inspect(trace_of(*(Row(n, 5) for n in range(1, 102))), "t")["prompt_tokens"]
    assert (found["mean"], found["p50"], found["p90"], found["max"]) == (51.0, 51.0, 91.0, 101)
    assert sum(bar["requests"] for bar in found["histogram"]) == 101
    assert all(a["below"] == b["from"] for a, b in zip(found["histogram"], found["histogram"][1:], strict=False))


def test_a_poisson_process_has_a_burstiness_of_one_and_a_metronome_of_none() -> None:
    rng, at = Random(1), 0.0
    times = [at := at + exponential(rng) / 10 for _ in range(20_000)]
    poisson = arrivals(times)
    assert poisson["interval_cv"] == pytest.approx(1.0, abs=0.03)
    assert poisson["mean_per_s"] == pytest.approx(10.0, rel=0.03)
    assert poisson["dispersion"]["1s"] == pytest.approx(1.0, abs=0.1)
    metronome = arrivals([n / 8 for n in range(8001)])
    assert metronome["interval_cv"] == pytest.approx(0.0)
    assert metronome["dispersion"] == {"1s": 0.0, "10s": 0.0, "60s": 0.0}
    pairs = arrivals([n // 2 / 10 for n in range(4000)])
    assert pairs["same_time_as_before"] == 2000
    assert arrivals([0.0])["dispersion"]["1s"] is None


def test_a_cache_without_limit_finds_whole_blocks_after_the_same_beginning() -> None:
    found = inspect(
        trace_of(
            Row(1024, 1, 0.0, (1, 2), 512),
            Row(1500, 1, 1.0, (1, 2, 3), 512),  # finds two
            Row(1024, 1, 2.0, (7, 2), 512),  # the same block after another beginning
            Row(1500, 1, 3.0, (1, 2, 3), 512),  # the third block is not whole
            Row(512, 1, 4.0, (2,), 512),  # the same block without a beginning
        ),
        "t",
    )["sharing"]
    assert found["found_tokens"] == 2048
    assert found["found_share"] == 2048 / (1024 + 1500 + 1024 + 1500 + 512)


def test_a_conversation_finds_what_it_said_before() -> None:
    first, second = Row(100, 9, session="a", grows=True), Row(150, 9, session="a", grows=True, after=0)
    found = inspect(trace_of(first, second, Row(80, 9, session="b", grows=True)), "t")
    assert found["sharing"]["found_tokens"] == 100
    assert found["sessions"]["sessions"] == 2
    assert found["sessions"]["turns_max"] == 2
    assert found["arrivals"] is None


def test_a_schedule_can_be_inspected(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text(
        '{"schedule":1}\n{"index":0,"time_s":0,"prompt_tokens":30,"output_tokens":2,"seed":7,"session":"a"}\n'
        '{"index":1,"time_s":1,"prompt_tokens":60,"output_tokens":2,"seed":7,"session":"a","after":0}\n'
    )
    found = inspect(load(str(path)), "s")
    assert (found["format"], found["requests"], found["sharing"]["found_tokens"]) == ("schedule", 2, 30)


def test_the_command_shows_it_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    lines = ["arrived_at,prompt_tokens,output_tokens", *(f"{n},{n + 1},7" for n in range(50)), "x,1,1", "1,0,1"]
    path.write_text("\n".join(lines))
    assert main(["inspect", str(path), "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    assert "lengths CSV; 52 rows read = 50 emitted + 2 dropped" in shown
    assert "dropped 1: no usable time" in shown
    assert "mean 1 per second" in shown
    assert main(["inspect", str(path), "--json", "-", "--window", ":10"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["rows_dropped"]["outside the window"]) == (10, 40)
    assert json.loads((tmp_path / "out.json").read_text())["requests"] == 50


def test_mistakes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "/no/such"]) == 2
    assert "cannot read the trace" in capsys.readouterr().err
    assert main(["inspect", "sharegpt-like", "--window", "5"]) == 2
    assert "START:END" in capsys.readouterr().err


def test_pictures_are_drawn_to_an_eighth() -> None:
    assert bars([0, 1, 8, 16], 2) == ["", "▏", "█", "██"]
    assert heights([0, 1, 8, 16], 2) == ["   █", " ▁██"]
