"""``slai-proxy replay`` as a user meets it."""

import json
from pathlib import Path

import pytest

from proxy.cli import main


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``slai-proxy simulate`` has written of one run."""
    path = tmp_path_factory.mktemp("logs") / "decisions.jsonl"
    arguments = ("--policy", "gate", "--rate", "1.6", "--requests", "40", "--seeds", "1", "--jobs", "1")
    assert main(("simulate", *arguments, "--decision-log", str(path))) == 0
    return path


def replay(*arguments: object) -> int:
    return main(("replay", *map(str, arguments)))


def test_all_is_reproduced(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(log) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(" events, 40 decisions: all reproduced\n")


def test_the_first_difference_is_shown_with_what_led_to_it(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tmp_path / "log"
    changed.write_text(log.read_text().replace('"engine_id":"engine-0"}]', '"engine_id":"engine-9"}]'))
    assert replay(changed) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{changed}:3: another decision at ")
    assert "Arrived(request=Request(id='0'" in lines[0]
    assert lines[1:4] == ["  logged:   dispatch 0 engine-9", "  replayed: dispatch 0 engine-0", "before it:"]
    assert lines[4].startswith(f"  {changed}:2: 0.000000 EngineUp(")


def test_the_life_of_one_request(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(log, "--explain", "7") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["request_id"], told["stage"]) == ("7", "ended")
    assert [moment["what"] for moment in told["moments"]] == ["queued", "dispatched"]
    assert told["moments"][1]["cause"]


def test_a_log_cut_off_and_of_another_version_is_replayed_with_a_remark(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "log"
    other.write_text(log.read_text().replace('"proxy":"', '"proxy":"9.', 1)[:-3])
    assert replay(other) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("written by slai-proxy 9.")
    assert lines[1].startswith("the last line is cut off")
    assert lines[2].endswith("all reproduced")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("hello\n", "no decision log"), ("{}\n", "no decision log")],
)
def test_what_cannot_be_read_is_told_in_a_line(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    if content is not None:
        path.write_text(content)
    assert replay(path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("slai-proxy replay: ")
    assert words in line


def test_a_request_that_is_not_there(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(log, "--explain", "400") == 2
    assert capsys.readouterr().err == (
        "slai-proxy replay: no request '400' in the log: it knows the proxy's own numbers "
        '("request_id" in /debug/requests/ID), here 0 to 39\n'
    )


def test_what_a_log_cannot_know_is_not_told(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(log, "--explain", "7") == 0
    told = json.loads(capsys.readouterr().out)
    assert not {"client_id", "tokens", "tbt_max_seconds", "missed", "outcome", "reason"} & told.keys()
    assert list(told["stage_seconds"]) == ["body", "queue", "engine"]
    # As long as a request goes on, its tokens may have come or not.
    begun = tmp_path / "log"
    lines = log.read_text().splitlines(keepends=True)
    dispatched = next(number for number, line in enumerate(lines) if '"type":"Dispatch"' in line)
    begun.write_text("".join(lines[: dispatched + 1]))
    assert replay(begun, "--explain", "0") == 0
    assert json.loads(capsys.readouterr().out)["stage"] == "at its engine"


def test_abbreviated_flags_are_not_understood(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        replay(log, "--expl", "7")
    assert caught.value.code == 2
    assert "--expl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "gate", "--seeds", "1,2"), "one run"),
        (("--policy", "fcfs", "--seeds", "1"), "with a proxy"),
        (("--policy", "gate", "--seeds", "1", "--decision-log", "/no/such/place"), "cannot write /no/such/place"),
    ],
)
def test_a_simulation_writes_the_log_of_one_run(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    assert main(("simulate", "--rate", "1", "--requests", "5", "--decision-log", str(path), *arguments)) == 2
    assert words in capsys.readouterr().err
    assert not path.exists()
