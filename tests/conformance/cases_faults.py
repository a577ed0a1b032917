"""Engines that refuse, are gone, fall silent or lie, and what may be sent a second time."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from scripted_engine import DONE, JSON, SSE, head, last, token

from conformance.suite import Bench, Claim, case, check, equal, within

if TYPE_CHECKING:
    from conformance.upstream import Seen

AREA = "Engines that fail"


@case(
    AREA,
    "an engine answers 429 or 503, and there is another",
    right="the other serves it",
    why="an engine that says it is full has not started",
    needs=(Claim.RETRY,),
    alone=True,
)
async def busy_engine(t: Bench) -> None:
    for status in ("429 Too Many Requests", "503 Service Unavailable"):
        first: list[int] = []

        async def script(call: Seen, status: str = status, first: list[int] = first) -> None:
            if not first or call.engine in first:
                first[:] = [call.engine]
                await call.answer(b"{}", status=status, headers=(*JSON, "Retry-After: 0"))
            else:
                await call.answer(b'{"served":true}')

        t.script(script)
        answer = await t.post(t.body(stream=False))
        equal((answer.status, answer.body), (200, b'{"served":true}'), f"answer after {status}")


@case(
    AREA,
    "an engine reads a request whole and closes, or resets, before it answers",
    right="5xx; it was sent once",
    why="it may have worked on it: a second generation would be a silent one",
    needs=(Claim.RELAY,),
    alone=True,
)
async def no_silent_second_generation(t: Bench) -> None:
    for how in ("FIN", "RST"):
        for stream in (True, False):
            before = len(t.calls)

            async def script(call: Seen, how: str = how) -> None:
                (call.close if how == "FIN" else call.reset)()

            t.script(script)
            answer = await t.post(t.body(stream=stream))
            check(answer.status >= 500, f"status {answer.status}")
            equal(len(t.calls) - before, 1, f"times that it was sent ({how})")


@case(
    AREA,
    "the refusal of the same",
    right="`x-should-retry: false`, an error in OpenAI's shape",
    why="client libraries send it again by themselves otherwise",
    needs=(Claim.SLAI,),
    alone=True,
)
async def libraries_are_told_not_to_retry(t: Bench) -> None:
    async def script(call: Seen) -> None:
        call.close()

    t.script(script)
    answer = await t.post()
    equal((answer.status, answer.header("x-should-retry")), (502, ["false"]), "status and x-should-retry")
    equal(set(answer.json()["error"]), {"message", "type", "param", "code"}, "fields of the error")


@case(
    AREA,
    "the same on a pooled connection that was used before",
    right="5xx; it was sent once",
    why="`reused` alone does not prove that it was not read",
    alone=True,
)
async def no_silent_second_generation_on_a_pooled_connection(t: Bench) -> None:
    for _ in range(2):
        for upstream in t.engines:
            del upstream
            t.script(lambda call: call.answer(b'{"choices":[]}'))
            await t.post(t.body(stream=False))
    before = len(t.calls)

    async def script(call: Seen) -> None:
        await asyncio.sleep(0.05)  # it works on it
        call.close()

    t.script(script)
    answer = await t.post(t.body(stream=False))
    check(answer.status >= 500, f"status {answer.status}")
    equal(len(t.calls) - before, 1, "times that it was sent")


@case(
    AREA,
    "an answer whose head makes no sense",
    right="5xx, once",
    why="never passed on, never a hang",
    alone=True,
)
async def answers_that_are_none(t: Bench) -> None:
    for raw in (
        b"hello\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nBad Header: x\r\n\r\n",
        b"\x16\x03\x01\x00",
    ):

        async def script(call: Seen, raw: bytes = raw) -> None:
            await call.send(raw)
            call.close()

        t.script(script)
        try:
            answer = await within(5, t.post(), f"no answer after {raw[:20]!r}")
        except EOFError:
            continue
        check(answer.status >= 500 or b"Bad Header" in raw, f"status {answer.status} for {raw[:20]!r}")


@case(
    AREA,
    "an answer in one piece is cut: FIN and RST, with a length and in chunks",
    right="the client can tell: its transfer is cut too, or it gets 5xx",
    why="half a JSON with status 200 and an orderly end",
    needs=(),
)
async def whole_answer_cut(t: Bench) -> None:
    for how in ("FIN", "RST"):
        for framing in ("Content-Length: 1000", "Transfer-Encoding: chunked"):

            async def script(call: Seen, how: str = how, framing: str = framing) -> None:
                part = b'{"choices":['
                await call.send(head("200 OK", *JSON, framing))
                await call.send(b"%x\r\n%b\r\n" % (len(part), part) if "chunked" in framing else part)
                await asyncio.sleep(0.02)
                (call.close if how == "FIN" else call.reset)()

            t.script(script)
            try:
                answer = await t.post(t.body(stream=False))
            except EOFError:
                continue
            check(answer.status >= 500 or not answer.whole, f"the answer looks whole ({how}, {framing})")


@case(
    AREA,
    "an engine sends more than the length that it states",
    right="the client gets the stated length; the rest is nobody's answer",
    why="the rest would be the head of the next",
)
async def answer_longer_than_stated(t: Bench) -> None:
    rest = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nPOISON"
    t.script(lambda call: call.send(head("200 OK", *JSON, "Content-Length: 2") + b"{}" + rest))
    answer = await t.post(t.body(stream=False))
    check(answer.status >= 500 or answer.body == b"{}", f"body {answer.body[:50]!r}")
    t.script(lambda call: call.answer(b"good"))
    for _ in range(4):
        answer = await t.post(t.body(stream=False))
        check(b"POISON" not in answer.body, "a later client got the rest of an earlier answer")


@case(
    AREA,
    "both lengths in an answer",
    right="5xx, or the chunked body; never both headers",
    why="answer splitting",
)
async def answer_with_both_lengths(t: Bench) -> None:
    body = b'{"choices":[]}'
    coded = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    async def script(call: Seen) -> None:
        await call.send(head("200 OK", *JSON, "Content-Length: 3", "Transfer-Encoding: chunked") + coded)

    t.script(script)
    try:
        answer = await t.post(t.body(stream=False))
    except EOFError:
        return
    check(answer.status >= 500 or answer.body == body, f"body {answer.body[:50]!r}")
    check(not (answer.header("content-length") and answer.header("transfer-encoding")), "both reach the client")


@case(
    AREA,
    "every engine answers 429 with a Retry-After",
    right="429 or 503 with a Retry-After, or it waits; no storm of tries",
    why="clients have to be told when to come back",
    needs=(Claim.LLM,),
    alone=True,
)
async def all_engines_busy(t: Bench) -> None:
    t.script(
        lambda call: call.answer(
            b'{"error":{"message":"busy"}}', status="429 Too Many Requests", headers=(*JSON, "Retry-After: 1")
        )
    )
    connection = await t.begin(t.body(stream=False))
    try:
        async with asyncio.timeout(1.5):
            answer = await connection.answer()
            check(answer.status in (429, 503), f"status {answer.status}")
            check(answer.header("retry-after"), "no Retry-After")
    except TimeoutError:
        pass  # it waits, which is as right
    connection.close()
    check(len(t.calls) <= 8, f"{len(t.calls)} tries within 1.5 s")
    t.script(lambda call: call.answer(b"{}"))
    await asyncio.sleep(1.2)


@case(
    AREA,
    "an engine's 400, 413 or 422",
    right="never sent again",
    why="it will not be better at another",
    alone=True,
)
async def client_errors_are_not_retried(t: Bench) -> None:
    for status in ("400 Bad Request", "413 Content Too Large", "422 Unprocessable"):
        before = len(t.calls)
        t.script(lambda call, status=status: call.answer(b'{"error":{}}', status=status))  # type: ignore[misc]
        await t.post(t.body(stream=False))
        equal(len(t.calls) - before, 1, f"times that it was sent after {status}")
    await t.works()


@case(
    AREA,
    "one of two engines is killed with ten streams, and with ten requests that have no answer yet",
    right="the streams' clients know within 1 s; all later requests are served by the other",
    why="a dead engine must not take its clients' time",
    needs=(Claim.RETRY,),
    alone=True,
    seconds=25,
)
async def engine_killed(t: Bench) -> None:
    count = 20

    async def script(call: Seen) -> None:
        await call.begin()
        await call.write(token())
        if call.engine == t.calls[0].engine:  # which will be killed
            await call.gone.wait()
        await asyncio.sleep(0.2)
        await call.write(last() + DONE)
        await call.end()

    t.script(script)
    async with asyncio.TaskGroup() as group:
        posts = [group.create_task(t.post()) for _ in range(count)]
        for _ in range(count):
            await t.call()
        killed = t.engines[t.calls[0].engine]
        hit = sum(call.engine == killed.number for call in t.calls)
        await killed.stop()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        answers = [await post for post in posts]
        took = loop.time() - begun
    check(took < 2, f"clients of a killed engine waited for {took:.1f} s")
    whole = sum(answer.whole and answer.body.endswith(DONE) for answer in answers)
    equal(whole, count - hit, "streams that were whole")
    t.stream(token("ok"), last(), DONE)
    try:
        for _ in range(10):
            answer = await within(5, t.post(), "a request while one engine is gone")
            equal(answer.status, 200, "status while one engine is gone")
    finally:
        await killed.start()


@case(
    AREA,
    "all engines are gone, and come back",
    right="5xx in OpenAI's shape within 5 s, not a hang; served again when they are back",
    why="a restart of the whole fleet",
    needs=(Claim.LLM,),
    alone=True,
    seconds=60,
)
async def all_engines_gone(t: Bench) -> None:
    for engine in t.engines:
        await engine.stop()
    try:
        connection = await t.begin()
        answer = await within(15, connection.answer(), "no answer while all engines are gone")
        check(answer.status >= 500, f"status {answer.status}")
        check("error" in answer.json(), "no error object")
    finally:
        for engine in t.engines:
            await engine.start()
    t.stream(token("ok"), last(), DONE)
    for _ in range(200):
        if (await t.post()).status == 200:
            return
        await asyncio.sleep(0.1)
    check(False, "no request is served 20 s after the engines came back")


@case(
    AREA,
    "an engine answers very slowly, and the client is patient",
    right="served: nothing is cut before the proxy's own timeout",
    why="a cold start takes minutes",
    needs=(),
    seconds=20,
)
async def slow_engine(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await asyncio.sleep(3)
        await call.begin()
        await asyncio.sleep(2)
        await call.write(token("a") + last() + DONE)
        await call.end()

    t.script(script)
    answer = await t.post()
    check(answer.status == 200 and b"[DONE]" in answer.body, f"status {answer.status}, {answer.body[-60:]!r}")


@case(
    AREA,
    "an SSE answer with an error status",
    right="status and body pass",
    why="some engines answer errors as events",
)
async def error_status_with_events(t: Bench) -> None:
    body = b'data: {"error":{"message":"x"}}\n\n'

    async def script(call: Seen) -> None:
        await call.begin(*SSE, status="500 Oops")
        await call.write(body)
        await call.end()

    t.script(script)
    answer = await t.post()
    equal((answer.status, answer.body), (500, body), "status and body")


@case(
    AREA,
    "the proxy's own errors: no such model, no JSON, too large",
    right='`{"error": {message, type, param, code}}`, application/json, an X-Request-Id',
    why="client libraries read these fields",
    needs=(Claim.SLAI,),
)
async def own_errors_have_openai_shape(t: Bench) -> None:
    for body, status in ((t.body(model="nobody's"), 404), (b"{bad", 400), (b"x" * (33 << 20), 413)):
        answer = await t.post(body)
        equal(answer.status, status, "status")
        equal(set(json.loads(answer.body)["error"]), {"message", "type", "param", "code"}, "fields")
        equal(answer.content_type, "application/json", "content type")
        check(answer.header("x-request-id"), "no X-Request-Id")
