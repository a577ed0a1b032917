import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port
from scripted_upstream import Upstream, answer_in_full, start_stream, token

from loadgen import cli
from loadgen.arguments import parse_arguments

pytest_plugins = ("loadgen_fixtures",)

DOWN = "http://127.0.0.1:1"


async def run(upstream: Upstream, *more: str, requests: int = 5) -> int:
    # Clipped to little, so that a request takes no time; at 200 per second the run takes none either.
    fixed = ["--url", upstream.url, "--rate", "200", "--requests", str(requests), "--max-output-tokens", "3"]
    return await cli.run_command(parse_arguments(["run", *fixed, *more]))


def read(path: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(path).read_text())
    return document


async def test_a_run_reports_in_json_and_in_tables(
    upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    status = await run(upstream, "--json", str(out), "--max-prompt-tokens", "100", "--seed", "7")
    document = json.loads(out.read_text())
    assert status == (0 if document["valid"] else 1)
    assert document["counts"]["completed"] == 5
    assert document["counts"]["clipped"] == 5
    assert document["trace"] == {"name": "sharegpt-like", "rows_read": 20_000, "rows_dropped": {}, "sha256": None}
    config = document["config"]
    assert (config["model"], config["api"], config["seed"]) == ("tiny", "completions", 7)
    assert [c["name"] for c in config["classes"]] == ["strict", "relaxed"]
    told = capsys.readouterr()
    assert "TTFT of" in told.out
    assert "5 of 5 requests had a length over the limit" in told.out
    assert "done 5, failed 0" in told.err
    assert all(len(body["prompt"]) <= 100 and body["max_tokens"] <= 3 for body in upstream.bodies)


async def test_send_class_reaches_every_request(upstream: Upstream) -> None:
    await run(upstream, "--class", "gold:1:tbt=0.1", "--json", "-")
    assert not any("x-slo-class" in request.headers for request in upstream.requests)
    upstream.requests.clear()
    await run(upstream, "--class", "gold:1:tbt=0.1", "--json", "-", "--send-class")
    assert [request.headers["x-slo-class"] for request in upstream.requests] == ["gold"] * 5


async def test_json_on_standard_output_stands_alone(upstream: Upstream, capsys: pytest.CaptureFixture[str]) -> None:
    await run(upstream, "--json", "-")
    told = capsys.readouterr()
    assert json.loads(told.out)["counts"]["sent"] == 5
    assert "TTFT of" in told.err


async def test_lengths_of_a_file_are_scaled_and_its_bad_rows_told(
    upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n40,2\n40,2\n0,2\n")
    await run(upstream, "--trace", str(trace), "--scale-lengths", "0.5", "--json", str(tmp_path / "out.json"))
    assert {len(body["prompt"]) for body in upstream.bodies} == {20}
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["trace"]["rows_dropped"] == {"empty prompt or output": 1}
    assert len(document["trace"]["sha256"]) == 64
    assert "1 of 3 rows left out: 1 x empty prompt or output" in capsys.readouterr().err


async def test_a_run_where_everything_fails_has_status_1(
    upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=503)

    upstream.script = script
    assert await run(upstream) == 1
    assert "Failed: 5 x http 503" in capsys.readouterr().out


async def test_ctrl_c_ends_the_run_and_reports_it(upstream: Upstream, capsys: pytest.CaptureFixture[str]) -> None:
    never = asyncio.Event()

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(upstream.bodies) < 3:
            return await answer_in_full(request, body)
        response = await start_stream(request)
        await response.write(token())
        signal.raise_signal(signal.SIGINT)
        await never.wait()
        return response

    upstream.script = script
    # One in a thousand seconds: without the signal this would last for hours.
    arguments = ["run", "--url", upstream.url, "--rate", "0.001", "--time-scale", "100000", "--requests", "3"]
    arguments += ["--timeout", "100000000"]  # of the run's own seconds
    status = await cli.run_command(parse_arguments([*arguments, "--max-output-tokens", "3", "--json", "-"]))
    never.set()
    document = json.loads(capsys.readouterr().out)
    assert status == 130
    assert document["interrupted"]
    assert document["counts"]["sent"] == 3
    assert document["metrics"]["errors"] == {"unfinished": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["run", "--rate", "1", "--requests", "1"], "--url"),
        (["run", "--url", "localhost:8000", "--rate", "1", "--requests", "1"], "'localhost:8000' is not a URL"),
        (["run", "--url", "http://a:b", "--rate", "1", "--requests", "1"], "is not a URL"),
        (["run", "--url", DOWN, "--rate", "0", "--requests", "1"], "'0' is not a positive number"),
        (["run", "--url", DOWN, "--rate", "fast", "--requests", "1"], "'fast' is not a positive number"),
        (["run", "--url", DOWN, "--rate", "1", "--requests", "1.5"], "'1.5' is not a positive whole number"),
        (["run", "--url", DOWN, "--rate", "1", "--requests", "1", "--class", "gold"], "NAME:SHARE"),
        (
            ["run", "--url", DOWN, "--rate", "1", "--requests", "1", "--class", "a:0.5"],
            "must not be negative and add up to 1",
        ),
        (
            ["run", "--url", DOWN, "--rate", "1", "--requests", "1", "--class", "a:0.5", "--class", "a:0.5:tbt=1"],
            "same name",
        ),
        (
            ["run", "--url", DOWN, "--rate", "1", "--requests", "1", "--class", "a:1:weight=2"],
            "weight is the proxy's affair: give it in its configuration",
        ),
        (["run", "--url", DOWN, "--rate", "1", "--requests", "1", "--trace", "none.csv"], "cannot read the trace"),
        (["run", "--url", DOWN, "--rate", "1", "--requests", "1", "--json", "no/such/place.json"], "cannot write to"),
        (["compare", "none.json", "none.json"], "cannot read none.json"),
    ],
)
def test_wrong_usage_is_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_a_server_that_is_down_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    assert cli.main(["run", "--url", url, "--rate", "1", "--requests", "1", "--wait", "0.1"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"slai-loadgen: {url} is not ready")
    assert told.count("\n") == 1


def test_a_v1_at_the_end_of_a_url_is_understood() -> None:
    arguments = parse_arguments(["run", "--url", "http://a:1/v1/,https://b/base/", "--rate", "1", "--requests", "1"])
    assert arguments.url == ["http://a:1", "https://b/base"]


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_is_no_failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    assert "slai-loadgen" in capsys.readouterr().out


async def test_two_reports_are_compared(upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, other = (str(tmp_path / name) for name in ("direct.json", "proxy.json", "other.json"))
    for out, seed in ((a, "0"), (b, "0"), (other, "1")):
        await run(upstream, "--json", out, "--seed", seed)
    valid = all(read(out)["valid"] for out in (a, b))
    capsys.readouterr()
    assert cli.main(["compare", a, b]) == (0 if valid else 1)
    told = capsys.readouterr()
    assert "proxy / direct" in told.out
    assert "different workloads" not in told.err
    cli.main(["compare", a, other])
    assert "different workloads" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["no json", "[]", "{}", '{"schema_version": 1}', '{"schema_version": 2}'])
def test_another_file_is_no_report(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert cli.main(["compare", str(path), str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


async def test_a_plan_is_sent_as_it_stands(
    upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "load.jsonl.gz")
    wanted = ["--rate", "200", "--requests", "6", "--seed", "3", "--class", "gold:1:tbt=0.1"]
    clipped = ["--max-prompt-tokens", "50", "--max-output-tokens", "3"]
    assert cli.main(["plan", *wanted, *clipped, "--out", path]) == 0
    told = capsys.readouterr().out
    assert "6 requests in" in told
    assert "arrivals per second, coefficient of variation" in told
    digests = []
    for arguments in (["--trace", path], [*wanted, *clipped]):
        command = ["run", "--url", upstream.url, *arguments, "--json", str(tmp_path / "out.json")]
        await cli.run_command(parse_arguments(command))
        config = read(str(tmp_path / "out.json"))["config"]
        digests.append(config["schedule_sha256"])
        assert [c["name"] for c in config["classes"]] == ["gold"]
    assert digests[0] == digests[1]
    assert digests[0] in told
    assert [len(b["prompt"]) for b in upstream.bodies[:6]] == [len(b["prompt"]) for b in upstream.bodies[6:]]


async def test_a_trace_comes_at_its_own_times_without_a_rate(upstream: Upstream, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,prompt_tokens,output_tokens\n0,40,2\n1,41,2\n2,42,2\n9,43,2\n")
    arguments = ["--trace", str(trace), "--speedup", "20", "--window", ":5", "--json", str(tmp_path / "out.json")]
    await cli.run_command(parse_arguments(["run", "--url", upstream.url, *arguments]))
    document = read(str(tmp_path / "out.json"))
    assert document["counts"]["sent"] == 3
    assert document["config"]["origin"]["arrivals"] == "trace"
    assert document["config"]["planned_arrivals"] == {"mean_per_s": pytest.approx(20.0), "interval_cv": 0.0}
    assert document["metrics"]["offered_per_s"] == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "sharegpt-like"], "has no times of its own: give a --rate or a --concurrency"),
        (["--rate", "1"], "say how many --requests"),
        (["--rate", "1@x", "--requests", "1"], "a rate is"),
        (["--rate", "1", "--requests", "1", "--arrivals", "gamma"], "arrivals are"),
        (["--concurrency", "2", "--requests", "4", "--tenants", "a=1"], "a closed loop has none"),
        (["--rate", "1", "--requests", "1", "--share-prefix", "x"], "'x' is not a positive whole number"),
    ],
)
def test_loads_that_cannot_be_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--url", DOWN, *arguments]) == 2
    assert message in capsys.readouterr().err


async def test_a_key_is_taken_from_the_environment_and_never_told(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    await run(upstream, "--api-key-env", "MY_KEY", "--standard-only", "--json", "-")
    assert {request.headers["Authorization"] for request in upstream.requests} == {"Bearer sk-secret"}
    assert not any("ignore_eos" in body for body in upstream.bodies)
    told = capsys.readouterr()
    assert "sk-secret" not in told.out + told.err
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match="no environment variable MY_KEY"):
        await run(upstream, "--api-key-env", "MY_KEY")


async def test_chats_of_a_server_that_does_not_count_tokens_are_of_about_the_length(
    upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    await run(upstream, "--api", "chat", "--max-prompt-tokens", "20")
    assert "prompts are of about the lengths asked for" in capsys.readouterr().err
    assert {len(body["messages"][0]["content"].split()) for body in upstream.bodies} <= set(range(1, 21))
