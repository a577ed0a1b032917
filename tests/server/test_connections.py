"""Clients that take their time: heads, bodies and answers, and more connections than there may be."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import pytest
from live_proxy import LiveProxy, live_proxy, raw_post, until
from scripted_engine import DONE, Call, event, scripted_engine, token

from proxy.server.bodies import UPLOADS
from proxy.server.connections import _address

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\n"
BODY = b'{"model": "m", "prompt": "hello", "stream": true}'


@asynccontextmanager
async def client(proxy: LiveProxy) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, limit=1 << 16)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def rest(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(5):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


def no_patience(proxy: LiveProxy, *waits: str) -> None:
    """End what waits for a client to send a head, to use an idle connection or to read, as if its time was over."""
    limits = proxy.connections.limits
    proxy.connections.limits = replace(
        limits,
        head_seconds=0.0 if "head" in waits else limits.head_seconds,
        idle_seconds=0.0 if "idle" in waits else limits.idle_seconds,
        write_seconds=0.0 if "read" in waits else limits.write_seconds,
    )
    proxy.connections.sweep()


def stop_reading(writer: asyncio.StreamWriter) -> None:
    cast("asyncio.Transport", writer.transport).pause_reading()


@pytest.mark.parametrize("sent", [b"", b"P", HEAD, HEAD + b"Content-Length: 49\r\n"])
async def test_a_head_that_does_not_come_in_time_ends_the_connection(sent: bytes) -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy, client(proxy) as (reader, writer):
        writer.write(sent)
        await until(lambda: len(proxy.connections) == 1)
        for _ in range(20):  # what was sent is read, or the system tells the client of nothing but the end
            await asyncio.sleep(0)
        proxy.connections.sweep()
        assert len(proxy.connections) == 1, "there is still time"
        no_patience(proxy, "head")
        assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")
        assert proxy.connections.ended == {"head": 1, "idle": 0, "read": 0}
        assert proxy.samples("slai_connections_ended_total")[("head",)] == 1


async def test_a_second_request_on_a_connection_has_the_same_time_from_its_first_byte() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy, client(proxy) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 ")
        no_patience(proxy, "head")
        await asyncio.sleep(0)
        assert len(proxy.connections) == 1, "it waits for no head, it is idle"
        writer.write(b"GET /livez HT")
        await until(lambda: [c for c in proxy.connections._open.values() if c.head_begun])
        proxy.connections.sweep()
        assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")


async def test_an_idle_connection_ends_without_a_word() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy, client(proxy) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"ok\n")
        await until(lambda: [c for c in proxy.connections._open.values() if c.waits_since is not None])
        no_patience(proxy, "idle")
        assert await rest(reader) == b""
        assert proxy.connections.ended["idle"] == 1


async def test_a_request_under_way_is_not_waited_for() -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin()
        await call.write(token())
        await go.wait()
        await call.write(DONE)
        await call.end()

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy, proxy.post() as response:
        await response.content.readany()
        no_patience(proxy, "head", "idle")
        go.set()
        assert (await response.read()).endswith(DONE)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_body_that_does_not_come_in_time_is_refused(path: str) -> None:
    async with (
        scripted_engine() as engine,
        live_proxy(engine, body_timeout_seconds=0.05) as proxy,
        client(proxy) as (reader, writer),
    ):
        writer.write(HEAD.replace(b"/v1/completions", path.encode()) + b"Content-Length: 1000\r\n\r\n" + BODY[:10])
        async with asyncio.timeout(5):
            told = await reader.readuntil(b"}}")
        assert told.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in told
        assert not engine.calls


async def test_a_client_that_reads_nothing_holds_the_engine_back_and_is_cut() -> None:
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.begin()
        piece = event({"choices": [{"index": 0, "text": "x" * 4000}]})
        while not call.gone.is_set():
            await call.write(piece)
            sent += len(piece)

    async with (
        scripted_engine(script) as engine,
        live_proxy(engine) as proxy,
        client(proxy) as (_, writer),
    ):
        stop_reading(writer)
        writer.write(raw_post(BODY))
        connections = proxy.connections
        await until(lambda: [c for c in connections._open.values() if c._stuck_since is not None])
        before = -1
        while before != sent:  # until the engine's own write blocks
            before = sent
            for _ in range(200):
                await asyncio.sleep(0)
        proxy.connections.sweep()
        assert len(connections) == 1
        transport = next(iter(connections._open.values()))._transport
        assert transport is not None
        assert transport.get_write_buffer_size() < 1 << 20, "what waits for it is bounded"
        no_patience(proxy, "read")
        await until(lambda: not connections)
        await until(engine.calls[0].gone.is_set)
        assert connections.ended["read"] == 1
        await proxy.idle()
        assert proxy.outcomes() == {"client_gone": 1}


async def test_a_connection_that_is_closed_and_not_read_is_cut() -> None:
    async def script(call: Call) -> None:
        await call.answer(b"x" * (8 << 20))

    async with (
        scripted_engine(script) as engine,
        live_proxy(engine) as proxy,
        client(proxy) as (_, writer),
    ):
        stop_reading(writer)
        writer.write(raw_post(BODY, path="/v1/embeddings"))
        await until(lambda: [c for c in proxy.connections._open.values() if c._stuck_since is not None])
        no_patience(proxy, "read")
        await until(lambda: not proxy.connections)


async def test_no_more_connections_than_there_may_be(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_engine() as engine, live_proxy(engine, max_connections=2) as proxy:
        async with client(proxy), client(proxy) as (_, second):
            await until(lambda: len(proxy.connections) == 2)
            for _ in range(3):
                async with client(proxy) as (reader, writer):
                    writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
                    told = await rest(reader)
                    assert not told or b"too_many_connections" in told
            assert proxy.connections.refused["process"] == 3
            assert len([r for r in caplog.records if "max_connections" in r.message]) == 1
            second.close()
            await until(lambda: len(proxy.connections) == 1)
            assert (await proxy.fetch())[0] == 200
            await proxy.client.close()
        await until(lambda: not proxy.connections)
        assert not proxy.connections._addresses


async def test_no_more_connections_of_one_address_than_there_may_be() -> None:
    async with scripted_engine() as engine, live_proxy(engine, max_connections_per_address=1) as proxy:
        async with client(proxy):
            await until(lambda: len(proxy.connections) == 1)
            async with client(proxy) as (reader, _):
                assert b"too_many_connections" in await rest(reader)
        assert proxy.connections.refused == {"process": 0, "address": 1}
        await until(lambda: not proxy.connections)
        assert (await proxy.fetch())[0] == 200
        await proxy.client.close()


def test_what_counts_as_one_address() -> None:
    assert _address(("10.0.0.1", 1)) == "10.0.0.1"
    assert _address(("::ffff:10.0.0.1", 1, 0, 0)) == "10.0.0.1"
    assert _address(("2001:db8:1:2:3::4", 1, 0, 0)) == _address(("2001:db8:1:2:9::9", 1, 0, 0)) == "2001:db8:1:2::/64"
    assert _address(("fe80::1%eth0", 1, 0, 0)) == "fe80::/64"
    assert _address("") == ""
    assert _address(None) == ""


async def test_the_system_keeps_little_of_what_a_client_does_not_read() -> None:
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.begin()
        while not call.gone.is_set():
            await call.write(event({"choices": [{"index": 0, "text": "x" * 1000}]}))
            sent += 1000
            if sent > 16 << 20:
                break

    async with (
        scripted_engine(script) as engine,
        live_proxy(engine) as proxy,
        client(proxy) as (_, writer),
    ):
        stop_reading(writer)
        writer.write(raw_post(BODY))
        await until(lambda: [c for c in proxy.connections._open.values() if c._stuck_since is not None])
        # The client's own window apart, which the system of the test lets grow to some megabytes.
        (connection,) = proxy.connections._open.values()
        assert connection._transport is not None
        options = connection._transport.get_extra_info("socket")
        assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 1 << 17
        assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        no_patience(proxy, "read")
        await until(lambda: not proxy.connections)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_unfinished_bodies_are_bounded_all_together(path: str) -> None:
    def begin(size: int) -> bytes:
        return HEAD.replace(b"/v1/completions", path.encode()) + b"Content-Length: 1000\r\n\r\n" + b"a" * size

    async with scripted_engine() as engine, live_proxy(engine, max_upload_bytes=1000) as proxy:
        uploads = proxy.app[UPLOADS]
        async with client(proxy) as (_, first), client(proxy) as (_, second), client(proxy) as (reader, third):
            first.write(begin(500))
            second.write(begin(450))
            await until(lambda: uploads.held_bytes == 950)
            third.write(begin(100))
            async with asyncio.timeout(5):
                told = await reader.readuntil(b"}}")
            assert told.startswith(b"HTTP/1.1 429 ")
            assert b"x-slai-reason: queue_full" in told
            assert uploads.held_bytes == 950
        await until(lambda: not uploads.held_bytes)
        assert (await proxy.fetch(path))[0] == 200
        assert uploads.held_bytes == 0


async def test_a_body_that_says_that_it_is_too_long_is_not_read() -> None:
    async with (
        scripted_engine() as engine,
        live_proxy(engine, max_body_bytes=100) as proxy,
        client(proxy) as (reader, writer),
    ):
        writer.write(HEAD + b"Content-Length: 101\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 413 ")


async def test_what_a_compressed_body_holds_counts_while_it_waits() -> None:
    async def script(call: Call) -> None:
        await call.gone.wait()

    plain = b'{"model": "m", "prompt": "' + b"a" * 100_000 + b'"}'
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with scripted_engine(script) as engine, live_proxy(engine, max_num_seqs=1) as proxy:
        running, waiting = (
            asyncio.ensure_future(proxy.fetch(body=gzip.compress(plain), headers=headers)) for _ in range(2)
        )
        await until(lambda: proxy.scheduler.waiting)
        assert proxy.scheduler.waiting_bytes > len(plain)
        running.cancel()
        waiting.cancel()
        await proxy.idle()
