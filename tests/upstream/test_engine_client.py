"""The client of engines against a server that misbehaves at every point of an answer."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing

import pytest
from live_proxy import until
from scripted_engine import Call, Script, head, scripted_engine

from proxy.upstream.client import EngineAnswer, EngineClient, EngineError, Timeouts
from proxy.wire.errors import UpstreamFailure

PATH = "/v1/completions"


@asynccontextmanager
async def client_of(*, connect: float = 5.0, idle: float = 5.0) -> AsyncIterator[EngineClient]:
    client = EngineClient(Timeouts(connect, idle))
    try:
        yield client
    finally:
        await client.close()


async def ask(
    client: EngineClient,
    url: str,
    *,
    method: str = "POST",
    path: str = PATH,
    headers: Iterable[tuple[str, str]] = (),
    body: bytes = b"{}",
) -> tuple[int, bytes]:
    async with client.send(url, method, path, headers, body) as response:
        return response.status, b"".join([data async for data in response.chunks()])


async def failure(client: EngineClient, url: str) -> UpstreamFailure:
    with pytest.raises(EngineError) as caught:
        await ask(client, url)
    return caught.value.failure


def busy_connections(client: EngineClient) -> int:
    return client.busy


class TestFailures:
    async def test_refused(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            port = taken.getsockname()[1]
        async with client_of() as client:
            assert await failure(client, f"http://127.0.0.1:{port}") is UpstreamFailure.CONNECT_FAILED

    async def test_a_connection_that_is_not_accepted_in_time(self) -> None:
        """Told apart from an engine that is silent: nothing was sent, so the request may go elsewhere."""
        with closing(socket.socket()) as server:
            server.bind(("127.0.0.1", 0))
            server.listen(0)
            address = server.getsockname()
            fillers = [socket.socket() for _ in range(3)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(address)
            async with client_of(connect=0.2) as client:
                assert await failure(client, f"http://127.0.0.1:{address[1]}") is UpstreamFailure.CONNECT_FAILED
            for filler in fillers:
                filler.close()

    async def test_no_tls_where_tls_was_expected(self) -> None:
        async with scripted_engine() as engine, client_of(connect=0.2) as client:
            assert await failure(client, engine.url.replace("http", "https")) is UpstreamFailure.CONNECT_FAILED
            assert engine.calls == []

    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b"", UpstreamFailure.CUT_BEFORE_ANSWER),
            (b"HTTP/1.1 200 OK\r\nContent-", UpstreamFailure.CUT_BEFORE_ANSWER),
            (b"\x00\x01garbage\r\n\r\n", UpstreamFailure.CUT_BEFORE_ANSWER),
            (head("200 OK", "Content-Length: 10") + b"12345", UpstreamFailure.CUT_MID_STREAM),
            (head("200 OK", "Transfer-Encoding: chunked") + b"5\r\n12345\r\n", UpstreamFailure.CUT_MID_STREAM),
            (head("200 OK", "Transfer-Encoding: chunked") + b"5\r\n123", UpstreamFailure.CUT_MID_STREAM),
        ],
    )
    @pytest.mark.parametrize("end", ["FIN", "RST"])
    async def test_cut(self, data: bytes, end: str, expected: UpstreamFailure) -> None:
        async def script(call: Call) -> None:
            await call.send(data)
            (call.close if end == "FIN" else call.reset)()

        async with scripted_engine(script) as engine, client_of() as client:
            found = await failure(client, engine.url)
            if end == "FIN":
                assert found is expected
            else:  # a reset may overtake what was sent before it
                assert found in (UpstreamFailure.CUT_BEFORE_ANSWER, expected)
            assert len(engine.calls) == 1, "nothing is sent twice on its own"
            assert busy_connections(client) == 0

    @pytest.mark.parametrize(
        "data", [b"", head("200 OK", "Content-Length: 10"), head("200 OK", "Content-Length: 9") + b"1"]
    )
    async def test_silence(self, data: bytes) -> None:
        async def script(call: Call) -> None:
            await call.send(data)
            await call.gone.wait()

        async with scripted_engine(script) as engine, client_of(idle=0.1) as client:
            assert await failure(client, engine.url) is UpstreamFailure.TIMED_OUT
            async with asyncio.timeout(1):
                await engine.calls[0].gone.wait()


class TestRelay:
    async def test_a_stream_may_last_longer_than_the_idle_timeout(self) -> None:
        """Only silence is limited; aiohttp's own default would end every answer after five minutes."""
        pieces = 8

        async def script(call: Call) -> None:
            await call.begin()
            for _ in range(pieces):
                await asyncio.sleep(0.05)  # the engine's work, not a wait of the test
                await call.write(b"x")
            await call.end()

        async with scripted_engine(script) as engine, client_of(idle=0.2) as client:
            assert await ask(client, engine.url) == (200, b"x" * pieces)

    async def test_a_slow_reader_does_not_make_the_engine_a_silent_one(self) -> None:
        """Only while we wait for the engine does its silence count."""
        idle, read_again = 0.2, asyncio.Event()

        async def script(call: Call) -> None:
            await call.begin()
            await call.write(b"a")
            await read_again.wait()
            await call.write(b"b")
            await call.end()

        async with (
            scripted_engine(script) as engine,
            client_of(idle=idle) as client,
            client.send(engine.url, "POST", PATH, (), b"{}") as response,
        ):
            pieces = response.chunks()
            assert await anext(pieces) == b"a"
            await asyncio.sleep(3 * idle)  # the reader's slowness, not a wait of the test
            read_again.set()
            assert [piece async for piece in pieces] == [b"b"]

    async def test_many_answers_at_once_do_not_queue_for_connections(self) -> None:
        everybody = asyncio.Event()
        streams = 130  # aiohttp's default limit is 100

        async def script(call: Call) -> None:
            if len(engine.calls) == streams:
                everybody.set()
            await everybody.wait()
            await call.answer(b"ok")

        async with scripted_engine(script) as engine, client_of() as client:
            answers = await asyncio.gather(*(ask(client, engine.url) for _ in range(streams)))
            assert answers == [(200, b"ok")] * streams

    async def test_a_finished_answer_gives_its_connection_back(self) -> None:
        async with scripted_engine() as engine, client_of() as client:
            for _ in range(3):
                await ask(client, engine.url)
            assert engine.connections == 1
            assert len({id(call.writer) for call in engine.calls}) == 1

    async def test_leaving_early_closes_the_connection(self) -> None:
        async def script(call: Call) -> None:
            await call.begin()
            await call.write(b"x")
            await call.gone.wait()

        async with scripted_engine(script) as engine, client_of() as client:
            async with client.send(engine.url, "POST", PATH, (), b"{}") as response:
                async for _ in response.chunks():
                    break
            async with asyncio.timeout(1):
                await engine.calls[0].gone.wait()
            assert busy_connections(client) == 0

    async def test_leaving_an_answer_unread_closes_the_connection(self) -> None:
        """A 503 with a body, which nobody reads: the rest must not be taken for the next answer."""

        async def script(call: Call) -> None:
            await call.answer(b"busy" * 100, status="503 Service Unavailable")

        async with scripted_engine(script) as engine, client_of() as client:
            async with client.send(engine.url, "POST", PATH, (), b"{}") as response:
                assert response.status == 503
            engine.script = lambda call: call.answer(b"next")
            assert await ask(client, engine.url) == (200, b"next")

    async def test_cancelling_closes_the_connection(self) -> None:
        async with scripted_engine(lambda call: until(call.gone.is_set)) as engine, client_of() as client:
            task = asyncio.ensure_future(ask(client, engine.url))
            await until(lambda: engine.calls)
            task.cancel()
            await asyncio.wait([task])
            async with asyncio.timeout(1):
                await engine.calls[0].gone.wait()
            assert busy_connections(client) == 0

    async def test_a_compressed_body_passes_as_it_is(self) -> None:
        packed = gzip.compress(b"hello" * 100)
        script: Script = lambda call: call.answer(packed, headers=("Content-Encoding: gzip",))  # noqa: E731
        async with scripted_engine(script) as engine, client_of() as client:
            assert await ask(client, engine.url) == (200, packed)

    async def test_redirects_are_the_clients_affair(self) -> None:
        async with scripted_engine() as engine, client_of() as client:
            location = f"Location: {engine.url}/elsewhere"
            engine.script = lambda call: call.answer(b"", status="307 Temporary Redirect", headers=(location,))
            assert await ask(client, engine.url) == (307, b"")
            assert len(engine.calls) == 1

    async def test_no_cookie_is_kept(self) -> None:
        async with scripted_engine() as engine, client_of() as client:
            engine.script = lambda call: call.answer(b"", headers=("Set-Cookie: session=of-client-a; Path=/",))
            await ask(client, engine.url)
            await ask(client, engine.url)
            assert engine.calls[1].header("cookie") == []

    async def test_nothing_is_added_to_the_head_but_host_and_length(self) -> None:
        async with scripted_engine() as engine, client_of() as client:
            await ask(client, engine.url, headers=[("X-Twice", "1"), ("X-Twice", "2"), ("Accept", "a/b")])
            assert sorted(engine.calls[0].headers) == [
                ("Accept", "a/b"),
                ("Content-Length", "2"),
                ("Host", f"127.0.0.1:{engine.port}"),
                ("X-Twice", "1"),
                ("X-Twice", "2"),
            ]

    @pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    async def test_a_request_without_a_body(self, method: str) -> None:
        async with scripted_engine() as engine, client_of() as client:
            await ask(client, engine.url, method=method, body=b"")
            call = engine.calls[0]
            assert (call.method, call.body, call.header("content-type")) == (method, b"", [])
            assert call.header("transfer-encoding") == []

    @pytest.mark.parametrize("path", ["/a/../b", "//x", "/a%2Fb?c=%20d&&e", "/%zz", "/a?", "/"])
    async def test_the_path_goes_out_as_it_came(self, path: str) -> None:
        async with scripted_engine() as engine, client_of() as client:
            await ask(client, engine.url, path=path)
            assert engine.calls[0].target == path

    async def test_environment_proxies_and_netrc_are_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        async with scripted_engine() as engine, client_of() as client:
            assert (await ask(client, engine.url))[0] == 200


async def test_an_idle_connection_is_given_up_before_the_engine_closes_it() -> None:
    """vLLM closes after 5 s; a request sent at that moment would fail, and might have been read."""
    async with scripted_engine() as engine, client_of() as client:
        await ask(client, engine.url)
        (connection,) = client._engines[engine.url].idle
        connection.idle_since -= 4.5
        await ask(client, engine.url)
        assert len({id(call.writer) for call in engine.calls}) == 2


async def test_a_connection_that_the_engine_closed_is_not_used_again() -> None:
    """Also where the end of it has come but the loop has not told yet."""
    async with scripted_engine() as engine, client_of() as client:

        async def script(call: Call) -> None:
            await call.answer(b"ok")
            call.close()

        engine.script = script
        for _ in range(50):
            assert await ask(client, engine.url) == (200, b"ok")
        await until(lambda: client.idle(engine.url) == 0)


async def test_who_leaves_just_as_the_whole_answer_has_come_leaves_no_connection_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection is as good as new, and belongs to whoever comes next."""
    wake = EngineAnswer._wake

    def cancel_at_the_end(answer: EngineAnswer) -> None:
        wake(answer)
        if answer._complete:
            leaving.cancel()

    async with scripted_engine() as engine, client_of() as client:
        monkeypatch.setattr(EngineAnswer, "_wake", cancel_at_the_end)
        leaving = asyncio.ensure_future(ask(client, engine.url))
        with pytest.raises(asyncio.CancelledError):
            await leaving
        monkeypatch.undo()
        assert (client.busy, client.idle(engine.url), engine.connections) == (0, 1, 1)
        assert (await ask(client, engine.url))[0] == 200
        assert engine.connections == 1


async def test_who_leaves_while_the_rest_of_a_whole_answer_waits_for_it_leaves_a_connection_that_reads() -> None:
    """Else whoever comes next on that connection would wait for an answer that nobody reads."""
    waiting = asyncio.Event()

    async def drain() -> None:
        waiting.set()
        await asyncio.Event().wait()  # a client that has stopped to read

    async def leave(client: EngineClient, url: str) -> None:
        async with client.send(url, "POST", PATH, (), b"{}") as response:
            await response.pump(lambda *_: False, drain)

    async with scripted_engine() as engine, client_of(idle=0.5) as client:
        leaving = asyncio.ensure_future(leave(client, engine.url))
        await waiting.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (await ask(client, engine.url))[0] == 200
