"""Clients that leave, and what has to be seen of it at the engine and in the proxy."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from scripted_engine import DONE, last, token

from conformance.suite import Bench, Claim, case, check, equal, within

if TYPE_CHECKING:
    from conformance.client import Connection
    from conformance.upstream import Seen

AREA = "Clients that leave"
SECONDS = 1.0
"""Within which an engine has to see it."""

WAYS = ("FIN", "RST")


def leave(connection: Connection, how: str) -> None:
    (connection.close if how == "FIN" else connection.reset)()


async def noticed(call: Seen, when: str) -> None:
    await within(SECONDS, call.gone.wait(), f"the engine did not see that the client had left {when}")


@case(
    AREA,
    "in the middle of a stream",
    right="the engine's connection is closed within 1 s",
    why="vLLM goes on generating until it is",
    needs=(),
)
async def leaves_while_streaming(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await call.begin()
        while not call.gone.is_set():
            await call.write(token())
            await asyncio.sleep(0.02)

    t.script(script)
    for how in WAYS:
        connection = await t.begin()
        answer = await connection.head()
        await connection.piece(answer)
        leave(connection, how)
        await noticed(await t.call(), f"({how})")


@case(
    AREA,
    "in the middle of a stream that is silent",
    right="the engine's connection is closed within 1 s",
    why="who notices only at the next write notices late",
    needs=(),
)
async def leaves_while_the_stream_is_silent(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await call.begin()
        await call.write(token())
        await call.gone.wait()

    t.script(script)
    for how in WAYS:
        connection = await t.begin()
        answer = await connection.head()
        await connection.piece(answer)
        leave(connection, how)
        await noticed(await t.call(), f"({how})")


@case(
    AREA,
    "before the first byte of a stream",
    right="the engine's connection is closed within 1 s",
    why="a long prefill for nobody",
    needs=(),
)
async def leaves_before_the_head(t: Bench) -> None:
    t.script(lambda call: call.gone.wait())  # type: ignore[arg-type, return-value]
    for how in WAYS:
        connection = await t.begin()
        call = await t.call()
        leave(connection, how)
        await noticed(call, f"before the head ({how})")


@case(
    AREA,
    "while an answer in one piece is being made",
    right="the engine's connection is closed within 1 s",
    why="servers do not watch a connection that they are not writing to",
    needs=(),
)
async def leaves_while_waiting_for_a_whole_answer(t: Bench) -> None:
    t.script(lambda call: call.gone.wait())  # type: ignore[arg-type, return-value]
    for how in WAYS:
        connection = await t.begin(t.body(stream=False))
        call = await t.call()
        leave(connection, how)
        await noticed(call, f"({how})")


@case(
    AREA,
    "while an embedding is being made",
    right="the engine's connection is closed within 1 s",
    why="the paths that are not scheduled as well",
)
async def leaves_other_apis(t: Bench) -> None:
    t.script(lambda call: call.gone.wait())  # type: ignore[arg-type, return-value]
    for how in WAYS:
        connection = await t.begin(t.body(stream=False, input=t.token), path="/v1/embeddings")
        call = await t.call()
        leave(connection, how)
        await noticed(call, f"({how})")


@case(
    AREA,
    "in the middle of an answer in one piece",
    right="the engine's connection is closed within 1 s",
    why="the rest is for nobody",
)
async def leaves_in_a_whole_answer(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await call.begin("Content-Type: application/json")
        await call.write(b"{")
        await call.gone.wait()

    t.script(script)
    for how in WAYS:
        connection = await t.begin(t.body(stream=False))
        answer = await connection.head()
        await connection.piece(answer)
        leave(connection, how)
        await noticed(await t.call(), f"({how})")


@case(
    AREA,
    "after half of the request's head, and after half of its body",
    right="the engine gets no whole request, and the proxy goes on",
    why="half a request is none",
    needs=(),
)
async def leaves_while_sending(t: Bench) -> None:
    for how in WAYS:
        for share in (0.2, 0.8):
            whole = t.request(t.body(stream=False, pad="x" * 2000))
            connection = await t.connect()
            await connection.send(whole[: int(len(whole) * share)])
            await asyncio.sleep(0.05)
            leave(connection, how)
    await asyncio.sleep(0.1)
    check(not t.calls, "an engine got half a request as a whole one")
    await t.works()


@case(
    AREA,
    "while a large body is on its way to an engine that reads slowly",
    right="the engine's connection is closed within 1 s",
    why="a write that blocks must be given up as well",
)
async def leaves_while_the_engine_reads(t: Bench) -> None:
    half = asyncio.Event()
    ended = asyncio.Event()

    async def script(call: Seen) -> None:
        assert call.reader is not None
        await call.reader.readexactly(100_000)
        half.set()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await call.reader.read(1 << 20):  # noqa: ASYNC110 - slowly
                await asyncio.sleep(0.01)
        ended.set()

    t.script(script, early=True)
    connection = await t.connect()
    body = t.body(stream=False, pad="x" * 20_000_000)
    sending = asyncio.ensure_future(connection.send(t.request(body)))
    await within(5, half.wait(), "the body did not begin to come")
    connection.reset()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await within(SECONDS + 1, ended.wait(), "the engine did not see that the client had left")


@case(
    AREA,
    "half-closed: it has sent its request and shuts its sending side",
    right="served, or given up; not hung",
    why="`nc` and some libraries do",
    needs=(),
)
async def half_close(t: Bench) -> None:
    t.stream(token("a"), last(), DONE)
    connection = await t.begin()
    connection.writer.write_eof()
    try:
        answer = await within(5, connection.answer(), "neither an answer nor an end")
    except EOFError:
        return
    check(answer.status != 200 or answer.body.endswith(DONE), "half an answer that looks whole")


@case(
    AREA,
    "a client leaves, and its connection to the engine was a pooled one",
    right="the next request on another connection gets its own answer",
    why="an aborted answer's rest must not be read as the next answer",
)
async def aborted_answers_do_not_mix(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await call.begin()
        await call.write(token(call.json()["user"]))
        if call.json()["user"] == "stays":
            await call.write(DONE)
            await call.end()
        else:
            await call.gone.wait()

    t.script(script)
    for _ in range(10):
        connection = await t.begin(t.body(user="leaves"))
        answer = await connection.head()
        await connection.piece(answer)
        connection.reset()
        served = await t.post(t.body(user="stays"))
        equal(served.body, token("stays") + DONE, "the next answer")


@case(
    AREA,
    "fifty clients leave at once",
    right="the engine sees all of it within 1 s, and the proxy goes on",
    why="a page is closed, a job is killed",
    needs=(),
)
async def many_leave_at_once(t: Bench) -> None:
    count = 50

    async def script(call: Seen) -> None:
        await call.begin()
        await call.write(token())
        await call.gone.wait()

    t.script(script)
    connections = await asyncio.gather(*(t.begin() for _ in range(count)))
    for _ in range(count):
        await t.call()
    for connection in connections:
        connection.reset()
    for call in tuple(t.calls):
        await within(SECONDS, call.gone.wait(), "an engine did not see that its client had left")
    await t.works()


@case(
    AREA,
    "afterwards, by the proxy's own count",
    right="nothing waits and nothing is in flight",
    why="a counter that is not given back is a slot lost for ever",
    needs=(Claim.SLAI,),
    alone=True,
)
async def counters_are_zero(t: Bench) -> None:
    text = ""
    for _ in range(100):
        text = (await t.get("/metrics")).body.decode()
        busy = [
            line
            for line in text.splitlines()
            if line.startswith(
                ("slai_queue_requests", "slai_engine_decodes", "slai_engine_backlog", "slai_engine_streams")
            )
            and not line.endswith((" 0.0", " 0"))
        ]
        if not busy:
            return
        await asyncio.sleep(0.02)
    check(False, f"still counted: {busy}")
