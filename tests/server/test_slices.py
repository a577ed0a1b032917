"""Slices on the wire: what the engine gets of a prompt before the client's own request, and what may go wrong."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from builders import make_limits
from interpreted import interpreted
from live_proxy import COMPLETIONS, LiveProxy, live_proxy, until
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_receiver import http_receiver, values
from scripted_engine import DONE, Call, Script, ScriptedEngine, head, last, scripted_engine, token, usage

from proxy.core.actions import Slice
from proxy.core.events import EngineUp, Event, SliceEnded, Tokenized
from proxy.core.request import RELAXED
from proxy.core.scheduler import Scheduler
from proxy.core.stepmodel import OnlineStepModel, StepLoad
from proxy.server.driver import Driver
from proxy.server.slices import Slicer, slice_headers
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.report import RequestReport
from proxy.telemetry.tracing import Tracing
from proxy.upstream.client import EngineClient, Timeouts
from proxy.wire.prompt import plan_slices

IDS = list(range(10, 5010))
CACHES = b'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="10000"} 1.0\n'


def encode(prompt: object = IDS, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, **fields}).encode()


def slice_answer(cached: int | None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return json.dumps({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 9, **details}}).encode()


def answering(cached: int | None = None, status: str = "200 OK") -> Script:
    return lambda call: call.answer(slice_answer(cached), status=status)


# -- the slicer alone --


class Recorder(Driver):
    """A driver that only notes what it is told."""

    def __init__(self) -> None:
        super().__init__(Scheduler(), asyncio.get_running_loop())
        self.events: list[Event] = []

    def feed(self, event: Event) -> None:
        self.events.append(event)


class Stage:
    def __init__(self, engine: ScriptedEngine, client: EngineClient, metrics: Metrics) -> None:
        self.engine = engine
        self.driver = Recorder()
        self.client = client
        self.metrics = metrics

    def slicer(self, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Slicer:
        plan = plan_slices(encode() if body is None else body, chat=False)
        assert plan is not None
        report = RequestReport("r", "r", "text_completion", 0.0, RELAXED)
        sent = slice_headers((headers or {}).items())
        return Slicer(report, plan, self.driver, self.client, self.metrics, Tracing(), sent)

    async def send(self, slicer: Slicer, tokens: int, held: int = 0) -> Event:
        """Send a slice and return what the driver is told of it."""
        before = len(self.driver.events)
        slicer.send(self.piece(tokens, held))
        await until(lambda: len(self.driver.events) > before)
        return self.driver.events[-1]

    def piece(self, tokens: int, held: int = 0) -> Slice:
        return Slice("r", self.engine.url, tokens, held, number=tokens)

    def ended(self, tokens: int, held: int = 0, *, cached: bool, found: int | None = None) -> SliceEnded:
        return SliceEnded(self.piece(tokens, held), cached, found)

    def counted(self, name: str) -> float:
        lines = self.metrics.exposition().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@asynccontextmanager
async def stage(script: Script | None = None) -> AsyncIterator[Stage]:
    async with scripted_engine(script or answering()) as engine:
        client = EngineClient(Timeouts(1.0, 5.0))
        metrics = Metrics(Scheduler(), {"relaxed": RELAXED})
        try:
            yield Stage(engine, client, metrics)
        finally:
            await client.close()


async def test_a_slice_is_a_completion_of_one_token_with_the_first_ids() -> None:
    async with stage() as on:
        slicer = on.slicer(encode(stream=True, max_tokens=99, cache_salt="s"))
        for tokens, held in ((128, 0), (512, 128)):
            assert await on.send(slicer, tokens, held) == on.ended(tokens, held, cached=True)
        for call, tokens in zip(on.engine.calls, (128, 512), strict=True):
            assert (call.method, call.target) == ("POST", COMPLETIONS)
            fields = {"model": "m", "prompt": IDS[:tokens], "max_tokens": 1, "temperature": 0, "cache_salt": "s"}
            assert call.json() == fields


async def test_slices_carry_credentials_and_routing_but_not_the_clients_identity() -> None:
    headers = {
        "Authorization": "Bearer key",
        "X-data-parallel-rank": "1",
        "X-Request-Id": "mine",
        "traceparent": "00-1-2-01",
        "TraceState": "a=b",
        "Content-Type": "application/json; charset=utf-8",
        "accept": "text/event-stream",
    }
    async with stage() as on:
        await on.send(on.slicer(headers=headers), 128)
        (call,) = on.engine.calls
        assert call.header("Authorization") == ["Bearer key"]
        assert call.header("X-data-parallel-rank") == ["1"]
        assert call.header("Content-Type") == ["application/json"]
        for name in ("X-Request-Id", "traceparent", "tracestate", "accept"):
            assert call.header(name) == []


@pytest.mark.parametrize("cached", [None, 256, 255, 130, 128])
async def test_half_of_what_was_sent_before_must_have_been_found(cached: int | None) -> None:
    async with stage() as on:
        slicer = on.slicer()
        await on.send(slicer, 256)
        on.engine.script = answering(cached)
        assert await on.send(slicer, 512, 256) == on.ended(512, 256, cached=True, found=cached)


@pytest.mark.parametrize("cached", [0, 16, 127])
async def test_an_engine_that_finds_less_does_not_cache_slices(cached: int) -> None:
    async with stage(answering(0)) as on:
        slicer = on.slicer()
        assert await on.send(slicer, 256) == on.ended(256, cached=True, found=0), "nothing was there to be found"
        on.engine.script = answering(cached)
        assert await on.send(slicer, 512, 256) == on.ended(512, 256, cached=False, found=cached)
        assert on.counted("slai_slices_total") == 2
        assert on.counted("slai_slice_tokens_total") == 512
        assert on.counted('slai_slice_prefix_tokens_total{cached="yes"}') == cached
        assert on.counted('slai_slice_prefix_tokens_total{cached="no"}') == 256 - cached


async def test_an_engine_that_loses_what_slices_bring_gets_none_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async with stage(answering(300)) as on:
        driver = Driver(Scheduler(), asyncio.get_running_loop())
        driver.feed(EngineUp(on.engine.url, make_limits(caches_prefixes=True)))
        slicer = on.slicer()
        slicer.driver = driver
        pays = []
        for number in range(12):
            slicer.send(Slice("r", on.engine.url, 1000, 400, number))
            await until(lambda: not slicer._pending)
            pays.append(driver.scheduler.slices_pay(on.engine.url, driver.now()))
        assert pays == [True] * 9 + [False] * 3
        (told,) = [r for r in caplog.records if r.levelname == "WARNING" and r.name.startswith("proxy.")]
        assert on.engine.url in told.getMessage()
        driver.close()


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "429 Too Many Requests", "500 Oops"])
async def test_a_slice_that_is_refused_is_not_cached(status: str) -> None:
    async with stage(answering(status=status)) as on:
        assert await on.send(on.slicer(), 128) == on.ended(128, cached=False)
        assert on.counted("slai_slices_total") == 0, "the engine has worked on none"
        assert on.counted("slai_slice_tokens_total") == 0


async def test_a_slice_whose_connection_breaks_before_the_answer_is_not_cached() -> None:
    async def break_off(call: Call) -> None:
        call.reset()

    async with stage(break_off) as on:
        assert await on.send(on.slicer(), 128) == on.ended(128, cached=False)


@contextmanager
def no_unhandled_errors() -> Iterator[None]:
    """Assert that no task ended with an error that nobody took."""
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    try:
        yield
        gc.collect()  # a task tells of its error when it is collected
        assert errors == []
    finally:
        loop.set_exception_handler(None)


async def cut_off(call: Call) -> None:
    await call.send(head("200 OK", "Content-Type: application/json", "Content-Length: 100") + b"{")
    call.reset()


async def test_a_slice_whose_answer_is_cut_in_its_middle_is_not_cached() -> None:
    async with stage(cut_off) as on:
        with no_unhandled_errors():
            slicer = on.slicer()
            assert await on.send(slicer, 128) == on.ended(128, cached=False)
            await until(lambda: not slicer._tasks)
        assert on.counted("slai_slices_total") == 0


async def test_a_request_whose_tokens_are_cut_in_the_middle_is_not_sliceable() -> None:
    async with stage(cut_off) as on:
        with no_unhandled_errors():
            slicer = on.slicer(encode("a long text"))
            slicer.tokenize(on.engine.url)
            await until(lambda: on.engine.calls and not slicer._tasks)
        assert on.driver.events == []
        assert slicer.plan.ids is None


async def test_slices_that_begin_anew_need_nothing_of_those_before() -> None:
    async with stage(answering(0)) as on:
        slicer = on.slicer()
        await on.send(slicer, 512)
        assert await on.send(slicer, 128) == on.ended(128, cached=True, found=0), "the first at another engine"
        assert on.counted("slai_slice_tokens_total") == 512 + 128
        assert on.counted("slai_slice_prefix_tokens_total") == 0


async def test_slices_cancelled_before_they_are_sent_end_and_are_never_sent() -> None:
    async with stage() as on:
        slicer = on.slicer()
        slicer.send(on.piece(128))
        slicer.cancel()
        await until(lambda: on.driver.events and not slicer._tasks)
        assert on.driver.events == [on.ended(128, cached=False)]
        assert on.engine.calls == []


async def test_a_slice_to_an_engine_that_is_gone_is_not_cached() -> None:
    async with stage() as on:
        await on.engine.stop()
        assert await on.send(on.slicer(), 128) == on.ended(128, cached=False)


async def test_cancelled_slices_are_aborted_at_the_engine_and_end_once() -> None:
    async def wait(call: Call) -> None:
        await call.gone.wait()

    async with stage(wait) as on:
        slicer = on.slicer()
        for tokens in (128, 256):
            slicer.send(on.piece(tokens))
        await until(lambda: len(on.engine.calls) == 2)
        slicer.cancel()
        await until(lambda: len(on.driver.events) == 2)
        for call in on.engine.calls:
            await asyncio.wait_for(call.gone.wait(), 5)
        ended = [on.ended(128, cached=False), on.ended(256, cached=False)]
        assert sorted(on.driver.events, key=repr) == ended


async def test_ids_from_the_engines_tokenizer_make_a_text_sliceable() -> None:
    async with stage(lambda call: call.answer(json.dumps({"tokens": IDS, "count": len(IDS)}).encode())) as on:
        slicer = on.slicer(encode("a long text"), {"Authorization": "Bearer key"})
        slicer.tokenize(on.engine.url)
        await until(lambda: on.driver.events)
        assert on.driver.events == [Tokenized("r", len(IDS))]
        (call,) = on.engine.calls
        assert (call.method, call.target, call.json()) == ("POST", "/tokenize", {"model": "m", "prompt": "a long text"})
        assert call.header("Authorization") == ["Bearer key"]
        await on.send(slicer, 128)
        assert on.engine.calls[-1].json()["prompt"] == IDS[:128]


@pytest.mark.parametrize("status", ["404 Not Found", "200 OK"])
async def test_without_ids_the_request_is_not_sliceable(status: str) -> None:
    async with stage(lambda call: call.answer(b'{"detail": "no"}', status=status)) as on:
        slicer = on.slicer(encode("a long text"))
        slicer.tokenize(on.engine.url)
        await until(lambda: on.engine.calls and not slicer._tasks)
        assert on.driver.events == []
        assert slicer.plan.ids is None


# -- through the whole proxy --


class Scene:
    """An engine with one strict stream, whose next token comes when a test says so."""

    def __init__(self, proxy: LiveProxy, engine: ScriptedEngine) -> None:
        self.proxy = proxy
        self.engine = engine
        self.next_token = asyncio.Event()
        self.over = False
        self.answer_slice: Script = self.answer_when_the_step_ends
        self._in_step: list[asyncio.Future[None]] = []
        self.answer_tokenize: Script = lambda call: call.answer(json.dumps({"tokens": IDS}).encode())
        self.answer_own: Script = lambda call: call.stream(token("a"), last(), usage(5000, 1), DONE)
        engine.script = self.script

    async def script(self, call: Call) -> None:
        if b"the stream" in call.body:
            await call.begin()
            while not self.over:
                await call.write(token())
                await self.next_token.wait()
                self.next_token.clear()
            await call.write(DONE)
            await call.end()
        elif is_slice(call):
            await self.answer_slice(call)
        elif call.target == "/tokenize":
            await self.answer_tokenize(call)
        else:
            await self.answer_own(call)

    async def answer_when_the_step_ends(self, call: Call) -> None:
        end = asyncio.get_running_loop().create_future()
        self._in_step.append(end)
        await end
        await call.answer(slice_answer(None))

    async def answer_own_after_its_slices(self, call: Call) -> None:
        """As an engine does, which works on them in order."""
        self.end_slices()
        await until(lambda: self.proxy.samples("slai_slices_total")[()] == len(self.slices))
        await call.stream(token("a"), last(), usage(5000, 1), DONE)

    def end_slices(self) -> None:
        for end in self._in_step:
            end.set_result(None)
        self._in_step.clear()

    @property
    def slices(self) -> list[Call]:
        return [call for call in self.engine.calls if is_slice(call)]

    async def step_until(self, condition: Callable[[], object], stream: Any) -> None:
        """Let the strict stream make token after token until a condition holds."""
        for _ in range(400):
            if condition():
                return
            self.next_token.set()
            await asyncio.wait_for(stream.content.readuntil(b"\n\n"), 5)
            self.end_slices()
        raise AssertionError("it never happens")


class Steady(OnlineStepModel):
    """It stays what it begins with: the steps of a scene last as long as the test takes, which says nothing."""

    def observe(self, load: StepLoad, seconds: float) -> None:
        pass

    def earliness_seconds(self, load: StepLoad) -> float:
        """Any step may end at once, so no slice is held for its last moment."""
        return self.predict(load)


async def wait_until_gone(call: Call) -> None:
    await call.gone.wait()


def is_slice(call: Call) -> bool:
    return call.body.startswith(b'{"max_tokens":1,')


@asynccontextmanager
async def scene(**settings: Any) -> AsyncIterator[tuple[Scene, Any]]:
    """The scene and the client's end of its strict stream, which has had its first token."""
    async with scripted_engine() as engine:
        engine.metrics = CACHES
        async with live_proxy(engine, **{"tiles": True, "token_budget": 8192, **settings}) as proxy:
            at = Scene(proxy, engine)
            (belief,) = proxy.scheduler.engines
            belief.model = Steady()
            body = encode("the stream", stream=True)
            async with proxy.post(body=body, headers={"x-slo-class": "strict"}) as stream:
                await stream.content.readuntil(b"\n\n")
                try:
                    yield at, stream
                finally:
                    at.over = True
                    at.next_token.set()
                    at.end_slices()
                    await stream.read()


OWN = b' {"prompt" : ' + json.dumps(IDS).encode() + b',\r\n"model":"m" , "stream":true, "max_tokens" : 7, "x": 1.0}\n'


@interpreted
async def test_a_long_prompt_behind_a_strict_stream_is_sent_in_slices_and_then_as_it_came() -> None:
    async with scene() as (at, stream):
        at.answer_own = at.answer_own_after_its_slices
        own = asyncio.ensure_future(at.proxy.fetch(body=OWN, headers={"X-Request-Id": "mine", "Authorization": "k"}))
        await at.step_until(own.done, stream)
        status, answer = await own
        assert (status, answer) == (200, b"".join((token("a"), last(), usage(5000, 1), DONE))), (
            "all is the client's own"
        )

        prompts = [call.json()["prompt"] for call in at.slices]
        assert len(prompts) >= 2
        assert all(IDS[: len(p)] == p and len(p) % 16 == 0 for p in prompts)
        assert [len(p) for p in prompts] == sorted({len(p) for p in prompts})
        assert at.engine.calls[-1].body == OWN
        assert [call.body for call in at.engine.calls].count(OWN) == 1
        assert {tuple(call.header("Authorization")) for call in at.slices} == {("k",)}
        assert {tuple(call.header("X-Request-Id")) for call in at.slices} == {()}

        tokens = at.proxy.samples("slai_tokens_total")
        assert tokens["relaxed", "input"] == 5000
        assert tokens["relaxed", "output"] == 1
        assert at.proxy.samples("slai_slices_total")[()] == len(prompts)
        assert at.proxy.samples("slai_slice_bytes_total")[()] == sum(len(call.body) for call in at.slices)
        assert at.proxy.samples("slai_tbt_seconds_count").get(("relaxed",), 0) == 0
        assert at.proxy.outcomes() == {"completed": 1}
        (ttft,) = at.proxy.samples("gen_ai_server_time_to_first_token_seconds_count").values()
        assert ttft == 1


@interpreted
async def test_each_slice_is_a_span_of_the_request_and_the_parent_of_the_engines() -> None:
    async with http_receiver() as received:
        async with scene(otlp_endpoint=received.url) as (at, stream):
            at.answer_own = at.answer_own_after_its_slices
            own = asyncio.ensure_future(at.proxy.fetch(body=OWN, headers={"X-Request-Id": "mine"}))
            await at.step_until(own.done, stream)
            assert (await own)[0] == 200
        sent = at.slices
    spans = {span.span_id.hex(): span for span in received.spans}
    told = {id_: values(span.attributes) for id_, span in spans.items()}
    (request,) = [id_ for id_, of in told.items() if of.get("slai.request.client_id") == "mine"]
    slices = [id_ for id_, of in told.items() if "slai.slice.tokens" in of]
    assert len(slices) == len(sent) >= 2
    assert {spans[id_].parent_span_id.hex() for id_ in slices} == {request}
    assert {spans[id_].kind for id_ in slices} == {Span.SPAN_KIND_CLIENT}
    assert {call.header("traceparent")[0].split("-")[2] for call in sent} == set(slices)
    in_order = sorted((told[id_] for id_ in slices), key=lambda of: of["slai.slice.number"])
    held = 0
    for of, call in zip(in_order, sent, strict=True):
        assert of["slai.slice.held_tokens"] == held
        held += of["slai.slice.tokens"]
        assert held == len(call.json()["prompt"])
        assert (of["slai.slice.cached"], of["http.response.status_code"]) == (True, 200)
        assert of["slai.engine"] == at.engine.url
        assert of["slai.request.id"] == told[request]["slai.request.id"]


@interpreted
async def test_the_span_of_a_slice_whose_client_leaves_says_that_it_was_cancelled() -> None:
    async with http_receiver() as received, scene(otlp_endpoint=received.url) as (at, _):
        at.answer_slice = wait_until_gone
        own = asyncio.ensure_future(at.proxy.fetch(body=OWN))
        await until(lambda: at.slices)
        own.cancel()
        await until(lambda: at.proxy.outcomes() == {"client_gone": 1})
    told = [values(span.attributes) for span in received.spans]
    assert "cancelled" in {of.get("error.type") for of in told if "slai.slice.tokens" in of}


@interpreted
async def test_the_span_of_a_slice_that_fails_says_so() -> None:
    async with http_receiver() as received, scene(otlp_endpoint=received.url) as (at, stream):
        at.answer_slice = answering(status="500 Oops")
        own = asyncio.ensure_future(at.proxy.fetch(body=OWN))
        await at.step_until(own.done, stream)
        assert (await own)[0] == 200
    failed = [span for span in received.spans if "slai.slice.tokens" in values(span.attributes)]
    assert failed
    for span in failed:
        assert span.status.code == Status.STATUS_CODE_ERROR
        told = values(span.attributes)
        assert (told["error.type"], told["http.response.status_code"], told["slai.slice.cached"]) == ("500", 500, False)


@interpreted
async def test_a_text_is_tokenized_by_the_engine_before_it_is_sliced() -> None:
    async with scene() as (at, stream):
        # Fills the step, so that the text has to wait.
        first = asyncio.ensure_future(at.proxy.fetch(body=encode(IDS[:3000], stream=True)))
        await until(lambda: at.slices)
        text = encode("x" * 40_000, stream=True)
        own = asyncio.ensure_future(at.proxy.fetch(body=text))
        await until(lambda: at.proxy.scheduler.waiting_tokens == len(IDS))  # its exact length
        await at.step_until(lambda: own.done() and first.done(), stream)
        assert (await own)[0] == 200
        assert [call.target for call in at.engine.calls].count("/tokenize") == 1
        assert any(len(call.json()["prompt"]) > 3000 for call in at.slices), "the text's ids are 5000"
        assert [call.body for call in at.engine.calls].count(text) == 1


async def hang(call: Call) -> None:
    await call.gone.wait()


@interpreted
@pytest.mark.parametrize("answer", [hang, answering(status="404 Not Found"), cut_off], ids=["slow", "absent", "cut"])
async def test_a_text_that_the_engine_does_not_tokenize_goes_whole_and_waits_for_nothing_else(answer: Script) -> None:
    async with scene() as (at, stream):
        at.answer_tokenize = answer
        first = asyncio.ensure_future(at.proxy.fetch(body=encode(IDS[:3000], stream=True)))
        await until(lambda: at.slices)
        text = encode("x" * 40_000, stream=True)
        own = asyncio.ensure_future(at.proxy.fetch(body=text))
        await until(lambda: any(call.target == "/tokenize" for call in at.engine.calls))
        await at.step_until(lambda: own.done() and first.done(), stream)
        assert (await own)[0] == 200
        (asked,) = (call for call in at.engine.calls if call.target == "/tokenize")
        if answer is hang:
            await asyncio.wait_for(asked.gone.wait(), 5)
        assert [call.body for call in at.engine.calls].count(text) == 1
        assert all(len(call.json()["prompt"]) <= 3000 for call in at.slices)


@interpreted
async def test_an_engine_that_restarts_half_way_gets_the_prompt_as_it_came() -> None:
    async with scene() as (at, stream):
        own = asyncio.ensure_future(at.proxy.fetch(body=OWN))
        await at.step_until(lambda: len(at.slices) >= 2, stream)
        assert not own.done()
        at.over = True
        await at.engine.stop()  # its cache is gone, and so is the strict stream
        await at.engine.start()
        assert (await own)[0] == 200
        assert at.engine.calls[-1].body == OWN
        assert [call.body for call in at.engine.calls].count(OWN) == 1


@interpreted
async def test_slices_that_fail_cost_the_request_nothing() -> None:
    async with scene() as (at, stream):
        at.answer_slice = answering(status="500 Internal Server Error")
        own = asyncio.ensure_future(at.proxy.fetch(body=OWN))
        await at.step_until(own.done, stream)
        assert (await own)[0] == 200
        assert at.engine.calls[-1].body == OWN
        assert at.proxy.outcomes() == {"completed": 1}


@interpreted
async def test_slices_of_a_client_that_leaves_are_aborted() -> None:
    async with scene() as (at, _):
        at.answer_slice = wait_until_gone
        own = asyncio.ensure_future(at.proxy.fetch(body=OWN))
        await until(lambda: at.slices)
        own.cancel()
        for call in at.slices:
            await asyncio.wait_for(call.gone.wait(), 5)
        await until(lambda: at.proxy.outcomes() == {"client_gone": 1})
        (engine,) = at.proxy.scheduler.engines
        await until(lambda: (engine.outstanding, engine.backlog, engine.sliced) == (1, 0, 0))


@pytest.mark.parametrize("settings", [{"tiles": False}, {"metrics": b""}])
async def test_without_tiles_or_a_prefix_cache_the_prompt_goes_whole(settings: dict[str, Any]) -> None:
    metrics = settings.pop("metrics", CACHES)
    async with scripted_engine() as engine:
        engine.metrics = metrics
        async with live_proxy(engine, **{"tiles": True, "token_budget": 8192, **settings}) as proxy:
            at = Scene(proxy, engine)
            body = encode("the stream", stream=True)
            async with proxy.post(body=body, headers={"x-slo-class": "strict"}) as stream:
                await stream.content.readuntil(b"\n\n")
                own = asyncio.ensure_future(proxy.fetch(body=OWN))
                await at.step_until(own.done, stream)
                assert (await own)[0] == 200
                assert at.slices == []
                at.over = True
                at.next_token.set()
                await stream.read()


@interpreted
async def test_prompts_that_cannot_be_cut_go_whole() -> None:
    async with scene() as (at, stream):
        for body in (encode(stream=True, echo=True), encode([IDS, IDS], stream=True), encode(IDS[:100], stream=True)):
            own = asyncio.ensure_future(at.proxy.fetch(body=body))
            await at.step_until(own.done, stream)
            assert (await own)[0] == 200
            assert at.engine.calls[-1].body == body
        assert at.slices == []
