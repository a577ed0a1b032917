"""Proxies that hold requests back: two at each engine and four in the queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from scripted_engine import DONE, last, token, usage

from conformance.suite import Bench, Claim, case, check, equal, within

if TYPE_CHECKING:
    from conformance.client import Connection
    from conformance.upstream import Seen

AREA = "Queues"
AT_ENGINES = 4
WAITING = 4
NEEDS = (Claim.RELAY, Claim.LIMIT)


class Held:
    """An engine's work that ends when a case says so."""

    def __init__(self, t: Bench) -> None:
        self.t = t
        self.go = asyncio.Event()
        self.running = 0
        self.most = 0
        t.script(self.script)

    async def script(self, call: Seen) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await call.begin()
        await call.write(token("a"))
        for waited in [asyncio.ensure_future(event.wait()) for event in (self.go, call.gone)]:
            waited.add_done_callback(lambda _, call=call: call.finished.set())  # type: ignore[misc]
        await call.finished.wait()
        self.running -= 1
        if self.go.is_set():
            await call.write(last() + DONE)
            await call.end()

    async def fill(self) -> list[Connection]:
        """Give the engines as much as they may have."""
        connections = []
        for _ in range(AT_ENGINES):
            connections.append(await self.t.begin())
            await self.t.call()
        return connections


async def settled(t: Bench, count: int) -> None:
    """Check that no more than ``count`` requests reach an engine, for a moment."""
    await asyncio.sleep(0.15)
    equal(len(t.calls), count, "requests that engines got")


@case(
    AREA,
    "eight streams that last, where engines may have four",
    right="never more than four at engines; all are served in the end",
    why="a limit that refills with time instead of with ends is none for long streams",
    needs=NEEDS,
    alone=True,
)
async def queue_limit_holds(t: Bench) -> None:
    held = Held(t)
    connections = await held.fill()
    connections += [await t.begin() for _ in range(WAITING)]
    await settled(t, AT_ENGINES)
    held.go.set()
    for connection in connections:
        answer = await connection.answer()
        equal((answer.status, answer.body.endswith(DONE)), (200, True), "status and end")
    check(held.most <= AT_ENGINES, f"{held.most} at engines at once")


@case(
    AREA,
    "a client leaves while it waits",
    right="no engine gets its request, and the next takes its place",
    why="work for nobody",
    needs=NEEDS,
    alone=True,
)
async def queue_client_leaves(t: Bench) -> None:
    held = Held(t)
    connections = await held.fill()
    leaving = [await t.begin(t.body(user="leaves")) for _ in range(WAITING)]
    await settled(t, AT_ENGINES)
    for number, connection in enumerate(leaving):
        (connection.reset if number % 2 else connection.close)()
    await asyncio.sleep(0.15)
    connections += [await t.begin(t.body(user="stays")) for _ in range(WAITING)]
    await settled(t, AT_ENGINES)
    held.go.set()
    for connection in connections:
        equal((await connection.answer()).status, 200, "status")
    check(not [c for c in t.calls if b"leaves" in c.body], "an engine got the request of a client that had left")


@case(
    AREA,
    "the queue is full",
    right="429 (503) with a Retry-After, at once; those that wait are served",
    why="a queue without a limit is memory without a limit, and answers for nobody",
    needs=NEEDS,
    alone=True,
)
async def queue_full(t: Bench) -> None:
    held = Held(t)
    connections = await held.fill()
    connections += [await t.begin() for _ in range(WAITING)]
    await settled(t, AT_ENGINES)
    refused = await within(2, t.post(), "no refusal")
    check(refused.status in (429, 503), f"status {refused.status}")
    check(refused.header("retry-after"), "no Retry-After")
    held.go.set()
    for connection in connections:
        equal((await connection.answer()).status, 200, "status of those that waited")


@case(
    AREA,
    "the queue is full, and a client asks before it sends its body (`Expect: 100-continue`)",
    right="the refusal instead of 100: the body is not read",
    why="megabytes on their way for nothing, and a client that waits for a word that never comes",
    needs=NEEDS,
    alone=True,
)
async def queue_full_expect(t: Bench) -> None:
    held = Held(t)
    connections = await held.fill()
    connections += [await t.begin() for _ in range(WAITING)]
    await settled(t, AT_ENGINES)
    asking = await t.connect()
    await asking.send(t.request(t.body(), "Expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    refused = await within(2, asking.answer(), "no refusal")
    check(refused.status in (429, 503), f"status {refused.status}")
    equal(refused.interim, [], "answers before the refusal")
    held.go.set()
    for connection in connections:
        equal((await connection.answer()).status, 200, "status of those that waited")


@case(
    AREA,
    "a client goes where it waits no longer: 30 come and go",
    right="the queue is as empty as before",
    why="a place that is not given back is lost for ever",
    needs=NEEDS,
    alone=True,
)
async def queue_places_come_back(t: Bench) -> None:
    held = Held(t)
    connections = await held.fill()
    for _ in range(10):
        leaving = [await t.begin() for _ in range(3)]
        await asyncio.sleep(0.02)
        for connection in leaving:
            connection.reset()
    await asyncio.sleep(0.1)
    connections += [await t.begin() for _ in range(WAITING)]
    await settled(t, AT_ENGINES)
    held.go.set()
    for connection in connections:
        equal((await connection.answer()).status, 200, "status")


@case(
    AREA,
    "of four that wait the first is sent to an engine that says 429, then 503",
    right="it goes back to the front: all four are served in the order in which they came",
    why="who has waited the longest would wait again behind all others",
    needs=(*NEEDS, Claim.RETRY),
    alone=True,
)
async def queue_order_after_a_refusal(t: Bench) -> None:
    waiting = [b"first", b"second", b"third", b"fourth"]
    refusals = ["503 Service Unavailable", "429 Too Many Requests"]
    served: list[bytes] = []
    free = asyncio.Semaphore(0)

    async def script(call: Seen) -> None:
        names = [name for name in waiting if name in call.body]
        if refusals and b"first" in names:
            await call.answer(
                b"{}", status=refusals.pop(), headers=("Content-Type: application/json", "Retry-After: 0")
            )
            return
        served.extend(names)
        await call.begin()
        await call.write(token("a"))
        if not names:
            await free.acquire()
        await call.write(last() + DONE)
        await call.end()

    t.script(script)
    connections = []
    for name in [b"nobody"] * AT_ENGINES + waiting:
        connections.append(await t.begin(t.body(user=name.decode())))
        await asyncio.sleep(0.03)
    await settled(t, AT_ENGINES)
    free.release()  # one place, which each of the four has in turn
    for connection in connections[AT_ENGINES:]:
        equal((await connection.answer()).status, 200, "status of those that waited")
    equal(served, waiting, "the order of those that waited")
    for _ in connections[1:AT_ENGINES]:
        free.release()
    for connection in connections[:AT_ENGINES]:
        equal((await connection.answer()).status, 200, "status of those that came before")


@case(
    AREA,
    "`x-slai-no-queue: 1` where it would wait",
    right="429 at once, `x-should-retry: false`",
    why="who does not want to wait here has another place to go",
    needs=(*NEEDS, Claim.SLAI),
    alone=True,
)
async def queue_not_wanted(t: Bench) -> None:
    held = Held(t)
    connections = await held.fill()
    refused = await t.post(t.body(), "x-slai-no-queue: 1")
    equal((refused.status, refused.header("x-should-retry")), (429, ["false"]), "status and x-should-retry")
    held.go.set()
    for connection in connections:
        await connection.answer()


@case(
    AREA,
    "an engine is silent: before its head, and in the middle of a stream",
    right="504, or one error event; the engine's connection is closed",
    why="a request must end some time",
    needs=(*NEEDS, Claim.SLAI),
    alone=True,
    seconds=15,
)
async def engine_is_silent(t: Bench) -> None:
    async def silent(call: Seen) -> None:
        await call.gone.wait()

    async def falls_silent(call: Seen) -> None:
        await call.begin()
        await call.write(token("a"))
        await call.gone.wait()

    t.script(silent)
    connection = await t.begin()
    first = await t.call()
    t.script(falls_silent)
    stream = await t.begin()
    second = await t.call()
    answer = await connection.answer()
    equal(answer.status, 504, "status")
    answer = await stream.answer()
    check(answer.whole and answer.body.startswith(token("a")), "the stream was not ended in an orderly way")
    check(b"upstream_timeout" in answer.body, f"no error event: {answer.body[-100:]!r}")
    for call in (first, second):
        await within(1, call.gone.wait(), "the engine's connection stays open")


@case(
    AREA,
    "a client waits for a stream",
    right="comments, then its stream; who wants no stream gets a whole answer and nothing else",
    why="idle connections are cut on the way; a comment means nothing to a client",
    needs=(*NEEDS, Claim.SLAI),
    alone=True,
)
async def queue_comments(t: Bench) -> None:
    held = Held(t)
    connections = await held.fill()
    waiting = await t.begin()
    whole = await t.begin(t.body(stream=False))
    answer = await within(3, waiting.head(), "no head while it waits")
    equal((answer.status, answer.content_type), (200, "text/event-stream"), "status and type")
    await within(3, waiting.until(answer, b": waiting\n\n: waiting\n\n"), "no comments")
    held.go.set()
    await waiting.rest(answer)
    equal(answer.body.replace(b": waiting\n\n", b""), token("a") + last() + DONE, "the stream after the comments")
    equal((await whole.answer()).body, token("a") + last() + DONE, "the answer of who wants no stream")
    for connection in connections:
        equal((await connection.answer()).body, token("a") + last() + DONE, "the stream of who did not wait")


@case(
    AREA,
    "the proxy asks for usage on its own account (`--ask-usage`), the report cut at each byte",
    right="the engine is asked; just the report is taken out, to the byte; who asks gets it",
    why="clients that did not ask break on a chunk without choices",
    needs=(*NEEDS, Claim.SLAI),
    alone=True,
)
async def stream_usage_on_own_account(t: Bench) -> None:
    report = usage(3, 1)
    before, after = b": ping\n\n" + token("a") + last(), b": pong\n\n" + DONE
    for at in range(1, len(report)):
        t.stream(before, report[:at], report[at:] + after)
        answer = await t.post()
        equal(answer.body, before + after, f"the stream, its report cut after {at} bytes")
    equal(t.calls[0].json()["stream_options"], {"include_usage": True}, "what the engine was asked")
    answer = await t.post(t.body(stream_options={"include_usage": True}))
    equal(answer.body, before + report + after, "the stream of who asks")
