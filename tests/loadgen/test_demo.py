import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadgen import cli, demo
from loadgen.children import Child, running
from loadgen.demo import DIRECT, PROXY, DemoPlan, Outcome, run_demo
from loadgen.demo_text import show_introduction, show_outcome
from loadgen.runner import run_workload
from proxy.sim.records import RequestRecord
from proxy.sim.workload import ScheduledRequest

TINY = DemoPlan(rate=40, requests=24, speed=40, seed=3)
RATIO = "proxy / direct"


def told(outcome: Outcome, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_introduction(outcome.plan, console)
    show_outcome(outcome, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that a demonstration has started."""
    pids: list[int] = []

    @asynccontextmanager
    async def noting(name: str, arguments: Sequence[str], *, address: str) -> AsyncIterator[Child]:
        async with running(name, arguments, address=address) as child:
            pids.append(child.process.pid)
            yield child

    monkeypatch.setattr(demo, "running", noting)
    return pids


def alive(pids: list[int]) -> list[int]:
    def is_alive(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    return list(filter(is_alive, pids))


@pytest.mark.e2e
def test_both_sides_are_measured_and_predicted(
    tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLAI_ORDER", "nonsense")  # a setting for the user's own proxy
    out = tmp_path / "out.json"
    options = ["--rate", "40", "--requests", "24", "--speed", "40", "--seed", "3", "--json", str(out)]
    status = cli.main(["demo", *options])
    document = json.loads(out.read_text())
    assert status == (0 if document["valid"] else 1)  # the client may be late on a busy machine
    for kind in ("live", "simulated"):
        assert [document[kind][side]["counts"]["completed"] for side in (DIRECT, PROXY)] == [24, 24]
        assert all(document[kind][side]["counts"]["short_outputs"] == 0 for side in (DIRECT, PROXY))
    assert len(pids) == 2
    assert not alive(pids)
    shown = capsys.readouterr()
    assert shown.out.count(RATIO) == 2
    assert "Next:\n" in shown.out
    assert shown.err.startswith("slai-proxy demo: 24 requests")
    assert "[2/3] through the proxy" in shown.err


@pytest.mark.e2e
@pytest.mark.parametrize("when", ["start", DIRECT, PROXY, "simulator"])
def test_ctrl_c_ends_every_process_and_shows_what_there_is(
    when: str, pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    sides = iter((DIRECT, PROXY))

    async def run(workload: Sequence[ScheduledRequest], urls: Sequence[str], **more: Any) -> Sequence[RequestRecord]:
        if next(sides) == when:
            asyncio.get_running_loop().call_soon(interrupt)
        return await run_workload(workload, urls, **more)

    monkeypatch.setattr(demo, "run_workload", run)

    async def never_ready(*_: object, **__: object) -> str:
        interrupt()
        return await asyncio.sleep(600, "never")

    if when == "start":
        monkeypatch.setattr(demo, "wait_until_ready", never_ready)
    if when == "simulator":
        monkeypatch.setattr(demo, "simulate", interrupt)
    outcome = run_demo(TINY, quiet())
    assert outcome.interrupted
    assert outcome.failure is None
    assert len(pids) == 2
    assert not alive(pids)
    assert list(outcome.live) == {"start": [], DIRECT: [DIRECT]}.get(when, [DIRECT, PROXY])
    text = told(outcome)
    assert ("Measured" in text) == (when != "start")
    assert (RATIO in text) == (when in (PROXY, "simulator"))
    assert ("not valid: interrupted before its end" in text.replace("\n", " ")) == (when in (DIRECT, PROXY))
    assert "Predicted" not in text
    json.dumps(outcome.document(), allow_nan=False)


@pytest.mark.e2e
def test_a_process_that_dies_at_start_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pids: list[int]
) -> None:
    monkeypatch.setattr(demo, "_proxy_arguments", lambda *_: ["proxy", "serve", "--policy", "longest"])
    assert cli.main(["demo", "--requests", "5"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "slai-loadgen: the proxy ended with status 2; the last that it said:\n" in shown.err
    assert "policy (flag)" in shown.err
    assert len(pids) == 1
    assert not alive(pids)


@pytest.mark.e2e
def test_a_process_that_dies_under_load_ends_the_demonstration(
    monkeypatch: pytest.MonkeyPatch, pids: list[int]
) -> None:
    async def run(workload: Sequence[ScheduledRequest], urls: Sequence[str], **more: Any) -> Sequence[RequestRecord]:
        if len(urls) == 1:  # the proxy's
            asyncio.get_running_loop().call_soon(os.kill, pids[1], signal.SIGKILL)
        return await run_workload(workload, urls, **more)

    monkeypatch.setattr(demo, "run_workload", run)
    outcome = run_demo(TINY, quiet())
    assert outcome.failure is not None
    assert outcome.failure.startswith("the proxy was ended by signal 9")
    assert not outcome.interrupted
    assert not outcome.valid
    assert not alive(pids)


def test_the_proxy_gets_its_seconds_in_real_time() -> None:
    words = demo._proxy_arguments(DemoPlan(speed=4), "http://a,http://b")
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert (options["--aging-seconds"], options["--max-wait-seconds"]) == ("0.75", "15.0")
    assert options["--engines"] == "http://a,http://b"


@pytest.fixture
def outcome() -> Outcome:
    """Of a measurement that is just like its prediction."""
    outcome = Outcome(TINY)
    for side, median in ((DIRECT, 1.0), (PROXY, 0.6)):
        for kind in (outcome.live, outcome.simulated):
            kind[side] = TINY.document([])
            kind[side]["metrics"] |= {
                "ttft_s": {"p50": median, "p90": 2 * median, "p99": 3 * median},
                "tbt_s": {"strict": {"p50": 0.05, "p99": 0.08}, "relaxed": {"p50": 0.05, "p99": 0.08}},
            }
    return outcome


def test_the_text_compares_with_the_prediction_and_fits_80_columns(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", str)
    outcome.simulated[PROXY]["metrics"]["ttft_s"]["p50"] = 0.62
    text = told(outcome)
    assert "was 0.60 times that of the direct run (predicted: 0.62)" in text.replace("\n", " ")
    assert "100 ms (strict), 500 ms (relaxed)" in text.replace("\n", " ")
    assert "Far from" not in text
    assert "  slai-loadgen run --help   " in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_a_busy_machine_has_spoiled_is_told(outcome: Outcome) -> None:
    outcome.live[PROXY]["metrics"]["tbt_s"]["strict"]["p99"] = 0.1
    assert "Far from the prediction: TBT p99 strict (proxy) by +25%." in told(outcome).replace("\n", " ")


def test_an_attainment_far_from_the_prediction_is_told_too(outcome: Outcome) -> None:
    for kind, strict in ((outcome.live, 0.43), (outcome.simulated, 0.82)):
        for side in (DIRECT, PROXY):
            kind[side]["metrics"]["attainment"] = {"strict": 0.8, "relaxed": None}
        kind[PROXY]["metrics"]["attainment"]["strict"] = strict
    text = told(outcome).replace("\n", " ")
    assert "Far from the prediction: attainment strict (proxy) 43% instead of 82%." in text
    outcome.live[PROXY]["metrics"]["attainment"]["strict"] = 0.75
    assert "Far from" not in told(outcome)


def test_nothing_is_concluded_from_nothing(outcome: Outcome) -> None:
    outcome.live[DIRECT]["metrics"]["ttft_s"]["p50"] = None
    assert "Look at" not in told(outcome)
