"""TTFT and TBT through the whole proxy, on a clock that the test moves: what the span and the metrics say."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from live_proxy import CHAT, COMPLETIONS, LiveProxy, live_proxy, until
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from scripted_engine import DONE, Call, Script, delta, last, scripted_engine, token, usage

from proxy.telemetry.tracing import Tracing

STREAMED = b'{"model": "m", "prompt": "hello", "stream": true, "max_tokens": 9}'
ROLE = delta(role="assistant", content="")


class Clock:
    """The driver's clock, which stands still unless a script moves it."""

    def __init__(self) -> None:
        self._begin = asyncio.get_running_loop().time()  # timers are the loop's, and must not be in its past
        self.at = 0.0
        """Seconds since the beginning."""
        self.read = asyncio.Event()

    def __call__(self) -> float:
        self.read.set()
        return self._begin + self.at

    async def write(self, call: Call, at: float, data: bytes) -> None:
        """Write ``data`` at the time ``at`` and wait until the proxy has read it."""
        self.at = at
        self.read.clear()
        await call.write(data)
        async with asyncio.timeout(5):
            await self.read.wait()


class Stage:
    def __init__(self, proxy: LiveProxy, exporter: InMemorySpanExporter, clock: Clock) -> None:
        self.proxy = proxy
        self.clock = clock
        self._exporter = exporter

    def span(self) -> dict[str, Any]:
        """Attributes of the one request's span."""
        (span,) = self.spans()
        return dict(span.attributes or {})

    def spans(self, kind: SpanKind = SpanKind.SERVER) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.kind is kind]

    def sums(self, name: str) -> float:
        return sum(self.proxy.samples(f"{name}_sum").values())

    def misses(self) -> dict[str, float]:
        return {kind: n for (_, kind), n in self.proxy.samples("slai_deadline_misses_total").items() if n}


@asynccontextmanager
async def stage(script: Callable[[Clock], Script], **settings: Any) -> AsyncIterator[Stage]:
    clock, exporter = Clock(), InMemorySpanExporter()
    async with scripted_engine(script(clock)) as engine:
        tracing = Tracing(SimpleSpanProcessor(exporter))
        async with live_proxy(engine, tracing=tracing, **settings) as proxy:
            proxy.driver._clock = clock
            yield Stage(proxy, exporter, clock)


def writes(*reads: tuple[float, bytes]) -> Callable[[Clock], Script]:
    def with_clock(clock: Clock) -> Script:
        async def script(call: Call) -> None:
            await call.begin()
            for at, data in reads:
                await clock.write(call, at, data)
            await call.end()

        return script

    return with_clock


async def test_a_stream() -> None:
    chunks = writes(
        (0.5, token()), (0.6, token()), (0.75, token()), (1.75, token()), (1.75, last() + usage(6, 4) + DONE)
    )
    async with stage(chunks) as found:
        assert (await found.proxy.fetch(body=STREAMED))[0] == 200
        span = found.span()
        assert span["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.5)
        assert span["slai.tbt.max"] == pytest.approx(1.0)
        assert span["slai.tbt.p99"] == pytest.approx(1.0)
        assert span["slai.tbt.mean"] == pytest.approx(1.25 / 3)
        assert span["slai.tbt.misses"] == 1, "the class relaxed promises 500 ms"
        assert span["slai.queue.duration"] == pytest.approx(0.0)
        assert (span["gen_ai.usage.input_tokens"], span["gen_ai.usage.output_tokens"]) == (6, 4)
        assert span["gen_ai.request.max_tokens"] == 9
        assert span["slai.outcome"] == "completed"
        assert found.sums("gen_ai_server_time_to_first_token_seconds") == pytest.approx(0.5)
        assert found.sums("gen_ai_server_time_per_output_token_seconds") == pytest.approx(1.25 / 3)
        assert found.sums("slai_request_tbt_max_seconds") == pytest.approx(1.0)
        assert found.sums("slai_tbt_seconds") == pytest.approx(1.25)
        assert found.proxy.samples("slai_tbt_seconds_count") == {("relaxed",): 3, ("strict",): 0}
        assert found.misses() == {"tbt": 1}


async def test_what_is_no_token_stops_no_clock() -> None:
    """A role, comments and usage before, between and after two tokens."""
    noise = b": ping\n\n" + ROLE + usage(3, 0)
    chunks = writes(
        (0.1, ROLE), (0.2, noise), (0.5, delta(content="a")), (0.7, noise), (0.9, delta(content="b")), (3.0, noise)
    )
    async with stage(chunks) as found:
        await found.proxy.fetch(CHAT, STREAMED)
        span = found.span()
        assert span["gen_ai.operation.name"] == "chat"
        assert span["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.5)
        assert span["slai.tbt.max"] == span["slai.tbt.mean"] == pytest.approx(0.4)
        assert found.proxy.samples("slai_tbt_seconds_count")["relaxed",] == 1


async def test_chunks_that_the_network_delivers_together_are_one_gap() -> None:
    async with stage(writes((0.5, token()), (1.5, token() * 10), (2.5, token() * 2))) as found:
        await found.proxy.fetch(body=STREAMED)
        span = found.span()
        assert span["slai.tbt.mean"] == span["slai.tbt.max"] == pytest.approx(1.0)
        assert span["slai.tbt.misses"] == 2
        assert span["gen_ai.usage.output_tokens"] == 13
        assert found.proxy.samples("slai_tbt_seconds_count")["relaxed",] == 2


async def test_deadlines_of_a_class_and_of_one_request() -> None:
    chunks = writes((0.3, token()), (0.45, token()), (0.9, token()))
    for headers, missed in (
        ({}, {}),
        ({"x-slo-class": "strict"}, {"tbt": 2}),
        ({"x-slo-tbt-ms": "200"}, {"tbt": 1}),
        ({"x-slo-tpot-ms": "100"}, {"tbt": 2}),
        ({"x-slo-class": "strict", "x-slo-tbt-ms": "1000"}, {}),
        ({"x-slo-ttft-ms": "299"}, {"ttft": 1}),
        ({"x-slo-ttft-ms": "301"}, {}),
    ):
        async with stage(chunks) as found:
            await found.proxy.fetch(body=STREAMED, headers=headers)
            assert found.misses() == missed, headers
            assert found.span()["slai.tbt.misses"] == missed.get("tbt", 0)
            assert found.span()["slai.ttft.missed"] is bool(missed.get("ttft"))
            assert found.span()["slai.class"] == headers.get("x-slo-class", "relaxed")


async def test_an_answer_in_one_piece_has_neither_ttft_nor_tbt() -> None:
    def script(clock: Clock) -> Script:
        async def answer(call: Call) -> None:
            clock.at = 7.0
            await call.answer(b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 8}}')

        return answer

    async with stage(script) as found:
        await found.proxy.fetch(body=b'{"model": "m", "prompt": "x"}')
        span = found.span()
        assert not {"gen_ai.response.time_to_first_chunk", "slai.tbt.max"} & span.keys()
        assert span["gen_ai.usage.output_tokens"] == 8
        assert found.sums("gen_ai_server_request_duration_seconds") == pytest.approx(7.0)
        assert found.proxy.samples("gen_ai_server_time_to_first_token_seconds_count") == {}


async def test_the_time_in_the_queue_is_part_of_the_ttft_and_told_apart_from_it() -> None:
    def script(clock: Clock) -> Script:
        async def first_then_second(call: Call) -> None:
            await call.begin()
            if b"first" in call.body:
                await call.write(token())
                await until(lambda: found.proxy.scheduler.waiting == 1)
                clock.at = 3.0
            else:
                await clock.write(call, 4.5, token())
            await call.end()

        return first_then_second

    async with stage(script, max_num_seqs=1) as found:
        first = asyncio.ensure_future(found.proxy.fetch(body=STREAMED.replace(b"hello", b"first")))
        await until(lambda: found.proxy.scheduler.dispatched)
        await found.proxy.fetch(body=STREAMED)
        await first
        exporter_span = found._exporter.get_finished_spans()[-1].attributes or {}
        assert exporter_span["slai.queue.duration"] == pytest.approx(3.0)
        assert exporter_span["gen_ai.response.time_to_first_chunk"] == pytest.approx(4.5)
        assert found.sums("slai_queue_duration_seconds") == pytest.approx(3.0)


async def test_tokens_before_a_fault_are_told_on_the_span() -> None:
    def script(clock: Clock) -> Script:
        async def cut(call: Call) -> None:
            await call.begin()
            await clock.write(call, 0.5, token())
            await clock.write(call, 0.75, token())
            call.reset()

        return cut

    async with stage(script) as found:
        await found.proxy.fetch(body=STREAMED)
        span = found.span()
        assert (span["slai.outcome"], span["error.type"]) == ("engine_failed", "cut_mid_stream")
        assert span["slai.tbt.max"] == pytest.approx(0.25)
        assert found.proxy.samples("gen_ai_server_time_to_first_token_seconds_count") == {}


async def test_a_refusal_has_a_span_with_its_reason() -> None:
    async with stage(writes()) as found:
        await found.proxy.fetch(body=b'{"model": "nobody", "prompt": "x"}')
        span = found.span()
        assert (span["slai.outcome"], span["error.type"]) == ("rejected", "unknown_model")
        assert span["http.response.status_code"] == 404
        assert span["slai.dispatches"] == 0


async def test_a_request_that_was_turned_away_first() -> None:
    def script(clock: Clock) -> Script:
        async def busy_once(call: Call) -> None:
            if clock.at == 0.0:
                clock.at = 0.2
                await call.answer(b"", status="503 Busy", headers=("Retry-After: 0.1",))
            else:
                await call.stream(token())

        return busy_once

    async with stage(script) as found:
        await found.proxy.fetch(body=STREAMED)
        span = found.span()
        assert span["slai.dispatches"] == 2
        assert span["slai.queue.duration"] == pytest.approx(0.2), "until the last dispatch"
        assert found.proxy.samples("slai_queue_duration_seconds_count") == {("relaxed",): 1}


async def test_the_engines_spans_become_children_of_ours() -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    exporter = InMemorySpanExporter()
    async with (
        scripted_engine() as engine,
        live_proxy(engine, tracing=Tracing(SimpleSpanProcessor(exporter))) as proxy,
    ):
        await proxy.fetch(headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "tracestate": "v=1"})
        attempt, span = exporter.get_finished_spans()
        assert (attempt.kind, span.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
        assert attempt.context is not None
        assert span.context is not None
        assert attempt.parent is not None
        assert attempt.parent.span_id == span.context.span_id
        assert engine.calls[0].header("traceparent") == [f"00-{trace_id}-{attempt.context.span_id:016x}-01"]
        assert engine.calls[0].header("tracestate") == ["v=1"]


async def test_names_that_clients_make_up_make_no_series() -> None:
    """Neither models (an engine that lists none is taken to serve any), nor request ids, paths or headers."""
    async with scripted_engine() as engine:
        engine.routes["GET /v1/models"] = lambda call: call.answer(b"", status="404 Not Found")
        async with live_proxy(engine) as proxy:
            await proxy.fetch()
            async with proxy.client.get("/no/such/path") as response:
                await response.read()
            before = len(proxy.exposition().splitlines())
            for number in range(100):
                body = b'{"model": "model-%d", "prompt": "x", "stream": true}' % number
                assert (await proxy.fetch(COMPLETIONS, body, headers={"X-Request-Id": f"id-{number}"}))[0] == 200
                async with proxy.client.get(f"/path/{number}", headers={"x-tenant": f"t{number}"}) as response:
                    await response.read()
            after = len(proxy.exposition().splitlines())
            assert after == before
            assert proxy.outcomes() == {"completed": 101}


async def test_a_late_token_is_told_with_its_cause() -> None:
    """The engine alone is to blame for a gap in which nothing was sent to it; a class without a deadline has none."""
    chunks = writes((0.5, token()), (0.52, token()), (3.52, token()), (3.54, token()), (3.54, last() + DONE))
    async with stage(chunks) as found:
        await found.proxy.fetch(body=STREAMED, headers={"x-slo-tbt-ms": "100"})
        (span,) = found.spans()
        (late,) = [event for event in span.events if event.name == "slai.tbt.breach"]
        told = dict(late.attributes or {})
        assert told["slai.tbt.gap"] == pytest.approx(3.0)
        assert told["slai.tbt.cause"] == "stall"
        assert span.end_time is not None
        assert (span.end_time - late.timestamp) / 1e9 == pytest.approx(0.02, abs=1e-3)
        causes = {labels: n for labels, n in found.proxy.samples("slai_tbt_breaches_total").items() if n}
        assert causes == {("stall", "relaxed"): 1}


async def test_of_a_stream_that_is_always_late_the_first_causes_are_kept_and_all_are_counted() -> None:
    chunks = writes(*((n / 2, token()) for n in range(50)), (25, last() + DONE))
    async with stage(chunks) as found:
        await found.proxy.fetch(body=STREAMED, headers={"x-slo-tbt-ms": "100"})
        (span,) = found.spans()
        assert sum(event.name == "slai.tbt.breach" for event in span.events) == 32
        assert sum(found.proxy.samples("slai_tbt_breaches_total").values()) == 49
