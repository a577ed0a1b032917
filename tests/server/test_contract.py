"""The overload contract as a client meets it: over HTTP, against the real proxy."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from live_proxy import COMPLETIONS, LiveProxy, live_proxy, until
from scripted_engine import Call, ScriptedEngine, scripted_engine, token

from proxy.core.actions import Slice
from proxy.core.request import Request
from proxy.server.driver import Ticket


async def hold(call: Call) -> None:
    await call.begin()
    await call.write(token())
    await call.gone.wait()


async def post_until_cancelled(proxy: LiveProxy, body: bytes) -> None:
    async with proxy.post(body=body) as response:
        await response.read()


@asynccontextmanager
async def busy(engine: ScriptedEngine, **settings: Any) -> AsyncIterator[LiveProxy]:
    """A proxy whose only engine works on one request at a time, and never ends it."""
    async with live_proxy(engine, max_num_seqs=1, **settings) as proxy, asyncio.TaskGroup() as group:
        clients = [group.create_task(post_until_cancelled(proxy, b'{"model": "m", "prompt": "a", "stream": true}'))]
        await until(lambda: engine.calls and proxy.scheduler.engines[0].decodes)
        yield proxy
        for client in clients:
            client.cancel()


def teach_a_rate(proxy: LiveProxy, seconds: float = 0.1) -> None:
    """Let the scheduler see that a prompt of 100 tokens leaves its queue every ``seconds``."""
    (outflow,) = proxy.scheduler._ledger.overload._outflows.values()
    began = proxy.driver.now()
    outflow.wait(-1e9, -1, 100, began - 10.0)
    for n in range(40):
        outflow.wait(-1e9 + n + 1, n, 100, began)
        outflow.release(-1e9 + n, n - 1, 100, began - 10.0 + n * seconds)
    outflow.leave(-1e9 + 40, 39, 100)


def let_pass(proxy: LiveProxy, seconds: float) -> None:
    """Turn the scheduler's clock forward."""
    clock = proxy.driver._clock
    proxy.driver._clock = lambda: clock() + seconds


def heads_of(proxy: LiveProxy) -> list[float]:
    """Collect the scheduler's time at which the heads of requests come from now on."""
    seen: list[float] = []
    now = proxy.driver.now

    def spy() -> float:
        seen.append(now())
        return seen[-1]

    proxy.driver.now = spy  # type: ignore[method-assign]
    return seen


def contract(response: Any) -> tuple[int, str, str]:
    """Status, reason and retry hint; and check that the two forms of the wait agree."""
    milliseconds, seconds = int(response.headers["retry-after-ms"]), int(response.headers["Retry-After"])
    assert 1000 <= milliseconds <= 120_000
    assert seconds == -(-milliseconds // 1000)
    return response.status, response.headers["x-slai-reason"], response.headers["x-should-retry"]


class TestNoQueue:
    HEADERS: ClassVar = {"x-slai-no-queue": "1"}

    async def test_it_is_refused_where_it_would_wait(self) -> None:
        async with scripted_engine(hold) as engine, busy(engine) as proxy:
            async with proxy.post(headers=self.HEADERS) as response:
                assert contract(response) == (429, "no_queue", "false")
                assert json.loads(await response.read())["error"]["code"] == "slow_down"
            assert proxy.scheduler.waiting == 0
            assert proxy.reasons() == {"no_queue": 1}
            assert len(engine.calls) == 1

    async def test_it_is_served_where_it_would_not(self) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            assert (await proxy.fetch(headers=self.HEADERS))[0] == 200

    async def test_an_engine_that_is_full_does_not_make_it_wait_either(self) -> None:
        async def full(call: Call) -> None:
            await call.answer(b"", status="503 Service Unavailable")

        async with scripted_engine(full) as engine, live_proxy(engine) as proxy:
            async with proxy.post(headers=self.HEADERS) as response:
                assert contract(response) == (429, "no_queue", "false")
            assert len(engine.calls) == 1

    async def test_another_value_is_an_error(self) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            status, body = await proxy.fetch(headers={"x-slai-no-queue": "maybe"})
            assert (status, json.loads(body)["error"]["param"]) == (400, "x-slai-no-queue")


class TestLimit:
    async def test_who_would_be_late_is_told_so_at_once(self) -> None:
        async with scripted_engine(hold) as engine, busy(engine) as proxy, asyncio.TaskGroup() as group:
            teach_a_rate(proxy)
            ahead = [group.create_task(post_until_cancelled(proxy, body)) for body in bodies(20)]
            await until(lambda: proxy.scheduler.waiting == 20)
            async with proxy.post(body=bodies(1)[0], headers={"x-slo-ttft-limit-ms": "1000"}) as response:
                assert contract(response) == (503, "too_late", "true")
                assert 1500 <= int(response.headers["x-slai-estimated-wait-ms"]) <= 30_000
                assert json.loads(await response.read())["error"]["code"] == "server_is_overloaded"
            assert proxy.reasons() == {"too_late": 1}
            for client in ahead:
                client.cancel()

    async def test_who_waits_as_long_as_its_limit_is_sent_away_then(self) -> None:
        loop = asyncio.get_running_loop()
        async with scripted_engine(hold) as engine, busy(engine) as proxy:
            began = loop.time()
            async with proxy.post(headers={"x-slo-ttft-limit-ms": "200"}) as response:
                assert contract(response) == (503, "too_late", "true")
                assert "x-slai-estimated-wait-ms" not in response.headers
            assert loop.time() - began >= 0.199
            assert proxy.scheduler.waiting == 0

    async def test_a_class_can_have_one(self) -> None:
        classes = {"relaxed": {"ttft_limit_seconds": 0.1}}
        async with scripted_engine(hold) as engine, busy(engine, classes=classes) as proxy, proxy.post() as response:
            assert contract(response) == (503, "too_late", "true")

    async def test_it_counts_from_the_head_and_not_from_the_end_of_the_upload(self) -> None:
        body = b'{"model": "m", "prompt": "x"}'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: p\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        async with scripted_engine(hold) as engine, busy(engine) as proxy:
            begun = heads_of(proxy)
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(head.encode() + b"x-slo-ttft-limit-ms: 1800000\r\n\r\n" + body[:5])
            await until(lambda: begun)
            let_pass(proxy, 3600.0)
            writer.write(body[5:])
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"x-slai-reason: too_late" in answer
            assert len(engine.calls) == 1


class TestReturn:
    def requests_of(self, proxy: LiveProxy) -> list[Request]:
        """Collect what is handed to the scheduler from now on."""
        seen: list[Request] = []
        submit = proxy.driver.submit

        def spy(
            request: Request,
            arrived_at: float,
            on_slice: Callable[[Slice], None] | None = None,
            on_cut: Callable[[], None] | None = None,
        ) -> Ticket:
            seen.append(request)
            return submit(request, arrived_at, on_slice, on_cut)

        proxy.driver.submit = spy  # type: ignore[method-assign]
        return seen

    async def test_the_same_request_of_the_same_client_is_known_again(self) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            seen = self.requests_of(proxy)
            for body, key in ((b"1", "a"), (b"1", "a"), (b"2", "a"), (b"1", "b")):
                await proxy.fetch(
                    body=b'{"model": "m", "prompt": "%b"}' % body, headers={"Authorization": f"Bearer {key}"}
                )
            first, again, other, stranger = [request.fingerprint for request in seen]
            assert first == again
            assert len({first, other, stranger}) == 3
            assert first is not None
            assert len(first) == 16

    async def test_long_bodies_differ_by_their_ends(self) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            seen = self.requests_of(proxy)
            for end in (b"x", b"y", b"x"):
                await proxy.fetch(body=b'{"model": "m", "prompt": "' + b"a" * 300_000 + end + b'"}')
            assert seen[0].fingerprint == seen[2].fingerprint != seen[1].fingerprint

    async def test_who_comes_back_when_told_goes_before_who_came_later(self) -> None:
        order: list[str] = []
        release = asyncio.Event()

        async def script(call: Call) -> None:
            order.append(call.json()["prompt"])
            await release.wait()
            await call.answer(b"{}")

        def body(name: str) -> bytes:
            return b'{"model": "m", "prompt": "%b"}' % name.encode()

        async with (
            scripted_engine(script) as engine,
            live_proxy(engine, max_num_seqs=1, policy="fcfs", queue_timeout_seconds=30.0) as proxy,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(proxy.fetch(body=body("busy")))
            await until(lambda: engine.calls)
            async with proxy.post(body=body("sent away"), headers={"x-slo-ttft-limit-ms": "50"}) as response:
                wait = int(response.headers["retry-after-ms"]) / 1000
            group.create_task(proxy.fetch(body=body("later")))
            await until(lambda: proxy.scheduler.waiting == 1)
            let_pass(proxy, wait)
            group.create_task(proxy.fetch(body=body("sent away")))
            await until(lambda: proxy.scheduler.waiting == 2)
            release.set()
        assert order == ["busy", "sent away", "later"]


def bodies(count: int) -> list[bytes]:
    """Requests of about 100 tokens each."""
    return [b'{"model": "m", "stream": true, "prompt": "' + b"%06d" % n + b"x" * 390 + b'"}' for n in range(count)]
