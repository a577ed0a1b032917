"""What a connection makes of an answer's bytes, however they come."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import accumulate
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_proxy import until
from scripted_engine import Call, chunk, head, scripted_engine

from proxy.upstream.client import EngineAnswer, EngineClient, EngineError, Timeouts
from proxy.upstream.connection import Connection, Watch
from proxy.wire import chunks
from proxy.wire.errors import UpstreamFailure

PATH = "/v1/completions"


async def never() -> None:
    raise AssertionError("nobody has to wait")


async def whole(answer: EngineAnswer) -> bytes:
    await answer.head()
    return await answer.read()


class Wire:
    """A connection whose bytes the test brings."""

    def __init__(self) -> None:
        self.written = b""
        self.reading = True
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.written += b"".join(parts)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.aborted = True


@asynccontextmanager
async def asked(method: str = "POST", idle: float = 5.0) -> AsyncIterator[tuple[Connection, Wire, EngineAnswer]]:
    watch = Watch(asyncio.get_running_loop())
    connection, wire = Connection(watch), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    answer = connection.ask(method, b"", b"", idle)
    yield connection, wire, answer
    answer.close()
    assert not len(watch)
    watch.close()


WHOLE = [
    (head("200 OK", "Content-Length: 5") + b"hello", b"hello", True),
    (head("200 OK", "Transfer-Encoding: chunked") + chunk(b"hel") + chunk(b"lo") + b"0\r\n\r\n", b"hello", True),
    (head("200 OK", "Transfer-Encoding: chunked") + chunk(b"x") + b"0\r\nX-Trailer: 1\r\n\r\n", b"x", True),
    (head("200 OK", "Transfer-Encoding: chunked") + b"1;ext=1\r\nx\r\n0\r\n\r\n", b"x", True),
    (
        head("100 Continue") + head("103 Early Hints", "Link: </a>") + head("200 OK", "Content-Length: 1") + b"x",
        b"x",
        True,
    ),
    (head("204 No Content"), b"", True),
    (head("200 OK", "Content-Length: 0"), b"", True),
    (head("200 OK", "Content-Length: 1", "Connection: close") + b"x", b"x", False),
    (head("200 OK", "Content-Length: 1").replace(b"1.1", b"1.0") + b"x", b"x", False),
    (head("200 OK", "Content-Length: 1") + b"xHTTP/1.1 200 OK\r\n", b"x", False),
    (head("200 OK", "Content-Length: 1") + b"xgarbage", b"x", False),
]


@pytest.mark.parametrize(("data", "body", "reusable"), WHOLE)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_a_whole_answer_in_pieces_of_any_size(data: bytes, body: bytes, reusable: bool, size: int) -> None:
    async with asked() as (connection, _, answer):
        for at in range(0, len(data), size):
            connection.data_received(data[at : at + size])
        await answer.head()
        assert await answer.read() == body
        assert (answer.close() is connection) is reusable
        assert "Link" not in answer.headers
        assert "X-Trailer" not in answer.headers


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_a_pump_gives_the_bytes_that_a_reader_gets(pieces: list[bytes], data: st.DataObject) -> None:
    """Whatever the reads' cuts, and whenever the pump starts."""
    wire = head("200 OK", "Transfer-Encoding: chunked") + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
    between = list(accumulate([len(head("200 OK", "Transfer-Encoding: chunked")), *(len(chunk(p)) for p in pieces)]))
    anywhere = st.integers(1, len(wire) - 1)
    cuts = sorted(data.draw(st.sets(st.one_of(anywhere, st.sampled_from(between)), max_size=10)))
    reads = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    start = data.draw(st.integers(0, len(reads)))

    async def main() -> bytes:
        got: list[bytes] = []

        def sink(data: bytes, read: bytes | None) -> bool:
            assert read is None or read == chunks.chunk(data)
            got.append(data)
            return True

        async with asked() as (connection, _, answer):
            for read in reads[:start]:
                connection.data_received(read)
            pump = asyncio.ensure_future(answer.pump(sink, never))
            for read in reads[start:]:
                await asyncio.sleep(0)
                connection.data_received(read)
            await pump
            assert b"" not in got
            return b"".join(got)

    assert asyncio.run(main()) == b"".join(pieces)


ODD = [
    *(b"0\r\n\r\n", b"0\r\nX-Trailer: 1\r\n\r\n", b"00\r\n\r\n", b"02\r\nok\r\n", b"A\r\n0123456789\r\n"),
    *(b"2;a=b\r\nok\r\n", b'2;a="\r\n"\r\nok\r\n', b"2 \r\nok\r\n", b" 2\r\nok\r\n", b"0x2\r\nok\r\n", b"+2\r\nok\r\n"),
    *(
        b"3\r\nok\r\n",
        b"1\r\nok\r\n",
        b"2\nok\n",
        b"2\r\nokX\n",
        b"2\r\n",
        b"ok\r\n",
        b"\r\n",
        b"g\r\nok\r\n",
        b"HTTP/1.1 ",
    ),
]
"""What a chunk of ours is not; some of it is none at all."""


@given(st.lists(st.one_of(st.binary(min_size=1, max_size=20).map(chunk), st.sampled_from(ODD)), max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_chunk_that_is_a_read_of_its_own_is_taken_as_its_parser_takes_it(parts: list[bytes]) -> None:
    """And where the parser refuses what comes before it, or finds its end there, it is taken no more."""
    begins = head("200 OK", "Transfer-Encoding: chunked")

    async def found(*reads: bytes) -> tuple[object, ...]:
        got = b""

        def sink(data: bytes, _: bytes | None) -> bool:
            nonlocal got
            got += data
            return True

        async with asked() as (connection, _, answer):
            connection.data_received(begins)
            pump = asyncio.ensure_future(answer.pump(sink, never))
            await asyncio.sleep(0)
            for read in reads:
                connection.data_received(read)
            connection.connection_lost(None)
            (failure,) = await asyncio.gather(pump, return_exceptions=True)
            return got, str(failure), connection.closed

    async def main() -> None:
        whole = b"".join(parts)
        assert await found(*parts) == await found(*([whole] if whole else []))

    asyncio.run(main())


async def test_a_body_that_the_connection_ends() -> None:
    for orderly in (True, False):
        async with asked() as (connection, _, answer):
            connection.data_received(head("200 OK") + b"abc")
            connection.connection_lost(None if orderly else ConnectionResetError())
            assert answer.ends_with_connection
            if orderly:
                assert await answer.read() == b"abc"
            else:
                pieces = answer.chunks()
                assert await anext(pieces) == b"abc"
                with pytest.raises(EngineError) as caught:
                    await anext(pieces)
                assert caught.value.failure is UpstreamFailure.CUT_MID_STREAM
            assert answer.close() is None


async def test_an_answer_to_head_has_no_body() -> None:
    async with asked("HEAD") as (connection, _, answer):
        connection.data_received(head("200 OK", "Content-Length: 500"))
        await answer.head()
        assert answer.headers["Content-Length"] == "500"
        assert await answer.read() == b""


@pytest.mark.parametrize(
    ("before", "failure"),
    [
        (b"HTTP/1.1 200 OK\r\nX: ", UpstreamFailure.CUT_BEFORE_ANSWER),
        (head("100 Continue") * 3000, UpstreamFailure.CUT_BEFORE_ANSWER),
        (head("200 OK", "Transfer-Encoding: chunked") + b"1;", UpstreamFailure.CUT_MID_STREAM),
        (head("200 OK", "Transfer-Encoding: chunked") + b"0\r\nX: ", UpstreamFailure.CUT_MID_STREAM),
    ],
)
async def test_overhead_without_an_end_is_cut(before: bytes, failure: UpstreamFailure) -> None:
    async with asked() as (connection, _, answer):
        connection.data_received(before)
        for _ in range(70):
            connection.data_received(b"a" * 1000)
        with pytest.raises(EngineError) as caught:
            await whole(answer)
        assert caught.value.failure is failure


@pytest.mark.parametrize(
    "data",
    [
        head("200 OK", "Content-Length: 5", "Content-Length: 6") + b"hello!",
        head("200 OK", "Content-Length: 5", "Transfer-Encoding: chunked") + b"hello",
        head("200 OK", "Content-Length: -1"),
        head("101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"),
        b"HTTP/3.0 200 OK\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
async def test_an_answer_that_can_be_read_in_two_ways_is_none(data: bytes) -> None:
    async with asked() as (connection, _, answer):
        connection.data_received(data)
        with pytest.raises(EngineError):
            await answer.head()
        assert answer.close() is None


async def test_what_nobody_asked_for_closes_the_connection() -> None:
    watch = Watch(asyncio.get_running_loop())
    connection, wire = Connection(watch), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert wire.aborted


async def test_an_answer_that_nobody_reads_stops_the_engine() -> None:
    async with asked() as (connection, wire, answer):
        connection.data_received(head("200 OK", "Content-Length: 1000000"))
        sent = 0
        while wire.reading:
            connection.data_received(b"x" * 10_000)
            sent += 10_000
        assert sent < 100_000
        pieces = answer.chunks()
        assert len(await anext(pieces)) == sent
        assert wire.reading


async def test_a_client_that_does_not_keep_up_stops_the_engine_until_it_has() -> None:
    got: list[bytes] = []
    slow, drained = True, asyncio.Event()

    def sink(data: bytes, _: bytes | None) -> bool:
        got.append(data)
        return not slow

    async with asked() as (connection, wire, answer):
        connection.data_received(head("200 OK", "Content-Length: 3") + b"a")
        pump = asyncio.ensure_future(answer.pump(sink, drained.wait))  # type: ignore[arg-type]
        await until(lambda: got)
        assert not wire.reading
        connection.data_received(b"b")  # was on its way already
        slow = False
        drained.set()
        await until(lambda: wire.reading)
        connection.data_received(b"c")
        await pump
        assert got == [b"a", b"b", b"c"]


async def test_while_the_client_is_waited_for_the_engine_is_not_silent() -> None:
    drained = asyncio.Event()

    def sink(*_: object) -> bool:
        return drained.is_set()

    async with asked(idle=0.05) as (connection, _, answer):
        connection.data_received(head("200 OK", "Content-Length: 2") + b"a")
        pump = asyncio.ensure_future(answer.pump(sink, drained.wait))  # type: ignore[arg-type]
        await asyncio.sleep(0.15)  # the client's slowness, not a wait of the test
        drained.set()
        await asyncio.sleep(0)
        connection.data_received(b"b")
        await pump


async def test_a_silent_engine_ends_a_pump() -> None:
    async with asked(idle=0.05) as (connection, _, answer):
        connection.data_received(head("200 OK", "Content-Length: 2") + b"a")
        with pytest.raises(EngineError) as caught:
            await answer.pump(lambda *_: True, never)
        assert caught.value.failure is UpstreamFailure.TIMED_OUT


async def test_what_the_sink_raises_comes_out_of_the_pump_and_not_out_of_the_loop() -> None:
    calls = 0

    def sink(*_: object) -> bool:
        nonlocal calls
        calls += 1
        raise ConnectionResetError

    async with asked() as (connection, _, answer):
        pump = asyncio.ensure_future(answer.pump(sink, never))
        await asyncio.sleep(0)
        connection.data_received(head("200 OK", "Content-Length: 3") + b"a")
        connection.data_received(b"b")
        with pytest.raises(ConnectionResetError):
            await pump
        assert calls == 1
        assert answer.close() is None


async def test_a_large_body_goes_out_whole() -> None:
    async with scripted_engine() as engine:
        client = EngineClient(Timeouts(5.0, 5.0))
        body = b"x" * 3_000_000
        async with client.send(engine.url, "POST", PATH, (), body) as answer:
            await answer.read()
        assert engine.calls[0].body == body
        await client.close()


async def test_a_base_url_with_a_path() -> None:
    async with scripted_engine() as engine:
        client = EngineClient(Timeouts(5.0, 5.0))
        async with client.send(f"{engine.url}/a%20b/", "POST", "/v1/x?y=1", (), b""):
            pass
        assert engine.calls[0].target == "/a%20b/v1/x?y=1"
        await client.close()


async def test_closing_the_client_closes_idle_connections() -> None:
    async def script(call: Call) -> None:
        await call.answer(b"ok")

    async with scripted_engine(script) as engine:
        client = EngineClient(Timeouts(5.0, 5.0))
        async with client.send(engine.url, "POST", PATH, (), b"") as answer:
            await answer.read()
        assert client.idle(engine.url) == 1
        await client.close()
        async with asyncio.timeout(1):
            await engine.calls[0].gone.wait()


async def test_a_reason_cut_between_reads_comes_whole() -> None:
    async with asked() as (connection, _, answer):
        for byte in head("100 Continue") + head("218 This is fine", "Content-Length: 0"):
            connection.data_received(bytes([byte]))
        await answer.head()
        assert (answer.status, answer.reason) == (218, "This is fine")
        answer.close()


class Clock:
    """An event loop that has nothing but a time and timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, do: Callable[[], None]) -> "Clock":
        self.timers.append((when, do))
        return self

    def cancel(self) -> None:
        self.timers.pop()

    def go_on(self, seconds: float) -> None:
        until = self.now + seconds
        while self.timers and self.timers[0][0] <= until:
            self.now, do = self.timers.pop()
            do()
        self.now = until


class Waiting:
    """An answer that somebody waits for since some time."""

    def __init__(self, idle_seconds: float, since: float = 0.0) -> None:
        self.idle_seconds = idle_seconds
        self.since = since
        self.ended_at: float | None = None

    def check(self, now: float) -> float:
        if now - self.since < self.idle_seconds:
            return self.since + self.idle_seconds
        self.ended_at = self.ended_at or now
        return inf


def test_one_timer_does_for_all_answers_and_each_ends_in_its_time() -> None:
    clock = Clock()
    watch = Watch(clock)  # type: ignore[arg-type]
    answers = [Waiting(10.0, since=0.0), Waiting(10.0, since=3.0), Waiting(2.0, since=4.0), Waiting(10.0, since=5.0)]
    for answer in answers:
        clock.go_on(answer.since - clock.now)
        watch.add(answer)  # type: ignore[arg-type]
        assert len(clock.timers) == 1
    watch.remove(answers[3])  # type: ignore[arg-type]
    answers[1].since = 8.0  # something came
    clock.go_on(30.0)
    assert [answer.ended_at for answer in answers] == [10.0, 18.0, 6.0, None]
    assert not clock.timers, "nobody is left to look at"
    watch.add(Waiting(1.0, since=clock.now))  # type: ignore[arg-type]
    watch.close()
    assert not clock.timers
