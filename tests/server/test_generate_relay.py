"""What passes through unchanged, in both directions, and the few headers that do not."""

import asyncio
import gzip
import json
from collections.abc import Iterable

import pytest
from live_proxy import CHAT, COMPLETIONS, LiveProxy, exchange, live_proxy, raw_post, until
from scripted_engine import (
    DONE,
    JSON,
    SSE,
    Call,
    Script,
    chunk,
    delta,
    event,
    head,
    last,
    scripted_engine,
    token,
    usage,
)

from proxy.wire.timing import queue_seconds

STREAMED = b'{"model": "m", "prompt": "hello", "stream": true}'

REQUESTS = (
    b'{"model":"m","prompt":"x"}',
    b' \r\n\t{ "model"  :\n"m" ,\t"prompt":"x"  }  \n\n',
    b'{"model": "other", "model": "m", "prompt": "a", "prompt": "b"}',
    b'{"model": "m", "prompt": "x", "unknown": {"deep": [1, {"er": null}]}, "n": 1}',
    b'{"model": "m", "prompt": "x", "temperature": 1e400, "seed": 123456789012345678901234567890}',
    b'{"model": "m", "prompt": "x", "top_p": 0.10000000000000000001, "min_p": 1E-7, "x": -0.0}',
    b'{"model": "m", "prompt": "a\\u0000b\\/c\\ud800"}',
    '{"model": "m", "prompt": "🙂 ünï"}'.encode(),
    b'{"model": "m", "prompt": "\xff\xfe"}',
    b'{"model": "m", "prompt": [[1, 2], [3]], "logit_bias": {"50256": -100}}',
    b'{"model": "m", "prompt": ["a", "b"], "max_tokens": 16.0, "x": NaN}',
    b'{"mod\\u0065l": "m", "prompt": "x"}',
)


async def test_requests_reach_the_engine_byte_for_byte() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        for body in REQUESTS:
            status, answer = await proxy.fetch(body=body)
            assert status == 200, answer
        assert [call.body for call in engine.calls] == [*REQUESTS]
        assert proxy.outcomes() == {"completed": len(REQUESTS)}


def one_per_byte(data: bytes) -> tuple[bytes, ...]:
    return tuple(bytes([byte]) for byte in data)


EMOJI = '{"choices": [{"text": "🙂"}]}'.encode()
CUT = EMOJI.index("🙂".encode())

STREAMS = {
    "plain": (token("a"), token("b"), last(), DONE),
    "CRLF": (b'data: {"choices":[{"text":"a"}]}\r\n\r\n', b"data: [DONE]\r\n\r\n"),
    "CRLF cut in its middle": (b'data: {"choices":[{"text":"a"}]}\r', b"\n\r", b"\ndata: [DONE]\r\n\r\n"),
    "bare CR": (b'data: {"choices":[{"text":"a"}]}\r\rdata: [DONE]\r\r',),
    "comments": (b": ping\n\n", token("a"), b":\n\n: pong\n", token("b"), DONE),
    "all fields": (b'event: chunk\nid: 1\nretry: 5\ndata: {"choices":[{"text":"a"}]}\n\n', DONE),
    "byte order mark": (b"\xef\xbb\xbf" + token("a"), DONE),
    "one byte per chunk": one_per_byte(token("ab") + b": x\r\n\r\n" + DONE),
    "emoji cut after 1 byte": (b"data: " + EMOJI[: CUT + 1], EMOJI[CUT + 1 :] + b"\n\n", DONE),
    "emoji cut after 2 bytes": (b"data: " + EMOJI[: CUT + 2], EMOJI[CUT + 2 :] + b"\n\n", DONE),
    "emoji cut after 3 bytes": (b"data: " + EMOJI[: CUT + 3], EMOJI[CUT + 3 :] + b"\n\n", DONE),
    "a line of 300 KB": (token("x" * 300_000), DONE),
    "a line of 2 MB, as one event": (b"data: " + b"y" * 2_000_000 + b"\n\n", token("a"), DONE),
    "end marker within a token": (token("data: [DONE]\n\n"), token("b"), DONE),
    "end marker cut in two": (token("a"), b"data: [DO", b"NE]\n\n"),
    "no end marker": (token("a"), last()),
    "bytes after the end marker": (token("a"), DONE, b": bye\n\n"),
    "no blank line at the end": (token("a"), b"data: [DONE]"),
    "not UTF-8": (b'data: {"choices":[{"text":"\xff\xfe"}]}\n\n', b"data: \x00\x01\n\n", DONE),
    "odd JSON": (b'data:   {"choices" : [ {"text":"a","text":"b"} ], "x":1e400}\n\n', b"data: {oops\n\n", DONE),
    "nothing but an end": (DONE,),
    "nothing at all": (),
    "chat": (delta(role="assistant", content=""), delta(content="a"), usage(3, 1), DONE),
    "tool calls": (
        delta(role="assistant", content=None, tool_calls=[{"index": 0, "id": "c1", "function": {"name": "f"}}]),
        delta(tool_calls=[{"index": 0, "id": None, "function": {"arguments": '{"x": "data: [DONE]"}'}}]),
        DONE,
    ),
    "logprobs": (
        event({"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": -1.5}]}}]}),
        DONE,
    ),
    "no choices": (event({"id": "x"}), event({"choices": []}), event({"choices": None}), token("a"), DONE),
}


def streaming(*pieces: bytes) -> Script:
    return lambda call: call.stream(*pieces)


def answering(body: bytes) -> Script:
    return lambda call: call.answer(body)


async def test_streams_reach_the_client_byte_for_byte() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        for name, pieces in STREAMS.items():
            engine.script = streaming(*pieces)
            for path in (COMPLETIONS, CHAT):
                async with proxy.post(path, STREAMED) as response:
                    assert response.headers.getall("Content-Type") == ["text/event-stream; charset=utf-8"]
                    assert await response.read() == b"".join(pieces), name
        assert proxy.outcomes() == {"completed": 2 * len(STREAMS)}


async def test_answers_in_one_piece_reach_the_client_byte_for_byte() -> None:
    bodies = (
        b'{ "choices" : [ ] ,"choices":[{"text":"a"}],\n "x": 1e400, "y": "\\ud800" }\n',
        b"",
        b"plain text",
        b'{"choices": [{"text": "' + b"x" * 3_000_000 + b'"}], "usage": {"completion_tokens": 2}}',
    )
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        for body in bodies:
            engine.script = answering(body)
            async with proxy.post(body=REQUESTS[0]) as response:
                assert await response.read() == body
                assert response.headers["Content-Length"] == str(len(body))
                assert response.headers["Content-Type"] == "application/json"
        assert proxy.outcomes() == {"completed": len(bodies)}


async def test_an_answer_that_was_not_streamed_in_chunks() -> None:
    async def script(call: Call) -> None:
        await call.begin("Content-Type: application/json")
        for piece in (b'{"choices"', b": []", b"}"):
            await call.write(piece)
        await call.end()

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        assert await proxy.fetch(body=REQUESTS[0]) == (200, b'{"choices": []}')


async def test_a_compressed_answer_passes_as_it_is() -> None:
    """The engine was asked not to, but if it does, the header and the bytes belong together."""
    packed = gzip.compress(b'{"choices": []}')
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        engine.script = lambda call: call.answer(packed, headers=("Content-Encoding: gzip",))
        async with proxy.post(body=REQUESTS[0], headers={"Accept-Encoding": "gzip, br"}) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            assert await response.read() == packed
        assert engine.calls[0].header("accept-encoding") == ["identity"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
async def test_a_compressed_request_reaches_the_engine_as_it_came(path: str) -> None:
    """Only the engine knows whether it reads such a request; what is in it decides on its place in the queue."""
    packed = gzip.compress(STREAMED)
    async with (
        scripted_engine(None, "m") as engine,
        scripted_engine(None, "n") as other,
        live_proxy(engine, other) as p,
    ):
        await exchange(p, raw_post(packed, "Content-Encoding: gzip", "Content-Type: application/json", path=path))
        call = engine.calls[0]
        assert call.body == packed
        assert call.header("content-encoding") == ["gzip"]
        assert call.header("content-length") == [str(len(packed))]
        assert other.calls == []


async def test_an_event_leaves_before_the_engine_makes_the_next() -> None:
    """Each chunk is made only after the client has the one before it, so any buffering would end in a deadlock."""
    received = asyncio.Semaphore(0)

    async def script(call: Call) -> None:
        await call.begin()
        for text in "abc":
            await call.write(token(text))
            await received.acquire()
        await call.end()

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy, proxy.post() as response:
        async with asyncio.timeout(5):
            for text in "abc":
                assert await response.content.readany() == token(text)
                received.release()
            assert await response.content.readany() == b""


@pytest.mark.parametrize("size", [1, 2, 3, 50, 1000])
async def test_chunks_of_any_shape_reach_the_client_as_such_of_one_shape(size: int) -> None:
    """However the engine's bytes are cut: the one shape is that of nearly all, which pass as they are."""
    shapes = [
        chunk(token("a")),
        b"1;a=b\r\nd\r\n",
        b"00000a\r\nata: {}\n\n:\r\n",
        b"A\r\ndata: x\n\n:\r\n",
        chunk(DONE),
    ]

    async def script(call: Call) -> None:
        sent = b"".join(shapes) + b"0\r\nX-Trailer: 1\r\n\r\n"
        await call.begin()
        for part in (
            [sent[at : at + size] for at in range(0, len(sent), size)] if size < 1000 else [*shapes, sent[-19:]]
        ):
            await call.send(part)
            await asyncio.sleep(0)

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(raw_post(STREAMED))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        body = b""
        while length := int(await reader.readline(), 16):
            data = await reader.readexactly(length + 2)
            body += data[:-2]
        assert await reader.readline() == b"\r\n"
        assert body == token("a") + b"data: {}\n\n:" + b"data: x\n\n:" + DONE
        writer.close()


async def test_the_head_goes_out_before_the_first_token() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await until(seen.is_set)
        await call.end()

    seen = asyncio.Event()
    async with scripted_engine(script) as engine, live_proxy(engine) as proxy, proxy.post() as response:
        assert response.status == 200
        seen.set()
        assert await response.read() == b""


async def test_what_has_come_with_the_head_leaves_in_one_write_with_it() -> None:
    held = asyncio.Event()

    async def script(call: Call) -> None:
        if call.json().get("stream"):
            await call.send(head("200 OK", *SSE, "Transfer-Encoding: chunked") + chunk(token("a")))
            await held.wait()
            await call.send(chunk(DONE) + b"0\r\n\r\n")
        else:
            await call.send(head("200 OK", "Content-Length: 2") + b"{}")

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        for body, first in ((STREAMED, chunk(token("a"))), (b'{"model": "m", "prompt": "hello"}', b"{}")):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(raw_post(body))
            read = await reader.read(1 << 16)  # what came at once
            assert read.startswith(b"HTTP/1.1 200 OK\r\n")
            assert read.endswith(b"\r\n\r\n" + first)
            held.set()
            await reader.read()
            writer.close()


async def test_the_engine_gets_the_clients_headers_and_nothing_else() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        await exchange(
            proxy,
            raw_post(
                REQUESTS[0],
                "Content-Type: application/json",
                "Authorization: Bearer sk-secret",
                "X-Session-ID: s1",
                "X-Vllm-Priority: 3",
                "X-Twice: 1",
                "X-Twice: 2",
                "X-Empty:",
                "X-Hop: secret",
                "Connection: keep-alive, X-Hop",
                "Keep-Alive: timeout=5",
                "TE: trailers",
                "Proxy-Authorization: Basic x",
                "Proxy-Connection: keep-alive",
                "x-slo-class: strict",
                "X-SLO-TTFT-ms: 500",
                "x-slai-anything: 1",
                "X-Request-Id: my-id_1",
            ),
        )
        assert [(name.lower(), value) for name, value in engine.calls[0].headers] == [
            ("host", f"127.0.0.1:{engine.port}"),
            ("content-type", "application/json"),
            ("authorization", "Bearer sk-secret"),
            ("x-session-id", "s1"),
            ("x-vllm-priority", "3"),
            ("x-twice", "1"),
            ("x-twice", "2"),
            ("x-empty", ""),
            ("x-request-id", "my-id_1"),
            ("accept-encoding", "identity"),
            ("content-length", str(len(REQUESTS[0]))),
        ]


async def test_a_header_repeated_in_another_spelling_keeps_both_values() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        await exchange(proxy, raw_post(STREAMED, "X-A: 1", "x-a: 2"))
        assert engine.calls[0].header("x-a") == ["1", "2"]


async def test_the_client_gets_the_engines_headers_and_hop_by_hop_ones_of_its_own() -> None:
    async def script(call: Call) -> None:
        lines = (
            "Server: uvicorn",
            "Date: Mon, 01 Jan 2001 00:00:00 GMT",
            "Set-Cookie: a=1; Path=/",
            "Set-Cookie: b=2; HttpOnly",
            "X-Custom: ünï".encode().decode("latin-1"),
            "Connection: close, X-Hop",
            "X-Hop: secret",
            "Keep-Alive: timeout=5",
            "Trailer: Expires",
            "Transfer-Encoding: chunked",
        )
        await call.send(head("200 OK", *SSE, *lines) + chunk(token()) + b"0\r\n\r\n")

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        answer = await exchange(proxy, raw_post(STREAMED, "X-Request-Id: r1"))
        lines, _, body = answer.partition(b"\r\n\r\n")
        assert lines.decode().split("\r\n") == [
            "HTTP/1.1 200 OK",
            "Content-Type: text/event-stream; charset=utf-8",
            "Server: uvicorn",
            "Date: Mon, 01 Jan 2001 00:00:00 GMT",
            "Set-Cookie: a=1; Path=/",
            "Set-Cookie: b=2; HttpOnly",
            "X-Custom: ünï",
            "X-Request-Id: r1",
            "Transfer-Encoding: chunked",
            "Connection: close",
        ]
        assert body == chunk(token()) + b"0\r\n\r\n"


ENGINES_HEADS = {
    "plain": (*JSON, "Content-Length: 2"),
    "no type": ("Content-Length: 2",),
    "own date, server and id": (*JSON, "Content-Length: 2", "date: Mon, 01 Jan 2001", "SERVER: x", "x-request-id: its"),
    "repeated": (*JSON, "Set-Cookie: a=1", "content-length: 2", "set-cookie: b=2"),
    "hop by hop": (*JSON, "Content-Length: 2", "Connection: x-hop", "X-Hop: secret", "Keep-Alive: timeout=5"),
    "limits": (*JSON, "Content-Length: 2", "x-ratelimit-limit-requests: 1", "X-RateLimit-Limit-Tokens: 2"),
    "in chunks": (*JSON, "Transfer-Encoding: chunked"),
}


@pytest.mark.parametrize("status", ["200 OK", "201 Made", "404 Not Found", "500 Oops"])
@pytest.mark.parametrize("name", ENGINES_HEADS)
async def test_heads_are_alike_whether_the_connection_stays_open_or_not(name: str, status: str) -> None:
    async def script(call: Call) -> None:
        body = chunk(b"{}") + b"0\r\n\r\n" if name == "in chunks" else b"{}"
        await call.send(head(status, *ENGINES_HEADS[name]) + body)

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        request = raw_post(REQUESTS[0], "X-Request-Id: r1")
        closed = (await exchange(proxy, request)).partition(b"\r\n\r\n")[0].split(b"\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request.replace(b"Connection: close\r\n", b""))
        left_open = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n").split(b"\r\n")
        writer.close()
        assert left_open[0] == closed[0] == f"HTTP/1.1 {status}".encode()
        assert undated(left_open[1:]) == undated(line for line in closed[1:] if line != b"Connection: close")


def undated(lines: Iterable[bytes]) -> list[bytes]:
    return sorted(b"Date: now" if line.startswith(b"Date: ") else line for line in lines)


async def test_a_client_that_asks_is_told_how_long_its_request_was_held_back() -> None:
    async def script(call: Call) -> None:
        await call.send(head("200 OK", *SSE, "Server-Timing: cpu;dur=3", "Connection: close") + token() + DONE)
        call.close()

    async with scripted_engine(script) as engine, live_proxy(engine, max_num_seqs=1) as proxy:
        for asked, told in (({"x-slai-timing": "1"}, 2), ({}, 1)):
            async with proxy.post(headers=asked) as response:
                await response.read()
            timing = response.headers.getall("Server-Timing")
            assert timing[0] == "cpu;dur=3"
            assert len(timing) == told
            assert 0.0 <= (queue_seconds(response.headers) or 0.0) < 5.0
        assert not any(call.header("x-slai-timing") for call in engine.calls)


async def test_the_time_in_the_queue_is_from_arrival_to_the_engine() -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin()
        await call.write(token())
        await go.wait()
        await call.write(DONE)
        await call.end()

    async with scripted_engine(script) as engine, live_proxy(engine, max_num_seqs=1) as proxy:
        clock = asyncio.get_running_loop().time
        first = asyncio.ensure_future(proxy.fetch())
        await until(lambda: engine.calls)
        asked_at = clock()
        second = asyncio.ensure_future(proxy.client.post(COMPLETIONS, data=STREAMED, headers={"x-slai-timing": "1"}))
        await until(lambda: proxy.scheduler.waiting == 1)
        waits_at = clock()
        await until(lambda: clock() > waits_at + 0.02)
        released_at = clock()
        go.set()
        async with await second as response:
            told = queue_seconds(response.headers)
            assert told is not None
            assert released_at - waits_at - 0.001 < told < clock() - asked_at
            await response.read()
        await first


async def test_a_connection_that_the_engine_closes_leaves_the_clients_open() -> None:
    async def script(call: Call) -> None:
        await call.answer(b"{}", headers=("Connection: close",))
        call.close()

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        for _ in range(3):
            async with proxy.post(body=REQUESTS[0]) as response:
                assert response.status == 200
                assert "Connection" not in response.headers
        assert len({id(call.writer) for call in engine.calls}) == 3


class TestRequestId:
    async def echoed(self, proxy: LiveProxy, *headers: str) -> str:
        answer = await exchange(proxy, raw_post(STREAMED, *headers))
        (line,) = [
            line for line in answer.split(b"\r\n\r\n")[0].split(b"\r\n") if line.lower().startswith(b"x-request-id")
        ]
        return line.partition(b": ")[2].decode()

    async def test_the_clients_own_goes_to_the_engine_and_back(self) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            assert await self.echoed(proxy, "x-request-id: abc-DEF_1") == "abc-DEF_1"
            assert engine.calls[0].header("x-request-id") == ["abc-DEF_1"]

    @pytest.mark.parametrize(
        "value", ["", "a b", "x\ty", "<script>", "a%0d%0aSet-Cookie: x", "é", "x" * 129, '{"a":1}']
    )
    async def test_one_that_could_do_harm_is_replaced(self, value: str) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            found = await self.echoed(proxy, f"X-Request-Id: {value}")
            assert found != value
            assert found.isalnum()
            assert engine.calls[0].header("x-request-id") == [found]

    async def test_without_one_each_request_gets_its_own(self) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            ids = {await self.echoed(proxy) for _ in range(3)}
            assert len(ids) == 3
            assert {call.header("x-request-id")[0] for call in engine.calls} == ids

    async def test_the_engines_answer_wins(self) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            engine.script = lambda call: call.answer(b"{}", headers=("X-Request-Id: engines",))
            assert await self.echoed(proxy, "X-Request-Id: clients") == "engines"

    async def test_clients_that_use_one_id_do_not_meet(self) -> None:
        both = asyncio.Event()

        async def script(call: Call) -> None:
            if len(engine.calls) == 2:
                both.set()
            await both.wait()
            await call.answer(call.body)

        async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
            bodies = [b'{"model":"m","prompt":"one"}', b'{"model":"m","prompt":"two"}']
            found = await asyncio.gather(*(proxy.fetch(body=b, headers={"X-Request-Id": "same"}) for b in bodies))
            assert found == [(200, body) for body in bodies]
            assert proxy.outcomes() == {"completed": 2}

    async def test_refusals_have_it_too(self) -> None:
        async with (
            scripted_engine() as engine,
            live_proxy(engine) as proxy,
            proxy.post(body=b"{bad", headers={"X-Request-Id": "r7"}) as response,
        ):
            assert response.headers["X-Request-Id"] == "r7"


async def test_a_traceparent_passes_where_nothing_is_traced() -> None:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "v=1"}
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        await proxy.fetch(headers=headers)
        call = engine.calls[0]
        assert {name: call.header(name) for name in headers} == {name: [value] for name, value in headers.items()}


async def test_one_clients_cookies_are_not_anothers() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        engine.script = lambda call: call.answer(b"{}", headers=("Set-Cookie: session=1; Path=/",))
        await proxy.fetch()
        await proxy.fetch(headers={"Cookie": "mine=2"})
        await proxy.fetch()
        assert [call.header("cookie") for call in engine.calls] == [[], ["mine=2"], []]


@pytest.mark.parametrize("query", ["?api-version=2024-01-01", "?a=%20b&&c=%2F;d=+", "?x=1?y=2", "?%zz"])
async def test_the_query_is_kept_and_does_not_change_the_way(query: str) -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        await exchange(proxy, raw_post(STREAMED, path=COMPLETIONS + query))
        assert engine.calls[0].target == COMPLETIONS + query
        assert proxy.outcomes() == {"completed": 1}


async def test_an_engine_behind_a_path() -> None:
    async with scripted_engine() as engine, live_proxy(f"{engine.url}/behind/a/path") as proxy:
        await proxy.fetch()
        paths = ("/health", "/v1/models", "/metrics", COMPLETIONS)
        assert {call.target for call in engine.calls} == {"/behind/a/path" + path for path in paths}


async def test_expect_continue() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        request = raw_post(STREAMED, "Expect: 100-continue")
        writer.write(request.removesuffix(STREAMED))
        async with asyncio.timeout(5):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(STREAMED)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
        assert engine.calls[0].header("expect") == []


async def test_a_body_in_chunks_reaches_the_engine_whole() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        pieces = b"".join(chunk(STREAMED[n : n + 7]) for n in range(0, len(STREAMED), 7)) + b"0\r\n\r\n"
        request = raw_post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"") + pieces
        assert (await exchange(proxy, request)).startswith(b"HTTP/1.1 200 OK\r\n")
        assert engine.calls[0].body == STREAMED
        assert engine.calls[0].header("content-length") == [str(len(STREAMED))]


async def test_a_client_of_http_1_0_gets_its_stream_to_the_end_of_the_connection() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        answer = await exchange(proxy, raw_post(STREAMED).replace(b"HTTP/1.1", b"HTTP/1.0"))
        lines, _, body = answer.partition(b"\r\n\r\n")
        assert b"chunked" not in lines
        assert body == token("a") + token("b") + last() + DONE


async def test_requests_in_a_row_on_one_connection_are_answered_in_order() -> None:
    async with scripted_engine(lambda call: call.answer(call.body)) as engine, live_proxy(engine) as proxy:
        bodies = [json.dumps({"model": "m", "prompt": str(n)}).encode() for n in range(5)]
        requests = [raw_post(body) for body in bodies]
        open_ones = [request.replace(b"Connection: close\r\n", b"") for request in requests[:-1]]
        answer = await exchange(proxy, b"".join([*open_ones, requests[-1]]))
        assert answer.count(b"HTTP/1.1 200 OK") == 5
        assert sorted(bodies, key=answer.index) == bodies
        assert proxy.outcomes() == {"completed": 5}


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
async def test_http_1_0_sees_the_end_of_what_has_no_length_although_it_would_keep_the_connection(path: str) -> None:
    async def script(call: Call) -> None:
        await call.stream(token("a"), DONE)

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        request = f"POST {path} HTTP/1.0\r\nHost: proxy\r\nConnection: keep-alive\r\nContent-Length: {len(STREAMED)}"
        answer = await asyncio.wait_for(exchange(proxy, request.encode() + b"\r\n\r\n" + STREAMED), 3)
        assert b"Transfer-Encoding" not in answer
        assert answer.endswith(b"\r\n\r\n" + token("a") + DONE)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
async def test_a_reason_that_no_head_may_have_is_told_as_far_as_it_may(path: str) -> None:
    engine_says = (b"a\x01b", b"\xe9\xff", b"it's\tfine", b"")
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        for reason in engine_says:

            async def script(call: Call, reason: bytes = reason) -> None:
                await call.send(b"HTTP/1.1 200 %b\r\nX-Odd: \xe9\tx\r\nContent-Length: 2\r\n\r\n{}" % reason)

            engine.script = script
            request = raw_post(REQUESTS[0], path=path)
            two = request.replace(b"Connection: close\r\n", b"") + request
            first, second = (await exchange(proxy, two)).split(b"{}")[:2]
            for begun in (first, second):
                assert begun.startswith(b"HTTP/1.1 200 "), reason
                assert begun.endswith(b"\r\n\r\n")
        assert not proxy.reasons()
