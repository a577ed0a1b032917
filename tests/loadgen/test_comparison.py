"""Sides under the same requests: who comes when, what is compared with what, and how sure it is."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web
from samples import failed, result
from scripted_upstream import Upstream, requests_at, serve

from loadgen import cli
from loadgen.arguments import parse_arguments
from loadgen.compare_command import compare_live
from loadgen.comparison import compare_rounds, order_of, run_rounds
from loadgen.results import Result
from proxy.sim.workload import ScheduledRequest

pytest_plugins = ("loadgen_fixtures",)


def side(factor: float, *, seed: int = 0, noise: float = 0.0, requests: int = 200) -> list[Result]:
    """Requests whose TTFT differs widely between them, and by ``factor`` between sides."""
    rng, chance = Random(seed), Random(f"{factor}")
    ttfts = [rng.lognormvariate(0, 1) for _ in range(requests)]
    return [
        result(float(i), ttft=factor * t * chance.lognormvariate(0, noise), index=i, gaps=[0.05])
        for i, t in enumerate(ttfts)
    ]


def test_every_side_comes_once_in_every_place() -> None:
    orders = [order_of(["a", "b", "c"], number) for number in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


async def test_sides_take_turns_with_the_same_requests() -> None:
    seen: list[tuple[str, int]] = []

    def serving(name: str) -> Any:
        async def serve(workload: Sequence[ScheduledRequest]) -> list[Result]:
            seen.append((name, len(workload)))
            return []

        return serve

    rounds = [requests_at([0.0]), requests_at([0.0, 1.0])]
    await run_rounds({"a": serving("a"), "b": serving("b")}, rounds, stop=asyncio.Event())
    assert seen == [("a", 1), ("b", 1), ("b", 2), ("a", 2)]


def test_differences_between_requests_are_no_doubt_about_the_difference_between_sides() -> None:
    rounds = [{"a": side(1.0, seed=s), "b": side(0.8, seed=s, noise=0.05)} for s in range(3)]
    found = compare_rounds(rounds, ["a", "b"])["ratios"]["b"]["TTFT p50"]
    low, high = found["interval"]
    assert low <= found["value"] <= high
    assert low == pytest.approx(0.8, abs=0.06)
    assert high == pytest.approx(0.8, abs=0.06)
    assert found["rounds"] == pytest.approx([0.8] * 3, abs=0.08)
    # Without the pairing: two independent draws of the same requests differ by far more.
    apart = [{"a": side(1.0, seed=s), "b": side(0.8, seed=s + 100)} for s in range(3)]
    wide = compare_rounds(apart, ["a", "b"])["ratios"]["b"]["TTFT p50"]["interval"]
    assert wide[1] - wide[0] > 2 * (high - low)


def test_records_are_paired_by_request_and_not_by_order() -> None:
    there = side(1.0)
    found = compare_rounds([{"a": there, "b": list(reversed(there))}], ["a", "b"])["ratios"]["b"]
    assert found["TTFT p90"]["interval"] == [1.0, 1.0]


def test_a_failed_request_counts_on_its_side() -> None:
    rounds = [{"a": [result(index=i) for i in range(10)], "b": [failed(index=i) for i in range(10)]}]
    found = compare_rounds(rounds, ["a", "b"])
    assert found["ratios"]["b"]["attainment"]["value"] == -1.0
    assert found["ratios"]["b"]["TTFT p50"]["value"] is None
    assert found["sides"]["b"]["errors"] == {"http 503": 10}


def test_rates_are_those_of_a_round() -> None:
    one, three = (compare_rounds([{"a": side(1), "b": side(1)}] * n, ["a", "b"])["sides"]["a"] for n in (1, 3))
    assert one["completed_per_s"] == pytest.approx(three["completed_per_s"])


def test_policies_are_compared_in_virtual_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    command = ["compare", "--simulate", "rtx6000ada", "--a", "fcfs", "--b", "mine=gate", "--rate", "2", "--rounds", "2"]
    status = cli.main([*command, "--requests", "60", "--json", str(out), "--html", str(page)])
    assert status == 0
    document = json.loads(out.read_text())
    assert (document["kind"], document["base"], list(document["sides"])) == ("comparison", "fcfs", ["fcfs", "mine"])
    assert document["valid"]
    told = capsys.readouterr().out
    assert "mine / fcfs (95 %)" in told
    assert re.search(r"TTFT p50 of mine over that of fcfs, round by round: [\d.]+, [\d.]+\.", told)
    assert "Comparison" in page.read_text()


async def compare(upstream: Upstream, other: Upstream, *more: str) -> int:
    fixed = ["--rate", "100", "--requests", "6", "--max-output-tokens", "3", "--max-prompt-tokens", "9"]
    return await compare_live(parse_arguments(["compare", *fixed, *more]), {"left": upstream.url, "right": other.url})


async def test_servers_are_compared_with_the_same_requests(upstream: Upstream, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    async with serve() as other:
        status = await compare(upstream, other, "--rounds", "2", "--json", str(out))
    document = json.loads(out.read_text())
    assert status in (0, 1)  # on a busy machine the client may be late, and the comparison not valid
    assert document["config"]["rounds"] == 2
    lengths = [[body["max_tokens"] for body in server.bodies] for server in (upstream, other)]
    assert len(lengths[0]) == 12
    assert lengths[0] == lengths[1]
    prompts = [{tuple(body["prompt"]) for body in server.bodies} for server in (upstream, other)]
    assert not prompts[0] & prompts[1]  # what one side has cached does not help the other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--a", "http://x:1"], "needs two sides"),
        (["a.json"], "compare two reports, or sides"),
        (["a.json", "b.json", "--a", "http://x:1"], "compare two reports, or sides"),
        (["--a", "http://x:1", "--b", "a=http://x:1", "--rate", "1"], "two sides are called 'a'"),
        (["--a", "http://x:1", "--b", "nowhere", "--rate", "1", "--requests", "1"], "'nowhere' is not a URL"),
        (
            ["--simulate", "h100", "--a", "fcfs", "--b", "best", "--rate", "1", "--requests", "1"],
            "unknown policy 'best'",
        ),
        (["--a", "http://x:1", "--b", "http://y:1"], "has no times of its own"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


async def test_a_side_that_completes_nothing_is_no_comparison(
    upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=503)

    async with serve() as other:
        other.script = script
        assert await compare(upstream, other, "--rounds", "1") == 1
    told = capsys.readouterr().out
    assert "right failed 6 x http 503" in told
    assert "Not valid: right completed nothing" in told
