"""``slai-loadgen capacity``: in virtual time, and on a server that a script plays."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scripted_upstream import Upstream, answer_in_full

from loadgen import cli
from loadgen.arguments import parse_arguments
from loadgen.capacity import Measurement, search_live
from loadgen.capacity_command import run_capacity
from loadgen.load import SearchedLoad
from loadgen.planning import Demand
from loadgen.progress import PlainDisplay
from loadgen.servers import LiveServer
from loadgen.slo import parse_slo
from loadgen.statefile import StateError, StateFile
from loadgen.traces import RowTrace, load
from proxy.sim.search import Finding, Margin, Outcome, SearchPlan, Trial

pytest_plugins = ("loadgen_fixtures",)

SIMULATED = ["capacity", "--simulate", "rtx6000ada", "--requests", "60", "--jobs", "1", "--seeds", "2"]
SLO = ["--slo", "ttft_p50<=0.5s, tbt_p99[strict]<=100ms"]


def test_a_simulated_capacity_is_found_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    more = ["--json", str(out), "--html", str(page), "--tolerance", "0.2", "--scale-lengths", "0.3"]
    assert cli.main([*SIMULATED, *SLO, *more]) == 0
    document = json.loads(out.read_text())
    found = document["capacity"]
    assert document["kind"] == "capacity"
    assert document["valid"]
    assert found["kept_at"] < found["broken_at"] <= 1.2 * found["kept_at"]
    assert found["complete"]
    assert found["breaks"]
    assert [point["kept"] for point in found["points"]] == sorted((p["kept"] for p in found["points"]), reverse=True)
    told = capsys.readouterr()
    assert f"Capacity: {found['estimate']:.4g} requests per second" in told.out
    assert "seed 0: " in told.err
    assert "Figure over its limit" in page.read_text()


def test_an_interrupted_search_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, out = str(tmp_path / "state.jsonl"), tmp_path / "out.json"
    command = [*SIMULATED, *SLO, "--scale-lengths", "0.3", "--tolerance", "0.3"]
    assert cli.main([*command, "--json", str(out)]) == 0
    whole = json.loads(out.read_text())["capacity"]

    real, left = StateFile.add, [3]

    def interrupted(self: StateFile, finding: Finding) -> None:
        real(self, finding)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "add", interrupted)
        assert cli.main([*command, "--state", state, "--json", str(out)]) == 130
    partial = json.loads(out.read_text())
    assert (partial["interrupted"], partial["capacity"]["runs"], partial["capacity"]["complete"]) == (True, 3, False)
    assert "the same command goes on" in capsys.readouterr().out
    assert cli.main([*command, "--state", state, "--json", str(out)]) == 0
    told = capsys.readouterr().err
    assert "going on from 3 finished runs" in told
    assert told.count(" req/s, seed ") == whole["runs"] - 3
    assert json.loads(out.read_text())["capacity"] == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo", "ttft_p50<=0.5"], "a latency has a unit"),
        (["--slo", "tbt_p99[gold]<=1s"], "no class is named 'gold'"),
        ([*SLO, "--url", "http://127.0.0.1:1"], "give one of them"),
        ([*SLO, "--policy", "best"], "unknown policy 'best'"),
        ([*SLO, "--arrivals", "trace"], "a search chooses the rate"),
        ([*SLO, "--trace", "none.csv"], "cannot read"),
        ([*SLO, "--html", "no/such/place.html"], "--html: cannot write"),
        ([*SLO, "--class", "a:1:tbt=1"], "no class is named 'strict'"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SIMULATED, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_capacity_out_of_range_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SIMULATED, *SLO, "--start", "0.1", "--highest", "0.1"]) == 1
    assert "all limits hold even at 0.1 req/s" in capsys.readouterr().out


def finding(rate: float) -> Finding:
    return Finding(Trial(rate, 1), {"ttft_p50": Margin(0.4, -0.2, 0.05)}, figures={"attainment": None})


def test_findings_come_back_from_the_disk_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "state"
    StateFile(path, {"slo": "a"}).add(finding(1.0))
    assert StateFile(path, {"slo": "a"}).findings == {Trial(1.0, 1): finding(1.0)}


def test_the_state_of_another_search_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "state"
    StateFile(path, {"slo": "a", "requests": 1})
    with pytest.raises(StateError, match=r'of another search: slo \("a" then, "b" now\)'):
        StateFile(path, {"slo": "b", "requests": 1})
    path.write_text("something else\n")
    with pytest.raises(StateError, match="is no state of a search"):
        StateFile(path, {})


def test_a_line_cut_short_by_a_crash_is_left_aside(tmp_path: Path) -> None:
    path = tmp_path / "state"
    StateFile(path, {}).add(finding(1.0))
    path.write_text(path.read_text() + '{"trial": {"rate": 2')
    state = StateFile(path, {})
    assert list(state.findings) == [Trial(1.0, 1)]
    state.add(finding(2.0))
    assert list(StateFile(path, {}).findings) == [Trial(1.0, 1), Trial(2.0, 1)]


@pytest.fixture(scope="module")
def measurement() -> Measurement:
    trace = load("sharegpt-like")
    assert isinstance(trace, RowTrace)
    demand = Demand(requests=40, max_prompt_tokens=10, max_output_tokens=2)
    return Measurement(SearchedLoad(trace, demand), parse_slo("completed>=90%"))


async def search(upstream: Upstream, plan: SearchPlan, how: Measurement, stop: asyncio.Event) -> tuple[Any, Any]:
    from contextlib import nullcontext
    from io import StringIO

    from rich.console import Console

    findings: dict[Trial, Finding] = {}
    display = PlainDisplay(Console(file=StringIO()))
    outcome = await search_live(
        plan,
        findings,
        how,
        LiveServer((upstream.url,), "tiny"),
        lambda _: None,
        stop=stop,
        display=lambda: nullcontext(display),
    )
    return outcome, findings


async def test_a_server_that_refuses_beyond_a_rate_has_that_capacity(
    upstream: Upstream, measurement: Measurement
) -> None:
    loop, last = asyncio.get_running_loop(), [0.0]

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        # A crude rate limiter: a bucket of ten that fills at 300 per second.
        now = loop.time()
        last[0] = max(last[0], now - 10 / 300) + 1 / 300
        return web.Response(status=429) if last[0] > now else await answer_in_full(request, body)

    upstream.script = script
    plan = SearchPlan(100.0, (1,), 1, tolerance=0.9)
    outcome, findings = await search(upstream, plan, measurement, asyncio.Event())
    assert isinstance(outcome, Outcome)
    assert outcome.breaks == ("completed",)
    assert outcome.kept_at is not None
    assert 100 <= outcome.kept_at < 1200
    assert len(findings) >= 2


async def test_a_stopped_search_keeps_whole_runs_only(upstream: Upstream, measurement: Measurement) -> None:
    stop = asyncio.Event()

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(upstream.bodies) == 60:
            stop.set()
        return await answer_in_full(request, body)

    upstream.script = script
    outcome, findings = await search(upstream, SearchPlan(400.0, (1, 2), 2), measurement, stop)
    assert outcome is None
    assert len(findings) == 1


def test_capacity_has_a_help_that_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["capacity", "--help"]) == 0
    assert "ttft_p50<=0.5s" in capsys.readouterr().out
    assert parse_arguments([*SIMULATED, *SLO]).slo == SLO[1]
    assert callable(run_capacity)
