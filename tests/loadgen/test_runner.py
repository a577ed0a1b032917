import asyncio
from array import array
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port
from scripted_upstream import Upstream, answer_in_full, requests_at, serve, start_stream, token

from loadgen.runner import Counts, NotReadyError, run_workload, shown_gaps, wait_until_ready

pytest_plugins = ("loadgen_fixtures",)


async def test_a_blocked_request_does_not_hold_up_the_next(upstream: Upstream) -> None:
    last_has_come = asyncio.Event()

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(upstream.bodies) == 3:
            last_has_come.set()
        await last_has_come.wait()
        return await answer_in_full(request, body)

    upstream.script = script
    records = await run_workload(requests_at([0.0, 0.01, 0.02]), [upstream.url], model="tiny")
    assert [r.completed for r in records] == [True] * 3
    assert [r.request.index for r in records] == [0, 1, 2]


async def test_any_number_of_requests_is_in_flight_at_once(upstream: Upstream) -> None:
    all_have_come = asyncio.Event()

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(upstream.bodies) == 150:  # aiohttp's own limit would be 100.
            all_have_come.set()
        await all_have_come.wait()
        return await answer_in_full(request, body)

    upstream.script = script
    records = await run_workload(requests_at([0.0] * 150), [upstream.url], model="tiny", timeout_seconds=30.0)
    assert sum(r.completed for r in records) == 150


async def test_no_request_leaves_before_its_time(upstream: Upstream) -> None:
    records = await run_workload(requests_at([0.005, 0.02, 0.021, 0.05]), [upstream.url], model="tiny")
    assert all(r.sent_at is not None and r.sent_at >= r.request.at_seconds for r in records)


async def test_servers_take_turns(upstream: Upstream) -> None:
    async with serve() as other:
        await run_workload(requests_at([0.0] * 5), [upstream.url, other.url], model="tiny")
        assert (len(upstream.bodies), len(other.bodies)) == (3, 2)


async def test_a_scaled_run_is_told_in_its_own_time(upstream: Upstream) -> None:
    # Half an hour in the run's time.
    loop = asyncio.get_running_loop()
    started = loop.time()
    records = await run_workload(requests_at([0.0, 1800.0]), [upstream.url], model="tiny", time_scale=20_000.0)
    assert loop.time() - started < 60
    assert all(r.completed for r in records)
    sent_at, finished_at = records[1].sent_at, records[1].finished_at
    assert sent_at is not None
    assert finished_at is not None
    assert 1800.0 <= sent_at < finished_at


async def test_a_stopped_run_keeps_what_it_has_measured(upstream: Upstream) -> None:
    stop, never = asyncio.Event(), asyncio.Event()

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(upstream.bodies) == 1:
            return await answer_in_full(request, body)
        response = await start_stream(request)
        await response.write(token())
        stop.set()
        await never.wait()
        return response

    upstream.script = script
    records = await run_workload(requests_at([0.0, 0.2, 1e6]), [upstream.url], model="tiny", stop=stop)
    never.set()
    assert [r.error for r in records] == [None, "unfinished"]
    assert records[0].completed
    assert records[1].finished_at is not None


async def test_a_run_stopped_before_its_first_request_is_empty() -> None:
    stop = asyncio.Event()
    stop.set()
    assert await run_workload(requests_at([0.0, 1e6]), ["http://127.0.0.1:1"], model="tiny", stop=stop) == []


async def test_a_display_sees_every_request_end(upstream: Upstream) -> None:
    class Recorder:
        interval_seconds = 0.001
        seen: Counts | None = None

        def show(self, counts: Counts) -> None:
            assert counts.running == counts.sent - counts.completed - counts.failed >= 0
            self.seen = counts

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(upstream.bodies) == 2:
            return web.Response(status=500)
        return await answer_in_full(request, body)

    upstream.script = script
    recorder = Recorder()
    await run_workload(requests_at([0.0, 0.01, 0.02]), [upstream.url], model="tiny", progress=recorder)
    assert recorder.seen is not None
    assert (recorder.seen.sent, recorder.seen.completed, recorder.seen.failed) == (3, 2, 1)
    assert len(recorder.seen.ttfts) == 2
    assert recorder.seen.seconds > 0


def test_a_display_gets_few_gaps_of_each_request() -> None:
    assert shown_gaps(array("d", [0.1, 0.2])).tolist() == [0.1, 0.2]
    assert shown_gaps(array("d")).tolist() == []
    many = shown_gaps(array("d", range(1000)))
    assert 16 <= len(many) <= 32
    assert many[-1] > 900


async def test_the_model_is_the_one_that_the_server_lists(upstream: Upstream) -> None:
    assert await wait_until_ready([upstream.url], patience_seconds=1.0) == "tiny"
    assert await wait_until_ready([upstream.url], patience_seconds=1.0, model="mine") == "mine"


async def test_a_server_that_starts_is_waited_for(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.runner._POLL_SECONDS", 0.001)
    answers = iter([web.Response(status=503), web.json_response({"data": []})])
    ready = upstream.models
    upstream.models = lambda: next(answers, None) or ready()
    told: list[str] = []
    assert await wait_until_ready([upstream.url], patience_seconds=30.0, on_wait=told.append) == "tiny"
    assert told == [f"{upstream.url}: GET /v1/models answered 503"]


async def test_a_server_that_wants_a_key_is_not_waited_for(upstream: Upstream) -> None:
    upstream.models = lambda: web.Response(status=401)
    with pytest.raises(NotReadyError, match=r"answered 401.*--api-key-env"):
        await wait_until_ready([upstream.url], patience_seconds=1e9)


async def test_a_server_that_is_down_is_named(upstream: Upstream) -> None:
    down = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(NotReadyError, match=rf"{down} is not ready after 0\.1 s: cannot connect"):
        await wait_until_ready([upstream.url, down], patience_seconds=0.1)


async def test_a_server_of_another_kind_is_told_apart(upstream: Upstream) -> None:
    upstream.models = lambda: web.Response(text="<html>")
    with pytest.raises(NotReadyError, match="lists no model"):
        await wait_until_ready([upstream.url], patience_seconds=0.1)


async def test_two_servers_with_different_models_need_a_choice(upstream: Upstream) -> None:
    async with serve() as other:
        other.models = lambda: web.json_response({"data": [{"id": "huge"}]})
        urls = [upstream.url, other.url]
        with pytest.raises(NotReadyError, match="--model"):
            await wait_until_ready(urls, patience_seconds=0.1)
        assert await wait_until_ready(urls, patience_seconds=0.1, model="tiny") == "tiny"


async def test_a_turn_waits_for_the_answer_before_and_for_its_user(upstream: Upstream) -> None:
    first, second, third, alone = requests_at([0.0, 0.0, 0.0, 0.01])
    workload = [first, replace(second, after=0, think_seconds=0.03), replace(third, after=1), alone]
    records = await run_workload(workload, [upstream.url], model="tiny")
    by_index = {r.request.index: r for r in records}
    assert len(records) == 4
    assert all(r.completed for r in records)
    for index, think in ((1, 0.03), (2, 0.0)):
        ended, due = by_index[index - 1].finished_at, by_index[index].request.at_seconds
        assert ended is not None
        assert due == ended + think
        sent, ttft = by_index[index].sent_at, by_index[index].ttft_seconds
        assert sent is not None
        assert ttft is not None
        assert due <= sent < due + ttft  # counted from when it was due


async def test_a_turn_comes_also_after_a_failure_and_not_before_its_time(upstream: Upstream) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(upstream.bodies) == 1:
            return web.Response(status=503)
        return await answer_in_full(request, body)

    upstream.script = script
    first, second = requests_at([0.0, 0.05])
    records = await run_workload([first, replace(second, after=0)], [upstream.url], model="tiny")
    assert [r.error for r in records] == ["http 503", None]
    assert records[1].request.at_seconds == 0.05


async def test_users_of_a_closed_loop_never_have_two_requests_at_a_time(upstream: Upstream) -> None:
    running = most = 0
    all_have_come = asyncio.Event()

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            all_have_come.set()
        await all_have_come.wait()
        running -= 1  # before the answer, upon whose end the next one comes
        return await answer_in_full(request, body)

    upstream.script = script
    workload = [replace(r, after=r.index - 3 if r.index >= 3 else None) for r in requests_at([0.0] * 30)]
    records = await run_workload(workload, [upstream.url], model="tiny")
    assert sum(r.completed for r in records) == 30
    assert most == 3


async def test_a_stop_ends_who_thinks(upstream: Upstream) -> None:
    stop = asyncio.Event()
    first, second = requests_at([0.0, 0.0])

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asyncio.get_running_loop().call_later(0.05, stop.set)
        return await answer_in_full(request, body)

    upstream.script = script
    workload = [first, replace(second, after=0, think_seconds=1e6)]
    records = await run_workload(workload, [upstream.url], model="tiny", stop=stop)
    assert [r.request.index for r in records] == [0]
