import json
from dataclasses import replace

import pytest

from loadgen import selftest
from loadgen.arguments import parse_arguments
from loadgen.children import running
from loadgen.runner import run_workload, wait_until_ready
from loadgen.selftest import Phase, SelfTest, measure
from loadgen.selftest_command import describe, run_selftest

HALF = Phase(100, 5000, 0, 2.0, 1.0, {"p50": 0.0001, "p99": 0.004, "max": 0.02}, 4500, 60.0)
FOUND = SelfTest(1000.0, 800.0, 20_000.0, 15_000.0, 256, HALF, HALF)


def test_the_client_is_fit_where_requests_leave_in_time_at_half_of_both_ceilings() -> None:
    late = replace(HALF, delay_s={"p50": 0.001, "p99": 0.011, "max": 0.02})
    assert FOUND.fit
    assert not replace(FOUND, at_half_tokens=late).fit
    assert not replace(FOUND, at_half_requests=late).fit


def test_what_is_found_is_told() -> None:
    told = "\n".join(describe(FOUND))
    assert "one process on a core of its own: 1,000 requests/s, 20,000 tokens/s" in told
    assert "at half the tokens (60 requests/s, 3,000 tokens/s): left late by p50 0.10 ms, p99 4.00 ms" in told
    assert "90 % of the tokens were read alone" in told
    assert "too slow" not in told
    document = json.loads(json.dumps(FOUND.document()))
    assert document["at_half"]["tokens"]["schedule_delay_s"]["p99"] == 0.004


def test_the_command_writes_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def measured(seconds: float, tell: object) -> SelfTest:
        assert seconds == 0.5
        return FOUND

    monkeypatch.setattr("loadgen.selftest_command.measure", measured)
    assert run_selftest(parse_arguments(["selftest", "--seconds", "0.5", "--json", "-"])) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_cpu_s"] == 20_000.0


@pytest.mark.e2e
async def test_the_null_server_answers_as_a_server_does() -> None:
    async with running("it", ["loadgen.nullserver", "--step", "0.001"], address=r"(http://\S+)$") as child:
        assert await wait_until_ready([child.address], patience_seconds=5.0) == "null"
        workload = [selftest._request(index, index / 100, 5) for index in range(4)]
        results = await run_workload(workload, [child.address], model="null")
    assert [(r.completed, r.tokens, r.completion_tokens, r.prompt_tokens) for r in results] == [(True, 5, 5, 500)] * 4
    assert all(len(r.chunk_times) == 5 for r in results)


@pytest.mark.e2e
async def test_a_short_selftest_measures_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_MOST_STREAMS", 64)
    told: list[str] = []
    found = await measure(0.1, told.append)
    assert found.requests_per_s > found.at_half_requests.requests > 0
    assert found.tokens_per_s > 0
    assert found.streams == 64
    assert found.at_half_tokens.failed == found.at_half_requests.failed == 0
    assert found.at_half_tokens.delay_s["p99"] is not None
    assert len(told) == 4
