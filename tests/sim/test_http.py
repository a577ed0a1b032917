"""The simulated engine's HTTP face, over real loopback sockets; its pacing, on a virtual clock."""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.sim.engine import EngineConfig, SimulatedEngine
from proxy.sim.http import SERVER, SimulatedServer, create_app, serve, start_engines, stop_engines
from proxy.sim.profiles import Profile, StepModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine


def steps_of(milliseconds: float, kv_tokens: int = 65_536) -> Profile:
    return Profile("test", StepModel(milliseconds, 0, 0, 0, 1, 0, 0, 0), kv_tokens, "every step takes as long")


FAST = EngineConfig(steps_of(1))
FOREVER = 20_000
"""Tokens of an answer that no test waits for."""


@asynccontextmanager
async def serving(
    config: EngineConfig = FAST, engine: SimulatedEngine | None = None
) -> AsyncIterator[tuple[aiohttp.ClientSession, SimulatedServer]]:
    app = create_app(engine or SimulatedEngine(config), model="m")
    running = await serve(app)
    try:
        async with aiohttp.ClientSession(running.url) as client:
            yield client, app[SERVER]
    finally:
        await stop_engines([running])


def address(client: aiohttp.ClientSession) -> tuple[str, int]:
    url = client._base_url
    assert url is not None
    assert url.host is not None
    assert url.port is not None
    return url.host, url.port


async def post(client: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def stream(client: aiohttp.ClientSession, path: str, **body: Any) -> list[Any]:
    """Return the chunks of a stream, which must end in ``[DONE]``."""
    async with client.post(path, json={"stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Transfer-Encoding"] == "chunked"
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def metrics(client: aiohttp.ClientSession) -> dict[str, float]:
    """Return the samples by name, with the labels that tell two of a name apart."""
    async with client.get("/metrics") as response:
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["engine"] == "0"
            found[sample.name + sample.labels.get("finished_reason", "")] = sample.value
    return found


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "x" * 40}]  # ten tokens


class TestStreams:
    async def test_a_chat_begins_with_its_role_and_ends_with_its_length(self) -> None:
        async with serving() as (client, _):
            chunks = await stream(client, CHAT, model="m", messages=MESSAGES, max_tokens=3)
        role, *tokens = chunks
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "length"]
        assert all(set(c["choices"][0]["delta"]) == {"content"} and c["choices"][0]["delta"]["content"] for c in tokens)
        assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
        assert {c["model"] for c in chunks} == {"m"}
        assert len({c["id"] for c in chunks}) == 1
        assert not any("usage" in c for c in chunks)

    async def test_a_completion_has_one_chunk_per_token(self) -> None:
        async with serving() as (client, _):
            chunks = await stream(client, COMPLETIONS, prompt=[5, 6, 7], max_tokens=20)
        assert len(chunks) == 20
        assert {c["object"] for c in chunks} == {"text_completion"}
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 19 + ["length"]
        assert set(chunks[0]["choices"][0]) == set(chunks[5]["choices"][0]) == set(chunks[-1]["choices"][0])

    async def test_usage_comes_in_a_chunk_without_choices(self) -> None:
        async with serving() as (client, _):
            chunks = await stream(client, CHAT, messages=MESSAGES, max_tokens=4, stream_options={"include_usage": True})
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
        assert not any("usage" in c for c in chunks[:-1])

    @pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x" * 40})])
    async def test_continuous_usage_counts_in_every_chunk(self, path: str, prompt: dict[str, Any]) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with serving() as (client, _):
            chunks = await stream(client, path, max_tokens=3, stream_options=options, **prompt)
        counts = [c["usage"]["completion_tokens"] for c in chunks]
        assert counts == ([0, 1, 2, 3, 3] if path == CHAT else [1, 2, 3, 3])
        assert {c["usage"]["prompt_tokens"] for c in chunks} == {10}

    async def test_continuous_usage_needs_include_usage(self) -> None:
        async with serving() as (client, _):
            chunks = await stream(client, COMPLETIONS, prompt="x", stream_options={"continuous_usage_stats": True})
        assert not any("usage" in c for c in chunks)

    async def test_one_token_is_first_and_last(self) -> None:
        async with serving() as (client, _):
            chunks = await stream(client, CHAT, messages=MESSAGES, max_tokens=1)
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "length"]

    async def test_the_text_is_the_same_streamed_and_whole(self) -> None:
        async with serving() as (client, _):
            chunks = await stream(client, COMPLETIONS, prompt="x", max_tokens=30)
            whole = await post(client, COMPLETIONS, prompt="y", max_tokens=30)
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]

    async def test_a_connection_serves_the_next_request_after_a_stream(self) -> None:
        async with serving() as (client, _):
            peers = set()
            for _ in range(3):
                async with client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "stream": True}) as response:
                    assert response.connection is not None
                    assert response.connection.transport is not None
                    peers.add(response.connection.transport.get_extra_info("sockname"))
                    assert (await response.text()).count("data: ") == 3
        assert len(peers) == 1

    async def test_http_1_0_gets_the_events_without_chunked_coding(self) -> None:
        async with serving() as (client, _):
            reader, writer = await asyncio.open_connection(*address(client))
            body = b'{"prompt": "x", "max_tokens": 2, "stream": true}'
            head = (
                f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
        events = answer.partition(b"\r\n\r\n")[2].split(b"\n\n")
        assert [e[:6] for e in events] == [b"data: ", b"data: ", b"data: ", b""]

    async def test_the_id_is_the_clients(self) -> None:
        async with serving() as (client, _):
            client.headers["X-Request-Id"] = "abc"
            (chunk,) = await stream(client, COMPLETIONS, prompt="x", max_tokens=1)
            whole = await post(client, CHAT, messages=MESSAGES, max_tokens=1)
        assert (chunk["id"], whole["id"]) == ("cmpl-abc", "chatcmpl-abc")


class TestWholeAnswers:
    async def test_a_chat(self) -> None:
        async with serving() as (client, _):
            answer = await post(client, CHAT, messages=MESSAGES, max_completion_tokens=5, max_tokens=9)
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}

    @pytest.mark.parametrize(
        ("path", "body", "prompt_tokens", "completion_tokens"),
        [
            (COMPLETIONS, {"prompt": list(range(100))}, 100, 16),
            (COMPLETIONS, {"prompt": ""}, 1, 16),
            (COMPLETIONS, {"prompt": "x" * 41, "max_tokens": 1, "n": 1}, 11, 1),
            (CHAT, {"messages": MESSAGES * 2}, 20, 256),
            (CHAT, {"messages": [{"role": "assistant", "content": None}]}, 1, 256),
            (CHAT, {"messages": [{"content": [{"type": "text", "text": "x" * 8}, {"type": "image_url"}]}]}, 2, 256),
            # An answer that would leave the context of 32,768 tokens is shortened.
            (COMPLETIONS, {"prompt": [1] * 32_760, "max_tokens": 100}, 32_760, 8),
        ],
    )
    async def test_lengths(self, path: str, body: dict[str, Any], prompt_tokens: int, completion_tokens: int) -> None:
        async with serving(EngineConfig(steps_of(0.1))) as (client, _):
            usage = (await post(client, path, **body))["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, completion_tokens)


@pytest.mark.parametrize(
    ("path", "body", "status", "error_type", "param"),
    [
        (COMPLETIONS, b"{bad", 400, "Bad Request", None),
        (COMPLETIONS, b"[]", 400, "Bad Request", None),
        (COMPLETIONS, b"null", 400, "Bad Request", None),
        (COMPLETIONS, b'{"prompt": "x", "a": ' + b"[" * 100_000, 400, "Bad Request", None),
        (COMPLETIONS, b'{"prompt": "\xff"}', 400, "Bad Request", None),
        (COMPLETIONS, b"{}", 400, "Bad Request", None),
        (CHAT, b'{"prompt": "x"}', 400, "Bad Request", None),
        (COMPLETIONS, b'{"prompt": [-1]}', 400, "Bad Request", None),
        (COMPLETIONS, b'{"prompt": [9223372036854775808]}', 400, "Bad Request", None),
        (COMPLETIONS, b'{"prompt": ["a", "b"]}', 400, "Bad Request", None),
        (COMPLETIONS, b'{"prompt": []}', 400, "BadRequestError", "prompt"),
        (COMPLETIONS, b'{"prompt": "x", "n": 2}', 400, "BadRequestError", "n"),
        (COMPLETIONS, b'{"prompt": "x", "max_tokens": 0}', 400, "BadRequestError", "max_tokens"),
        (COMPLETIONS, b'{"prompt": "x", "max_tokens": 99999}', 400, "BadRequestError", "max_tokens"),
        (COMPLETIONS, b'{"prompt": "x", "stream_options": {}}', 400, "Bad Request", "stream_options"),
        (COMPLETIONS, b'{"prompt": "x", "model": "other"}', 404, "NotFoundError", "model"),
        (COMPLETIONS, b'{"prompt": "%b"}' % (b"x" * 4 * 32_768), 400, "BadRequestError", "input_tokens"),
        ("/tokenize", b'{"model": "m"}', 400, "Bad Request", "prompt"),
        ("/tokenize", b'{"model": "other", "prompt": "x"}', 404, "NotFoundError", "model"),
        ("/v1/nothing", b"{}", 404, "Not Found", None),
        ("/health", b"{}", 405, "Method Not Allowed", None),
    ],
)
async def test_refusals_have_vllms_shape(
    path: str, body: bytes, status: int, error_type: str, param: str | None
) -> None:
    async with serving() as (client, server):
        async with client.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
            error = (await response.json())["error"]
        assert response.status == error["code"] == status
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == (error_type, param)
        assert error["message"]
        assert server.engine.steps == 0


async def test_another_media_type_is_refused() -> None:
    async with serving() as (client, _), client.post(COMPLETIONS, data=b'{"prompt": "x"}') as response:
        assert response.status == 400


async def test_small_endpoints() -> None:
    async with serving() as (client, _):
        async with client.get("/health") as response:
            assert (response.status, await response.read()) == (200, b"")
        async with client.get("/version") as response:
            assert (await response.json())["version"]
        async with client.get("/v1/models") as response:
            (model,) = (await response.json())["data"]
        tokens = await post(client, "/tokenize", model="m", prompt="x" * 9)
        of_chat = await post(client, "/tokenize", messages=MESSAGES)
    assert (model["id"], model["object"], model["max_model_len"]) == ("m", "model", 32_768)
    assert (tokens["count"], len(tokens["tokens"]), tokens["max_model_len"]) == (3, 3, 32_768)
    assert of_chat["count"] == 10


async def test_the_context_is_never_longer_than_the_kv_cache() -> None:
    async with serving(EngineConfig(steps_of(0.1, kv_tokens=1030))) as (client, _):
        async with client.get("/v1/models") as response:
            (model,) = (await response.json())["data"]
        assert model["max_model_len"] == 1024
        assert (await post(client, COMPLETIONS, prompt=[1] * 1000, max_tokens=100))["usage"]["total_tokens"] == 1024


def found_cached(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details")
    found: int = details["cached_tokens"] if details else 0
    return found


class TestPrefixCache:
    """Of engines as the commands start them."""

    @pytest.fixture
    async def client(self) -> AsyncIterator[aiohttp.ClientSession]:
        engines = await start_engines([0], FAST, model="m")
        try:
            async with aiohttp.ClientSession(engines[0].url) as client:
                yield client
        finally:
            await stop_engines(engines)

    async def test_it_is_announced(self, client: aiohttp.ClientSession) -> None:
        async with client.get("/metrics") as response:
            assert 'enable_prefix_caching="True"' in await response.text()

    @pytest.mark.parametrize(
        ("second", "cached"),
        [
            (list(range(100)), 96),
            (list(range(96)), 80),  # the last token is computed in any case
            (list(range(150)), 96),
            (list(range(50)), 48),
            ([*range(40), *range(1000, 1060)], 32),
            ([*range(15), 9999, *range(16, 100)], 0),
            (list(range(1, 101)), 0),
        ],
    )
    async def test_a_prompt_finds_what_it_has_in_common_with_one_before(
        self, client: aiohttp.ClientSession, second: list[int], cached: int
    ) -> None:
        first = (await post(client, COMPLETIONS, prompt=list(range(100)), max_tokens=1))["usage"]
        assert first == {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101}
        assert found_cached((await post(client, COMPLETIONS, prompt=second, max_tokens=3))["usage"]) == cached

    async def test_prompts_of_one_beginning_find_it_and_their_own_end(self, client: aiohttp.ClientSession) -> None:
        ends = [[*range(64), *range(start, start + 64)] for start in (1000, 2000)]
        found = [
            found_cached((await post(client, COMPLETIONS, prompt=prompt, max_tokens=1))["usage"])
            for prompt in (*ends, *ends)
        ]
        assert found == [0, 64, 112, 112]

    async def test_of_a_stream_its_last_chunk_tells(self, client: aiohttp.ClientSession) -> None:
        body = {"messages": [{"role": "user", "content": "word " * 100}], "stream_options": {"include_usage": True}}
        first, second = [(await stream(client, CHAT, max_tokens=3, **body))[-1]["usage"] for _ in range(2)]
        assert found_cached(first) == 0
        assert second["prompt_tokens_details"] == {"cached_tokens": 112}  # of 125

    @pytest.mark.parametrize("chat", [True, False])
    async def test_text_is_found_by_the_token_ids_that_tokenize_gave(
        self, client: aiohttp.ClientSession, chat: bool
    ) -> None:
        text = "".join(f"{n} Ünïcödé 🙂 " for n in range(40))
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        answer = await post(client, "/tokenize", **prompt)
        ids = answer["tokens"]
        assert len(ids) == answer["count"] == -(-len(text) // 4)
        await post(client, COMPLETIONS, prompt=ids[:64], max_tokens=1)
        usage = (await post(client, CHAT if chat else COMPLETIONS, max_tokens=1, **prompt))["usage"]
        assert (usage["prompt_tokens"], found_cached(usage)) == (len(ids), 64)

    async def test_another_salt_is_another_prompt(self, client: aiohttp.ClientSession) -> None:
        salts = ("a", "b", "a", None)
        found = [
            found_cached(
                (await post(client, COMPLETIONS, prompt=[1] * 40, max_tokens=1, **({"cache_salt": s} if s else {})))[
                    "usage"
                ]
            )
            for s in salts
        ]
        assert found == [0, 0, 32, 0]


class TestMetrics:
    async def test_an_idle_engine(self) -> None:
        async with serving() as (client, _):
            found = await metrics(client)
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        counters = ("vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        assert {found[name] for name in gauges + counters} == {0.0}
        assert found["vllm:cache_config_info"] == 1

    async def test_the_kv_cache_is_described_in_labels(self) -> None:
        async with serving() as (client, _), client.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            families = {f.name: f for f in text_string_to_metric_families(await response.text())}
        labels = families["vllm:cache_config_info"].samples[0].labels
        assert (
            int(labels["block_size"]) * int(labels["num_gpu_blocks"]) == int(labels["kv_cache_size_tokens"]) == 65_536
        )
        assert labels["enable_prefix_caching"] == "False"
        assert families["vllm:num_requests_running"].samples[0].labels["model_name"] == "m"

    async def test_a_running_and_a_waiting_request(self) -> None:
        async with serving(EngineConfig(steps_of(1), max_num_seqs=1)) as (client, _):
            async with opened_stream(client) as first, client.post(COMPLETIONS, json=LONG):
                await first.content.readany()
                found = await metrics(client)
            assert found["vllm:num_requests_running"] == 1
            assert found["vllm:num_requests_waiting"] == 1
            assert 0 < found["vllm:kv_cache_usage_perc"] < 1
            assert found["vllm:prompt_tokens_total"] == 1

    async def test_counters_after_requests(self) -> None:
        async with serving() as (client, _):
            await stream(client, COMPLETIONS, prompt=[1] * 700, max_tokens=5)
            await post(client, COMPLETIONS, prompt=[1] * 300, max_tokens=2)
            found = await metrics(client)
        assert found["vllm:prompt_tokens_total"] == 1000
        assert found["vllm:generation_tokens_total"] == 7
        assert found["vllm:request_success_totallength"] == 2
        assert found["vllm:request_success_totalstop"] == 0

    async def test_a_preempted_prompt_counts_once(self) -> None:
        # Two sequences of 32 + 32 tokens do not fit into 96 together.
        async with serving(EngineConfig(steps_of(0.1, kv_tokens=96))) as (client, _):
            await asyncio.gather(*(stream(client, COMPLETIONS, prompt=[1] * 32, max_tokens=32) for _ in range(2)))
            found = await metrics(client)
        assert found["vllm:num_preemptions_total"] > 0
        assert found["vllm:prompt_tokens_total"] == 64
        assert found["vllm:generation_tokens_total"] == 64


LONG = {"prompt": [1], "max_tokens": FOREVER, "stream": True}


async def read_on(response: aiohttp.ClientResponse, received: bytearray) -> None:
    async for data in response.content.iter_any():
        received += data


@asynccontextmanager
async def opened_stream(client: aiohttp.ClientSession) -> AsyncIterator[aiohttp.ClientResponse]:
    """Open a stream without end; leaving drops the connection."""
    response = await client.post(COMPLETIONS, json=LONG)
    try:
        yield response
    finally:
        response.close()


class WatchedEngine(SimulatedEngine):
    """Tells when a sequence has come and when one was aborted."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.added = asyncio.Event()
        self.aborted = asyncio.Event()

    def add(
        self,
        sequence_id: str,
        prompt_tokens: int,
        output_tokens: int,
        content: str | None = None,
        *,
        tbt_seconds: float | None = None,
        common: int = 0,
        hashes: tuple[bytes, ...] = (),
        ready: int = 0,
    ) -> None:
        super().add(
            *(sequence_id, prompt_tokens, output_tokens, content),
            tbt_seconds=tbt_seconds,
            common=common,
            hashes=hashes,
            ready=ready,
        )
        self.added.set()

    def abort(self, sequence_id: str) -> None:
        super().abort(sequence_id)
        self.aborted.set()


class TestDisconnects:
    async def test_of_a_stream_frees_its_sequence(self) -> None:
        async with serving() as (client, server):
            async with opened_stream(client) as response:
                await response.content.readany()
                assert server.engine.running == 1
            await server.idle.wait()
            assert (server.engine.running, server.engine.kv_tokens_used, server.finished) == (0, 0, 0)

    async def test_of_a_request_without_stream_frees_its_sequence(self) -> None:
        engine = WatchedEngine(FAST)
        async with serving(engine=engine) as (client, server):
            task = asyncio.ensure_future(post(client, COMPLETIONS, prompt=[1], max_tokens=FOREVER))
            await engine.added.wait()
            task.cancel()
            await server.idle.wait()
            assert (engine.running, engine.kv_tokens_used, server.finished) == (0, 0, 0)

    async def test_during_a_step_does_not_wait_for_its_end(self) -> None:
        engine = WatchedEngine(EngineConfig(steps_of(3_600_000)))
        async with serving(engine=engine) as (client, _):
            async with opened_stream(client):
                await engine.added.wait()
            await engine.aborted.wait()
            assert engine.running + engine.waiting == 0

    async def test_of_a_waiting_request_leaves_the_queue(self) -> None:
        engine = WatchedEngine(EngineConfig(steps_of(1), max_num_seqs=1))
        async with serving(engine=engine) as (client, _), opened_stream(client) as first:
            await first.content.readany()
            async with opened_stream(client):
                assert engine.waiting == 1
            await engine.aborted.wait()
            assert (engine.running, engine.waiting) == (1, 0)

    async def test_a_client_that_does_not_read_is_cut_off(self) -> None:
        async with serving(EngineConfig(steps_of(0))) as (client, server):
            body = json.dumps({"prompt": [1], "max_tokens": 32_000, "stream": True}).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(sock, address(client))
                await loop.sock_sendall(sock, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                assert await loop.sock_recv(sock, 12) == b"HTTP/1.1 200"  # so the sequence has come
                await server.idle.wait()
            assert server.finished == 0
            assert server.engine.generation_tokens < 32_000


async def test_first_come_first_served() -> None:
    order: list[int] = []

    async def read(number: int, response: aiohttp.ClientResponse) -> None:
        async for _ in response.content.iter_any():
            if number not in order:
                order.append(number)

    async with serving(EngineConfig(steps_of(1), max_num_seqs=1)) as (client, _):
        responses = []
        for length in (30, 1, 20, 5):
            # The headers come when the prompt is queued.
            body = {"prompt": [1] * length, "max_tokens": length, "stream": True}
            responses.append(await client.post(COMPLETIONS, json=body))
        await asyncio.gather(*(read(number, response) for number, response in enumerate(responses)))
    assert order == [0, 1, 2, 3]


class TestSeveralEngines:
    async def test_each_has_its_own_port_and_figures(self) -> None:
        engines = await start_engines([0, 0], FAST, model="m", speed=2)
        try:
            async with aiohttp.ClientSession() as client:
                await stream(client, engines[0].url + COMPLETIONS, prompt="x", max_tokens=3)
            generated = [runner.app[SERVER].engine.generation_tokens for _, runner in engines]
        finally:
            await stop_engines(engines)
        assert generated == [3, 0]
        assert engines[0].url != engines[1].url

    async def test_a_port_in_use_stops_the_others_too(self) -> None:
        (first,) = await start_engines([0], FAST, model="m")
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(OSError, match="address already in use"):
            await start_engines([0, port], FAST, model="m")
        await stop_engines([first])
        (again,) = await start_engines([port], FAST, model="m")
        await stop_engines([again])

    async def test_stopping_cuts_streams_and_claims_no_end(self, caplog: pytest.LogCaptureFixture) -> None:
        (engine,) = await start_engines([0], FAST, model="m")
        async with aiohttp.ClientSession(engine.url) as client, client.post(COMPLETIONS, json=LONG) as response:
            waiting = asyncio.ensure_future(post(client, COMPLETIONS, prompt=[1], max_tokens=FOREVER))
            received = bytearray(await response.content.readany())
            await stop_engines([engine])
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_on(response, received)
            with pytest.raises(aiohttp.ClientError):
                await waiting
        assert b"[DONE]" not in received
        assert not caplog.records


async def test_a_failing_engine_is_unhealthy_and_ends_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(SimulatedEngine):
        def start_step(self) -> float | None:
            if self.steps == 3:
                raise RuntimeError("out of simulated memory")
            return super().start_step()

    async with serving(engine=Failing(FAST)) as (client, _):
        async with opened_stream(client) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        async with client.get("/health") as response:
            assert response.status == 503
        async with client.post(COMPLETIONS, json=LONG) as response:
            assert (await response.json())["error"]["type"] == "InternalServerError"
            assert response.status == 500
    assert "out of simulated memory" in caplog.text


class JumpingSelector(selectors.SelectSelector):
    """Passes the time to the next timer at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "the test waits for nothing"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = JumpingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


class Pacing:
    """Notes when tokens come; ``delays`` are seconds that this process loses while handing out a token."""

    def __init__(self, delays: Callable[[int], float] = lambda _: 0.0) -> None:
        self.times: list[float] = []
        self._delays = delays

    def on_start(self, cached_tokens: int) -> None:
        assert not self.times

    def on_token(self, *, finished: bool) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.times.append(loop.time())
        loop.selector.now += self._delays(len(self.times))


def in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)


@asynccontextmanager
async def stepping(speed: float = 1.0, **config: Any) -> AsyncIterator[SimulatedServer]:
    server = SimulatedServer(SimulatedEngine(EngineConfig(steps_of(10), **config)), model="m", speed=speed)
    task = asyncio.ensure_future(server.run())
    yield server
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


class TestPacing:
    """Steps of 10 ms each."""

    @pytest.mark.parametrize("speed", [0.5, 1.0, 4.0])
    def test_speed_divides_the_steps(self, speed: float) -> None:
        async def main() -> None:
            async with stepping(speed) as server:
                sink = Pacing()
                await server.generate(1, 50, sink)
            assert sink.times == pytest.approx([0.01 / speed * n for n in range(1, 51)])
            assert server.lost_seconds == 0

        in_virtual_time(main())

    def test_small_delays_do_not_add_up(self) -> None:
        async def main() -> None:
            async with stepping() as server:
                sink = Pacing(lambda _: 0.004)
                await server.generate(1, 100, sink)
            assert sink.times == pytest.approx([0.01 * n for n in range(1, 101)])
            assert server.lost_seconds == 0

        in_virtual_time(main())

    def test_a_late_step_is_made_up_for_within_one_step(self) -> None:
        async def main() -> None:
            async with stepping() as server:
                sink = Pacing(lambda token: 0.009 if token == 2 else 0.0)
                await server.generate(1, 4, sink)
            assert sink.times == pytest.approx([0.01, 0.02, 0.03, 0.04])

        in_virtual_time(main())

    def test_after_a_long_stall_there_is_no_burst(self) -> None:
        async def main() -> None:
            async with stepping() as server:
                sink = Pacing(lambda token: 0.035 if token == 2 else 0.0)
                await server.generate(1, 4, sink)
            assert sink.times == pytest.approx([0.01, 0.02, 0.065, 0.075])
            assert server.lost_seconds == pytest.approx(0.035)

        in_virtual_time(main())

    def test_an_idle_engine_begins_a_step_when_a_prompt_comes(self) -> None:
        async def main() -> None:
            async with stepping() as server:
                await server.idle.wait()
                await asyncio.sleep(1.003)
                sink = Pacing()
                await server.generate(1, 2, sink)
            assert sink.times == pytest.approx([1.013, 1.023])
            assert server.lost_seconds == 0

        in_virtual_time(main())

    @pytest.mark.parametrize(("async_scheduling", "begun_at"), [(False, 0.06), (True, 0.07)])
    def test_with_asynchronous_scheduling_a_prompt_that_comes_in_a_step_waits_one_more(
        self, async_scheduling: bool, begun_at: float
    ) -> None:
        async def main() -> None:
            async with stepping(async_scheduling=async_scheduling) as server:
                first = asyncio.ensure_future(server.generate(1, 20, Pacing()))
                await asyncio.sleep(0.045)
                sink = Pacing()
                await server.generate(1, 1, sink)
                await first
            assert sink.times == pytest.approx([begun_at])

        in_virtual_time(main())

    @pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
    def test_a_speed_that_is_not_positive_is_refused(self, speed: float) -> None:
        with pytest.raises(ValueError, match="speed"):
            SimulatedServer(SimulatedEngine(FAST), model="m", speed=speed)
