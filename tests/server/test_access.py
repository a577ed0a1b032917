"""API keys at the door: who is let in, what engines see of it, and what clients are told."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live_proxy import CHAT, COMPLETIONS, LiveProxy, live_proxy, until
from scripted_engine import DONE, Call, ScriptedEngine, event, last, scripted_engine, token, usage

from proxy.config import Settings
from proxy.configfile import ConfigError
from proxy.keys import KeySettings

KEY = "sk-test-canary-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
BODY = b'{"model": "m", "prompt": "hello", "stream": true, "max_tokens": 4}'


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as found:
        yield found


def keys(**entry: Any) -> dict[str, KeySettings]:
    return {"k": KeySettings(sha256=hashlib.sha256(KEY.encode()).hexdigest(), **entry)}


async def ask(
    proxy: LiveProxy, path: str = COMPLETIONS, body: bytes = BODY, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    async with proxy.post(path, body, headers=BEARER if headers is None else headers) as response:
        data = await response.read()
        told = json.loads(data) if response.content_type == "application/json" else data
        return response.status, told, dict(response.headers)


async def test_without_keys_everybody_is_let_in_and_credentials_pass(engine: ScriptedEngine) -> None:
    async with live_proxy(engine) as proxy:
        status, _, headers = await ask(proxy)
        assert status == 200
        assert engine.calls[0].header("authorization") == [BEARER["Authorization"]]
        assert not [name for name in headers if name.lower().startswith("x-ratelimit")]


async def test_nothing_but_the_probes_goes_without_a_known_key(engine: ScriptedEngine) -> None:
    probes = ("/livez", "/readyz", "/health")  # nobody probes by POST
    paths = (COMPLETIONS, CHAT, "/v1/embeddings", "/v1/models", "/metrics", "/unknown", "/sleep", *probes)
    async with live_proxy(engine, keys=keys()) as proxy:
        for path in paths:
            for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "Bearer "}):
                status, told, got = await ask(proxy, path, headers=headers)
                assert status == 401
                assert told["error"]["code"] == "invalid_api_key"
                assert got["WWW-Authenticate"] == "Bearer"
                assert got["x-slai-reason"] == ("unknown_key" if headers.get("x-api-key") else "no_key")
        for probe in probes:
            async with proxy.client.get(probe) as response:
                assert response.status == 200
                assert engine.url not in await response.text()
        refusals = proxy.samples("slai_access_refusals_total")
        assert refusals == {("no_key",): 2 * len(paths), ("unknown_key",): len(paths)}
        assert not engine.calls


async def test_the_clients_key_does_not_reach_the_engine(engine: ScriptedEngine) -> None:
    async with live_proxy(engine, keys=keys()) as proxy:
        for path in (COMPLETIONS, CHAT, "/v1/embeddings"):
            for headers in (BEARER, {"x-api-key": KEY}, {"api-key": KEY}):
                assert (await ask(proxy, path, headers=headers))[0] == 200
        assert len(engine.calls) == 9
        assert not [call for call in engine.calls if KEY in str(call.headers)]


async def test_anthropics_clients_get_errors_in_their_shape(engine: ScriptedEngine) -> None:
    async with live_proxy(engine, keys=keys(requests_per_minute=1)) as proxy:
        status, told, _ = await ask(proxy, "/v1/messages", headers={"x-api-key": "wrong"})
        assert status == 401
        assert told["type"] == "error"
        assert told["error"]["type"] == "authentication_error"
        await ask(proxy, "/v1/messages", headers={"x-api-key": KEY})
        status, told, _ = await ask(proxy, "/v1/messages", headers={"x-api-key": KEY})
        assert status == 429
        assert told["error"]["type"] == "rate_limit_error"


async def test_requests_per_minute(engine: ScriptedEngine) -> None:
    async with live_proxy(engine, keys=keys(requests_per_minute=2)) as proxy:
        status, _, headers = await ask(proxy)
        assert status == 200
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert headers["x-ratelimit-remaining-requests"] == "1"
        await ask(proxy)
        status, told, headers = await ask(proxy)
        assert status == 429
        assert (told["error"]["type"], told["error"]["code"]) == ("requests", "rate_limit_exceeded")
        assert headers["x-slai-reason"] == "requests_per_minute"
        assert 28 <= int(headers["Retry-After"]) <= 30
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert len(engine.calls) == 2


async def test_tokens_per_minute_are_reserved_and_settled_by_usage(engine: ScriptedEngine) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin()
        await go.wait()
        await call.write(token())
        await call.write(last() + usage(10, 5) + DONE)
        await call.end()

    engine.script = script
    body = b'{"model": "m", "prompt": [1,2,3,4,5,6,7,8,9,10], "stream": true, "max_tokens": 60}'
    async with live_proxy(engine, keys=keys(tokens_per_minute=100)) as proxy:
        async with proxy.post(COMPLETIONS, body, headers=BEARER) as first:
            assert first.headers["x-ratelimit-remaining-tokens"] == "30"
            status, told, headers = await ask(proxy, body=body)
            assert status == 429
            assert told["error"]["type"] == "tokens"
            assert headers["x-slai-reason"] == "tokens_per_minute"
            assert headers["x-should-retry"] == "true"
            assert int(headers["Retry-After"]) in (23, 24)
            go.set()
            await first.read()
        await proxy.idle()
        quota = proxy.app_access.claims.quotas["k"]
        assert (quota.active, quota.reserved) == (0, 0)
        status, _, headers = await ask(proxy, body=body)
        assert status == 200
        assert int(headers["x-ratelimit-remaining-tokens"]) in range(15, 18)  # 100 - 15 used - 70 held


async def test_several_answers_are_held_and_charged_each(engine: ScriptedEngine) -> None:
    """Without usage as well: what was seen of every answer counts, not of the longest."""

    async def script(call: Call) -> None:
        await call.begin()
        for step in range(3):
            choices = [{"index": index, "text": f"{step}"} for index in range(4)]
            await call.write(b"".join(event({"choices": [choice]}) for choice in choices))
        await call.write(DONE)
        await call.end()

    engine.script = script
    body = b'{"model": "m", "prompt": [1, 2, 3], "stream": true, "max_tokens": 20, "n": 4}'
    async with live_proxy(engine, keys=keys(tokens_per_minute=1000)) as proxy:
        _, _, headers = await ask(proxy, body=body)
        assert headers["x-ratelimit-remaining-tokens"] == str(1000 - 3 - 4 * 20)
        await proxy.idle()
        _, _, headers = await ask(proxy, body=body)
        assert int(headers["x-ratelimit-remaining-tokens"]) - (1000 - 3 - 4 * 20 - 3 - 4 * 3) in range(3)
        assert proxy.samples("slai_tokens_total")["relaxed", "output"] == 2 * 4 * 3


async def test_who_leaves_while_an_engine_has_turned_it_away_pays_nothing(engine: ScriptedEngine) -> None:
    async def script(call: Call) -> None:
        await call.answer(b"", status="503 Service Unavailable", headers=("Retry-After: 60",))

    engine.script = script
    async with live_proxy(engine, keys=keys(tokens_per_minute=1000)) as proxy:
        quota = proxy.app_access.claims.quotas["k"]
        asked = asyncio.ensure_future(ask(proxy, body=b'{"model": "m", "prompt": "%b"}' % (b"x " * 900)))
        await until(lambda: engine.calls and proxy.scheduler.waiting)
        asked.cancel()
        await until(lambda: not quota.active)
        left = quota.tokens(proxy.app_access.now())
        assert left is not None
        assert left.remaining == 1000


async def test_a_prompt_beyond_the_limit_is_told_not_to_come_back(engine: ScriptedEngine) -> None:
    async with live_proxy(engine, keys=keys(tokens_per_minute=5)) as proxy:
        status, _, headers = await ask(proxy, body=b'{"model": "m", "prompt": [1,2,3,4,5,6]}')
        assert status == 429
        assert "Retry-After" not in headers
        assert headers["x-should-retry"] == "false"


async def test_concurrency_counts_uploads_and_is_given_back_by_a_client_that_leaves(engine: ScriptedEngine) -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await call.gone.wait()

    engine.script = script
    async with live_proxy(engine, keys=keys(concurrency=1, tokens_per_minute=1000)) as proxy:
        quota = proxy.app_access.claims.quotas["k"]
        for _ in range(3):
            async with proxy.post(COMPLETIONS, BODY, headers=BEARER):
                status, _, headers = await ask(proxy)
                assert status == 429
                assert headers["x-slai-reason"] == "concurrency"
                assert headers["Retry-After"] == "1"
            await until(lambda: not quota.active)
            assert quota.reserved == 0


async def test_models_and_classes_of_a_key(engine: ScriptedEngine) -> None:
    engine.models = ["m", "secret-model"]
    entry = keys(models=("m",), classes=("relaxed",), tenant="acme")
    async with live_proxy(engine, keys=entry, default_class="strict") as proxy:
        async with proxy.client.get("/v1/models", headers=BEARER) as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["m"]
        for path in (COMPLETIONS, CHAT, "/v1/embeddings"):
            status, told, headers = await ask(proxy, path, b'{"model": "secret-model", "prompt": "x", "messages": []}')
            assert status == 403
            assert told["error"]["code"] == "model_not_allowed"
            assert headers["x-slai-reason"] == "model_not_allowed"
            assert (await ask(proxy, path, b'{"prompt": "x", "messages": []}'))[0] == 403
        assert not engine.calls
        status, told, _ = await ask(proxy, headers=BEARER | {"x-slo-class": "strict"})
        assert status == 403
        assert told["error"]["code"] == "class_not_allowed"
        assert (await ask(proxy, headers=BEARER))[0] == 200
        assert proxy.samples("slai_requests_total")[("relaxed", "completed")] == 1


async def test_the_administration_of_engines_needs_a_key_for_it(engine: ScriptedEngine) -> None:
    async with live_proxy(engine, keys=keys()) as proxy:
        for path in ("/sleep?level=1", "/v1/load_lora_adapter", "/%73leep", "/metrics"):
            status, told, _ = await ask(proxy, path)
            assert (status, told["error"]["code"]) == (403, "path_not_allowed"), path
        assert not engine.calls
    async with live_proxy(engine, keys=keys(admin=True)) as proxy:
        assert (await ask(proxy, "/sleep"))[0] == 200
        async with proxy.client.get("/metrics", headers=BEARER) as response:
            assert response.status == 200


async def test_keys_are_exchanged_while_it_runs(engine: ScriptedEngine) -> None:
    async with live_proxy(engine, keys=keys(requests_per_minute=2)) as proxy:
        await ask(proxy)
        proxy.app_access.change([key.key(name) for name, key in keys(requests_per_minute=3).items()])
        _, _, headers = await ask(proxy)
        assert headers["x-ratelimit-remaining-requests"] == "1"  # the first still counts
        proxy.app_access.change([])
        assert (await ask(proxy))[0] == 401
        proxy.app_access.change(None)
        assert (await ask(proxy, headers={}))[0] == 200


class TestKeysFile:
    def settings(self, tmp_path: Path, text: str, **more: Any) -> Settings:
        (tmp_path / "keys.yaml").write_text(text)
        return Settings(keys_file=tmp_path / "keys.yaml", **more)

    def test_it_holds_keys_by_their_names(self, tmp_path: Path) -> None:
        found = self.settings(tmp_path, f"a: {{sha256: '{'0' * 64}', concurrency: 2, classes: [strict]}}", keys=keys())
        assert [(key.name, key.tenant, key.limits.concurrency) for key in found.read_keys()] == [
            ("k", "k", None),
            ("a", "a", 2),
        ]

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("a: {sha256: x}", "a.sha256 .*keys.yaml, line 1"),
            (f"b:\n  sha256: '{'0' * 64}'\na:\n  tenant: t\n", "a.sha256 .*line 3.*has to be given"),
            (f"a:\n  sha256: '{'0' * 64}'\n  rpm: 3\n", "a.rpm .*line 3.*no such setting"),
            (f"a: {{sha256: '{'0' * 64}', concurrency: 0}}", "greater than 0"),
            (f"a: {{sha256: '{'0' * 64}'}}\nb: {{sha256: '{'0' * 64}'}}", "a and b are the same key"),
            (f"a: {{sha256: '{'0' * 64}'}}\na: {{sha256: '{'1' * 64}'}}", "line 2: a is there already, in line 1"),
            (f"a: {{sha256: '{'0' * 64}', classes: [gold]}}", "'gold', which is none of strict, relaxed"),
            (f"k: {{sha256: '{'0' * 64}'}}", "k is in .* and in the settings"),
            (f"a b: {{sha256: '{'0' * 64}'}}", "a b"),
            ("- a", "expected a mapping of keys by their names"),
            ("a: [", "not valid YAML"),
            (f"a: {{sha256: {'0' * 64!r}, tokens_per_minute: {'9' * 400}}}", "a.tokens_per_minute"),
        ],
    )
    def test_mistakes_are_told_with_their_line(self, tmp_path: Path, text: str, told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            self.settings(tmp_path, text, keys=keys()).read_keys()

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="No such file"):
            Settings(keys_file=tmp_path / "none").read_keys()
