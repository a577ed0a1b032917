"""The comparison of fleets with one proxy: its table, and that it says what it needs."""

from typing import Any

import pytest
from rich.console import Console

from fleet.live import parse_arguments, table


def run(side: str, number: int, ttft: float) -> dict[str, Any]:
    return {
        "side": side,
        "round": number,
        "load": [0.5, 1.0],
        "completed": 9,
        "ttft_s": {"p50": ttft, "p99": 2 * ttft},
        "tbt_s": {"relaxed": {"p99": 0.2}, "strict": {"p99": 0.1}},
        "tokens_per_s": 100.0,
    }


def test_a_side_is_set_against_the_first_round_by_round() -> None:
    console = Console(width=200, record=True)
    console.print(table([run("1", 0, 1.0), run("1", 1, 2.0), run("4", 0, 1.1), run("4", 1, 2.0)]))
    text = console.export_text()
    assert "1.1 / 2" in text
    assert "+5.0% (+0.0% to +10.0%)" in text
    assert "TBT p99, strict" in text


def test_a_rate_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fleet.live"])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "--rate is needed" in capsys.readouterr().err
