import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import unused_port
from scripted_upstream import DONE, Clock, Upstream, event, request_at, start_stream, token, usage

from loadgen.client import Api, Client
from loadgen.results import Result
from proxy.core.request import RequestClass
from proxy.upstream.client import EngineClient, Timeouts

pytest_plugins = ("loadgen_fixtures",)


@pytest_asyncio.fixture
async def client(clock: Clock) -> AsyncIterator[Client]:
    servers = EngineClient(Timeouts(connect=10.0, idle=60.0))
    yield Client(servers, clock, "tiny", nonce=1)
    await servers.close()


async def ask(client: Client, url: str, *, output: int = 2) -> Result:
    scheduled = request_at(0.0, output=output)
    record = Result(scheduled)
    await client.send(url, record, client.prepare(scheduled))
    return record


def with_api(client: Client, api: Api) -> Client:
    return Client(client.servers, client.clock, client.model, client.nonce, api)


async def test_each_token_is_noted_when_it_arrives(client: Client, clock: Clock, upstream: Upstream) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await start_stream(request)
        for at in (1.0, 1.25, 1.75):
            await clock.write(response, token(), at)
        await clock.write(response, usage(3) + DONE, 2.0)
        return response

    upstream.script = script
    record = await ask(client, upstream.url, output=3)
    assert record.completed
    assert record.sent_at == 0.0
    assert record.ttft_seconds == 1.0
    assert list(record.gaps) == [0.25, 0.5]
    assert (record.tokens, record.finished_at) == (3, 2.0)


async def test_a_role_chunk_is_no_first_token(client: Client, clock: Clock, upstream: Upstream) -> None:
    def delta(**fields: str) -> bytes:
        return event({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": fields}]})

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.path == "/v1/chat/completions"
        response = await start_stream(request)
        await clock.write(response, delta(role="assistant", content=""), 1.0)
        await clock.write(response, delta(content="a"), 5.0)
        await clock.write(response, usage(1) + DONE, 6.0)
        return response

    upstream.script = script
    record = await ask(with_api(client, Api.CHAT), upstream.url, output=1)
    assert record.completed
    assert (record.ttft_seconds, list(record.gaps)) == (5.0, [])


async def test_a_chunk_of_several_tokens_is_one_gap_and_usage_tells_their_number(
    client: Client, clock: Clock, upstream: Upstream
) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await start_stream(request)
        await clock.write(response, token("a"), 1.0)
        await clock.write(response, token(" b c d"), 2.0)
        await clock.write(response, usage(4) + DONE, 2.0)
        return response

    upstream.script = script
    record = await ask(client, upstream.url, output=4)
    assert (list(record.gaps), record.tokens) == ([1.0], 4)


async def test_an_event_cut_over_two_reads_counts_when_it_is_whole(
    client: Client, clock: Clock, upstream: Upstream
) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await start_stream(request)
        await clock.write(response, token()[:9], 1.0)
        await clock.write(response, token()[9:], 3.0)
        await clock.write(response, usage(1) + DONE, 4.0)
        return response

    upstream.script = script
    record = await ask(client, upstream.url, output=1)
    assert (record.ttft_seconds, record.tokens) == (3.0, 1)


async def test_a_token_of_which_nothing_shows_counts(client: Client, clock: Clock, upstream: Upstream) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await start_stream(request)
        await clock.write(response, token(""), 1.0)
        await clock.write(response, token("\N{SNOWMAN}"), 2.0)
        await clock.write(response, usage(2) + DONE, 3.0)
        return response

    upstream.script = script
    record = await ask(client, upstream.url)
    assert (record.ttft_seconds, list(record.gaps), record.tokens) == (1.0, [1.0], 2)


@pytest.mark.parametrize("scale", [1.0, 10.0])
async def test_the_times_in_the_proxys_and_in_the_engines_queue_add_up(
    client: Client, upstream: Upstream, scale: float
) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.headers["x-slai-timing"] == "1"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Server-Timing": "queue;dur=200"})
        await response.prepare(request)
        told = {"choices": [], "usage": {"completion_tokens": 1}, "metrics": {"queue_time_ms": 50.0}}
        await response.write(token() + event(told) + DONE)
        return response

    upstream.script = script
    record = await ask(replace(client, time_scale=scale), upstream.url, output=1)
    assert record.queue_seconds == pytest.approx(0.25 * scale)


async def test_a_server_that_tells_nothing_of_its_queue(client: Client, upstream: Upstream) -> None:
    assert (await ask(client, upstream.url)).queue_seconds is None


async def test_a_refusal_is_named_by_its_status(client: Client, upstream: Upstream) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full"}}, status=503)

    upstream.script = script
    record = await ask(client, upstream.url)
    assert (record.error, record.completed, record.finished_at) == ("http 503", False, 0.0)


async def break_connection(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await start_stream(request)
    await response.write(token())
    assert request.transport is not None
    request.transport.close()
    return response


async def end_early(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await start_stream(request)
    await response.write(token())
    return response


async def send_error(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await start_stream(request)
    await response.write(token() + event({"error": {"message": "out of memory", "code": 500}}) + DONE)
    return response


async def send_no_token(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await start_stream(request)
    await response.write(DONE)
    return response


async def send_json(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "all at once"}]})


@pytest.mark.parametrize(
    ("script", "error", "tokens"),
    [
        (break_connection, "cut", 1),
        (end_early, "cut", 1),
        (send_error, "error event", 1),
        (send_no_token, "no token", 0),
        (send_json, "not a stream", 0),
    ],
)
async def test_a_broken_answer_is_a_failure_with_a_name(
    client: Client, upstream: Upstream, script: Any, error: str, tokens: int
) -> None:
    upstream.script = script
    record = await ask(client, upstream.url)
    assert (record.error, record.completed, record.tokens) == (error, False, tokens)
    assert record.finished_at is not None


async def test_no_server_is_a_failed_connection(client: Client) -> None:
    record = await ask(client, f"http://127.0.0.1:{unused_port()}")
    assert (record.error, record.sent_at) == ("connect", 0.0)


async def test_a_request_without_an_end_times_out(client: Client, clock: Clock, upstream: Upstream) -> None:
    release = asyncio.Event()

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(token())
        await release.wait()
        return response

    upstream.script = script
    # 100 s in the run's time are 0.1 s here.
    hasty = Client(client.servers, clock, "tiny", nonce=1, time_scale=1000.0, timeout_seconds=100.0)
    record = await ask(hasty, upstream.url)
    release.set()
    assert (record.error, record.tokens) == ("timeout", 1)


async def test_what_breaks_after_the_end_does_not_matter(client: Client, upstream: Upstream) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(token() + usage(1) + DONE)
        assert request.transport is not None
        request.transport.close()
        return response

    upstream.script = script
    assert (await ask(client, upstream.url, output=1)).completed


async def test_a_cancelled_request_is_unfinished(client: Client, clock: Clock, upstream: Upstream) -> None:
    release = asyncio.Event()
    scheduled = request_at(0.0)
    record = Result(scheduled)

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await start_stream(request)
        await clock.write(response, token(), 1.0)
        task.cancel()
        await release.wait()
        return response

    upstream.script = script
    task = asyncio.ensure_future(client.send(upstream.url, record, client.prepare(scheduled)))
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert (record.error, record.tokens, record.finished_at) == ("unfinished", 1, 1.0)


async def test_a_connection_serves_one_request_after_another(client: Client, upstream: Upstream) -> None:
    for _ in range(3):
        assert (await ask(client, upstream.url)).completed
    assert len(set(upstream.peers)) == 1


async def test_the_request_asks_for_exactly_its_lengths(client: Client, upstream: Upstream) -> None:
    scheduled = request_at(0.0, prompt=500, output=7)
    await client.send(upstream.url, Result(scheduled), client.prepare(scheduled))
    [body] = upstream.bodies
    assert len(body["prompt"]) == 500
    assert all(10 <= number <= 3999 for number in body.pop("prompt"))
    assert body == {
        "model": "tiny",
        "max_tokens": 7,
        "min_tokens": 7,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "vllm_xargs": {"slai_tbt_ms": 100.0},
    }


async def test_chat_sends_about_as_many_words(client: Client) -> None:
    body = json.loads(with_api(client, Api.CHAT).prepare(request_at(0.0, prompt=50)))
    [message] = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 50


async def test_no_two_prompts_share_a_beginning(client: Client) -> None:
    def prompt(index: int, nonce: int) -> list[int]:
        other = Client(client.servers, client.clock, "tiny", nonce)
        return list(json.loads(other.prepare(request_at(0.0, index=index, prompt=64)))["prompt"][:16])

    assert prompt(0, 1) == prompt(0, 1)
    assert prompt(0, 1) != prompt(1, 1)
    assert prompt(0, 1) != prompt(0, 2)


@pytest.mark.parametrize(
    ("kind", "scale", "expected"),
    [
        (RequestClass("gold", ttft_seconds=2.0, tbt_seconds=0.1), 1.0, ("2000", "100")),
        (RequestClass("gold", tbt_seconds=0.5), 10.0, (None, "50")),
        (RequestClass("best-effort"), 1.0, (None, None)),
    ],
)
async def test_deadlines_go_along_in_the_servers_time(
    client: Client, upstream: Upstream, kind: RequestClass, scale: float, expected: tuple[str | None, str | None]
) -> None:
    scheduled = request_at(0.0, kind=kind)
    scaled = Client(client.servers, client.clock, "tiny", nonce=1, time_scale=scale)
    await scaled.send(upstream.url, Result(scheduled), scaled.prepare(scheduled))
    headers = upstream.requests[0].headers
    assert (headers.get("x-slo-ttft-ms"), headers.get("x-slo-tbt-ms")) == expected
    assert "x-slo-class" not in headers


async def test_the_class_is_named_on_demand_only(client: Client, upstream: Upstream) -> None:
    scheduled = request_at(0.0, kind=RequestClass("gold", tbt_seconds=0.1))
    naming = Client(client.servers, client.clock, "tiny", nonce=1, send_class=True)
    await naming.send(upstream.url, Result(scheduled), naming.prepare(scheduled))
    headers = upstream.requests[0].headers
    assert (headers["x-slo-class"], headers["x-slo-tbt-ms"]) == ("gold", "100")


async def test_a_tenant_is_told_by_its_header_and_nobody_by_none(client: Client, upstream: Upstream) -> None:
    seen: list[str | None] = []

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(request.headers.get("x-slai-tenant"))
        response = await start_stream(request)
        await response.write(token() + DONE)
        return response

    upstream.script = script
    for tenant in ("calm", ""):
        scheduled = replace(request_at(0.0), tenant=tenant)
        await client.send(upstream.url, Result(scheduled), client.prepare(scheduled))
    assert seen == ["calm", None]
