"""The APIs that pass the queue by: the same bytes, and the same limits, keys and accounts as everything else."""

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live_proxy import LiveProxy, live_proxy, until
from scripted_engine import Call, ScriptedEngine, chunk, head, scripted_engine

from proxy.keys import KeySettings
from proxy.server.bodies import UPLOADS

KEY = "sk-of-the-client"
BEARER = {"Authorization": f"Bearer {KEY}"}
BOUNDARY = "5d41402abc4b2a76"
JSON = "application/json"


def form(model: str, size: int = 3, file: str = "file") -> bytes:
    """A form as clients send it: a file of any bytes, and beside it the model."""
    lines = (
        f"--{BOUNDARY}",
        f'Content-Disposition: form-data; name="{file}"; filename="a"',
        "Content-Type: application/octet-stream",
        "",
    )
    tail = (f"\r\n--{BOUNDARY}", 'Content-Disposition: form-data; name="model"', "", f"{model}\r\n--{BOUNDARY}--\r\n")
    return "\r\n".join((*lines, "")).encode() + b"\x00\xff\n" * (size // 3) + "\r\n".join(tail).encode()


@dataclass(frozen=True)
class Api:
    path: str
    body: Callable[[str], bytes]
    answer: bytes
    kind: str = JSON
    answer_kind: str = JSON
    tokens: int = 0
    """That its answer tells; of sound, a guess by the text."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": self.kind}


def as_json(**fields: Any) -> Callable[[str], bytes]:
    return lambda model: json.dumps({"model": model, **fields}).encode()


def told(tokens: int, **fields: Any) -> bytes:
    return json.dumps({"object": "list", **fields, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}).encode()


FORM = f"multipart/form-data; boundary={BOUNDARY}"
SCORES = [{"index": 0, "object": "score", "score": 0.5}]
APIS = {
    "transcription": Api("/v1/audio/transcriptions", form, b'{"text": "the sea"}', FORM),
    "translation": Api("/v1/audio/translations", form, b'{"text": "the sea"}', FORM),
    "speech": Api("/v1/audio/speech", as_json(input="the sea"), b"ID3\x00\xff", answer_kind="audio/mpeg", tokens=9),
    "images": Api("/v1/images/generations", as_json(prompt="the sea"), b'{"data": [{"b64_json": "aGk="}]}'),
    "image edits": Api("/v1/images/edits", lambda m: form(m, file="image"), b'{"data": []}', FORM),
    "embeddings": Api("/v1/embeddings", as_json(input=["a", "b"]), told(7, data=[[0.5], [-0.1]]), tokens=7),
    "rerank": Api("/v1/rerank", as_json(query="q", documents=["a", "b"]), told(9, results=[]), tokens=9),
    "rerank, Cohere's": Api("/v2/rerank", as_json(query="q", documents=["a"]), told(5, results=[]), tokens=5),
    "score": Api("/v1/score", as_json(text_1="a", text_2=["b"]), told(6, data=SCORES), tokens=6),
    "classify": Api("/classify", as_json(input="a"), told(4, data=[{"label": "x"}]), tokens=4),
    "pooling": Api("/pooling", as_json(input="a"), told(3, data=[]), tokens=3),
    "tokenize": Api("/tokenize", as_json(prompt="a b"), b'{"count": 2, "tokens": [1, 2]}'),
    "detokenize": Api("/detokenize", as_json(tokens=[1, 2]), b'{"prompt": "a b"}'),
}
each = pytest.mark.parametrize("api", APIS.values(), ids=APIS)
charged = pytest.mark.parametrize("api", [api for api in APIS.values() if api.tokens and api.answer_kind == JSON])


def keys(**entry: Any) -> dict[str, KeySettings]:
    return {"k": KeySettings(sha256=hashlib.sha256(KEY.encode()).hexdigest(), **entry)}


def answering(api: Api) -> Callable[[Call], Awaitable[None]]:
    return lambda call: call.answer(api.answer, headers=(f"Content-Type: {api.answer_kind}", "X-Engine: 1"))


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as found:
        yield found


async def ask(proxy: LiveProxy, api: Api, model: str = "m", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    async with proxy.post(api.path, api.body(model), headers=api.headers | headers) as response:
        return response.status, await response.read(), dict(response.headers)


@each
async def test_bytes_pass_in_both_directions_and_the_engine_of_the_model_gets_them(api: Api) -> None:
    async with scripted_engine(None, "a") as one, scripted_engine(None, "b") as two, live_proxy(one, two) as proxy:
        one.script = two.script = answering(api)
        for model in ("b", "a", "b", "b"):
            status, body, headers = await ask(proxy, api, model)
            assert (status, body) == (200, api.answer)
            assert (headers["Content-Type"], headers["X-Engine"]) == (api.answer_kind, "1")
        assert [call.body for call in one.calls] == [api.body("a")]
        assert [call.body for call in two.calls] == [api.body("b")] * 3
        assert two.calls[0].header("content-type") == [api.kind]
        assert proxy.outcomes() == {}, "no generation request"


@each
async def test_a_model_by_another_name(api: Api) -> None:
    async with scripted_engine(None, "a") as one, scripted_engine(None, "b") as two:
        async with live_proxy(one, two, aliases={"fast": "b"}) as proxy:
            assert (await ask(proxy, api, "fast"))[0] == 200
        assert one.calls == []
        assert two.calls[0].body == api.body("b")


@each
async def test_keys_are_asked_for_and_replaced(api: Api, engine: ScriptedEngine, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("of-the-engine\n")
    async with live_proxy(engine, keys=keys(models=["m"]), engine_key_file=tmp_path / "key") as proxy:
        assert (await ask(proxy, api))[0] == 401
        assert (await ask(proxy, api, Authorization="Bearer wrong"))[0] == 401
        assert (await ask(proxy, api, "other", **BEARER))[0] == 403, "a model that is not for it"
        assert engine.calls == []
        assert (await ask(proxy, api, **BEARER))[0] == 200
        assert engine.calls[0].header("authorization") == ["Bearer of-the-engine"]
        assert KEY not in str(engine.calls[0].headers)


@each
async def test_requests_per_minute_count(api: Api, engine: ScriptedEngine) -> None:
    async with live_proxy(engine, keys=keys(requests_per_minute=2)) as proxy:
        for left in ("1", "0"):
            status, _, headers = await ask(proxy, api, **BEARER)
            assert (status, headers["x-ratelimit-remaining-requests"]) == (200, left)
        status, body, headers = await ask(proxy, api, **BEARER)
        assert status == 429
        assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
        assert headers["x-slai-reason"] == "requests_per_minute"
        assert int(headers["Retry-After"]) >= 1
        assert len(engine.calls) == 2


@each
async def test_tokens_are_charged_as_the_engine_tells_them(api: Api, engine: ScriptedEngine) -> None:
    engine.script = answering(api)
    async with live_proxy(engine, keys=keys(tokens_per_minute=1000)) as proxy:
        assert (await ask(proxy, api, **BEARER))[0] == 200
        left = await remaining_tokens(proxy)
        assert left in (1000 - api.tokens, 1000 - api.tokens + 1), "and no more than it has refilled"


async def remaining_tokens(proxy: LiveProxy) -> int:
    async with proxy.client.get("/version", headers=BEARER) as response:
        return int(response.headers["x-ratelimit-remaining-tokens"])


@charged
async def test_what_a_key_has_no_tokens_for_is_refused(api: Api, engine: ScriptedEngine) -> None:
    engine.script = lambda call: call.answer(told(150, data=[]))
    async with live_proxy(engine, keys=keys(tokens_per_minute=100)) as proxy:
        assert (await ask(proxy, api, **BEARER))[0] == 200
        status, _, headers = await ask(proxy, api, **BEARER)
        assert (status, headers["x-slai-reason"]) == (429, "tokens_per_minute")
        assert len(engine.calls) == 1
        async with proxy.client.get("/version", headers=BEARER) as response:
            assert response.status == 200, "what uses no tokens needs none"


class TestGuesses:
    """Where an engine does not tell what it has used, or cannot."""

    api = Api("/v1/embeddings", as_json(input="x" * 400), b"")
    about = 105
    """Tokens: a quarter of the body's bytes."""

    async def left(self, proxy: LiveProxy, **more: Any) -> float:
        async with proxy.post(self.api.path, self.api.body("m"), headers=BEARER, **more) as response:
            await response.read()
        return 1000 - await remaining_tokens(proxy)

    async def test_an_answer_too_long_to_keep_or_compressed(self, engine: ScriptedEngine) -> None:
        async with live_proxy(engine, keys=keys(tokens_per_minute=1000)) as proxy:
            engine.script = lambda call: call.answer(told(1, data=["x" * (1 << 20)]))
            assert abs(await self.left(proxy) - self.about) <= 4
        async with live_proxy(engine, keys=keys(tokens_per_minute=1000)) as proxy:
            engine.script = lambda call: call.answer(
                b"?", headers=("Content-Type: application/json", "Content-Encoding: br")
            )
            assert abs(await self.left(proxy) - self.about) <= 4

    @pytest.mark.parametrize("how", ["error", "refused"])
    async def test_an_engine_that_fails_costs_nothing(self, engine: ScriptedEngine, how: str) -> None:
        async with live_proxy(engine, keys=keys(tokens_per_minute=1000)) as proxy:
            engine.script = lambda call: call.answer(told(50), status="500 Oh")
            if how == "refused":
                await engine.stop()
                async with proxy.post(self.api.path, self.api.body("m"), headers=BEARER) as response:
                    assert response.status == 502
                    assert int(response.headers["x-ratelimit-remaining-tokens"]) + self.about >= 999
                assert proxy.app_access.claims.quotas["k"].reserved == 0
            else:
                assert await self.left(proxy) <= 1

    async def test_a_client_that_leaves_pays_for_what_was_begun(self, engine: ScriptedEngine) -> None:
        async def script(call: Call) -> None:
            if call.target == self.api.path:
                await call.gone.wait()
            await call.answer()

        engine.script = script
        async with live_proxy(engine, keys=keys(tokens_per_minute=1000)) as proxy:
            asked = asyncio.ensure_future(ask(proxy, self.api, **BEARER))
            await until(lambda: engine.calls)
            asked.cancel()
            await asyncio.wait([asked])
            await until(lambda: not proxy.scheduler.engines[0].passing)
            assert abs(1000 - await remaining_tokens(proxy) - self.about) <= 4


@each
async def test_it_counts_as_load_until_it_is_answered_or_its_client_leaves(api: Api) -> None:
    go = asyncio.Event()

    async def slow(call: Call) -> None:
        await asyncio.wait(
            [asyncio.ensure_future(event.wait()) for event in (go, call.gone)], return_when="FIRST_COMPLETED"
        )
        if go.is_set():
            await call.answer(api.answer)

    async with scripted_engine(slow) as one, scripted_engine(slow) as other, live_proxy(one, other) as proxy:
        asked = [asyncio.ensure_future(ask(proxy, api)) for _ in range(6)]
        await until(lambda: len(one.calls) + len(other.calls) == 6)
        assert [e.passing for e in proxy.scheduler.engines] == [3, 3]
        for task in asked[:2]:
            task.cancel()
        await asyncio.wait(asked[:2])
        await until(lambda: sum(call.gone.is_set() for call in one.calls + other.calls) == 2)
        await until(lambda: sum(e.passing for e in proxy.scheduler.engines) == 4)
        go.set()
        assert [(await task)[0] for task in asked[2:]] == [200] * 4
        await until(lambda: not any(e.passing for e in proxy.scheduler.engines))


@each
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused(api: Api, engine: ScriptedEngine, *, chunked: bool) -> None:
    size = "Transfer-Encoding: chunked" if chunked else "Content-Length: 1001"
    lines = (f"POST {api.path} HTTP/1.1", "Host: proxy", f"Content-Type: {api.kind}", size, "", "")
    async with live_proxy(engine, max_body_bytes=1000) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        # Of what tells its length, nothing has to come before it is refused.
        writer.write("\r\n".join(lines).encode() + (chunk(b"x" * 600) * 2 if chunked else b""))
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()
        assert engine.calls == []
        assert not proxy.app[UPLOADS].held_bytes


class TestBodiesOnTheirWay:
    api = APIS["transcription"]

    async def test_all_of_them_together_are_bounded_until_they_are_answered(self, engine: ScriptedEngine) -> None:
        go = asyncio.Event()

        async def script(call: Call) -> None:
            await go.wait()
            await call.answer()

        engine.script = script
        body = form("m", 3000)
        async with live_proxy(engine, max_upload_bytes=3 * len(body)) as proxy:
            post = {"headers": self.api.headers}
            asked = [asyncio.ensure_future(proxy.fetch(self.api.path, body, **post)) for _ in range(3)]
            await until(lambda: len(engine.calls) == 3)
            assert proxy.app[UPLOADS].held_bytes == 3 * len(body)
            status, answer = await proxy.fetch(self.api.path, body, **post)
            assert status == 429
            assert json.loads(answer)["error"]["code"] == "slow_down"
            go.set()
            assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3
            await until(lambda: not proxy.app[UPLOADS].held_bytes)

    async def test_a_large_upload_reaches_an_engine_that_reads_slowly(self, engine: ScriptedEngine) -> None:
        body = form("m", 9 << 20)
        async with live_proxy(engine) as proxy:
            assert (
                await proxy.client.post(self.api.path, data=io.BytesIO(body), headers=self.api.headers)
            ).status == 200
        assert engine.calls[0].body == body

    async def test_a_client_that_leaves_during_its_upload(self, engine: ScriptedEngine) -> None:
        async with live_proxy(engine) as proxy:
            _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            length = f"Content-Length: {3 << 20}"
            lines = (f"POST {self.api.path} HTTP/1.1", "Host: proxy", f"Content-Type: {FORM}", length, "", "")
            writer.write("\r\n".join(lines).encode() + b"x" * 50_000)
            await until(lambda: proxy.app[UPLOADS].held_bytes == 50_000)
            writer.close()
            await until(lambda: not proxy.app[UPLOADS].held_bytes)
        assert engine.calls == []


async def test_a_client_that_reads_slowly_holds_the_engine_back_and_not_the_proxys_memory(
    engine: ScriptedEngine,
) -> None:
    piece, pieces, sent = b"\x00" * (1 << 16), 1024, 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.send(head("200 OK", "Content-Type: audio/wav", f"Content-Length: {len(piece) * pieces}"))
        for _ in range(pieces):
            await call.send(piece)
            sent += 1

    engine.script = script
    speech = APIS["speech"]
    async with live_proxy(engine) as proxy, proxy.post(speech.path, speech.body("m")) as response:
        before = -1
        while before < sent:  # until nothing moves for a while: what is between the two is full
            before = sent
            for _ in range(50):
                await asyncio.sleep(0.001)
        assert sent < pieces / 2, "of 64 MiB, what sockets hold, and little more"
        assert len(await response.read()) == len(piece) * pieces
