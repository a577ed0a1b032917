"""The proxy's own endpoints, and its start and end."""

import asyncio
import gc
import json
import sys
from pathlib import Path

import pytest
from live_proxy import exchange, live_proxy, raw_post, until
from scripted_engine import Call, scripted_engine, token

from proxy.config import Settings
from proxy.core.limits import EngineLimits
from proxy.core.stepmodel import StepLoad
from proxy.server.app import PROXY, create_app
from proxy.server.generate import Generator
from proxy.telemetry.otlp import TelemetryUnavailableError
from proxy.telemetry.replay import open_log, replay


class TestModels:
    async def test_those_of_all_engines_each_once_and_as_the_engine_told_it(self) -> None:
        async with scripted_engine(None, "a", "both") as one, scripted_engine(None, "both", "b") as two:
            card = {"id": "a", "object": "model", "max_model_len": 32768, "permission": [{"x": 1.5}]}
            one.routes["GET /v1/models"] = lambda call: call.answer(
                json.dumps({"data": [card, {"id": "both", "owned_by": "one"}]}).encode()
            )
            async with live_proxy(one, two) as proxy, proxy.client.get("/v1/models") as response:
                assert response.status == 200
                answer = await response.json()
                assert answer["object"] == "list"
                assert answer["data"][:2] == [card, {"id": "both", "owned_by": "one"}]
                assert [model["id"] for model in answer["data"]] == ["a", "both", "b"]
                assert one.calls == two.calls == [], "nobody waits for an engine"

    async def test_without_an_engine(self) -> None:
        async with scripted_engine() as engine:
            await engine.stop()
            async with live_proxy(engine) as proxy, proxy.client.get("/v1/models") as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "no_engines"


class TestHealth:
    async def test_ready_with_one_engine_of_two(self) -> None:
        async with scripted_engine() as one, scripted_engine() as two:
            await two.stop()
            async with live_proxy(one, two) as proxy:
                for path in ("/readyz", "/health"):
                    async with proxy.client.get(path) as response:
                        assert response.status == 200
                        assert await response.json() == {
                            "ready": True,
                            "draining": False,
                            "engines": {one.url: "up", two.url: "down"},
                        }

    async def test_not_ready_without_an_engine_but_alive(self) -> None:
        async with scripted_engine() as engine:
            await engine.stop()
            async with live_proxy(engine, probe_interval_seconds=0.02) as proxy:
                for path, status in (("/readyz", 503), ("/health", 503), ("/livez", 200)):
                    async with proxy.client.get(path) as response:
                        assert response.status == status, path
                await engine.start()
                await until(lambda: proxy.app[PROXY].ready)
                async with proxy.client.get("/readyz") as response:
                    assert response.status == 200

    @pytest.mark.parametrize("path", ["/health", "/readyz", "/livez", "/metrics", "/v1/models"])
    async def test_head(self, path: str) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            answer = await exchange(proxy, f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"\r\n\r\n")
            assert engine.calls == []


async def test_metrics_are_prometheus_text() -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        await proxy.fetch()
        async with proxy.client.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=")
            text = await response.text()
        assert 'slai_requests_total{class="relaxed",outcome="completed"} 1.0' in text
        assert f'slai_engine_up{{engine="{engine.url}"}} 1.0' in text


@pytest.mark.parametrize("target", ["*", "http://proxy", "proxy:80"])
async def test_targets_that_are_no_path_reach_no_engine(target: str) -> None:
    method = {"*": "OPTIONS", "proxy:80": "CONNECT"}.get(target, "GET")
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        request = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = await exchange(proxy, request.encode())
        assert 400 <= int(answer.split(b" ")[1]) < 500
        assert engine.calls == []


async def test_an_absolute_target_goes_to_the_engine_and_not_where_it_says() -> None:
    async with scripted_engine() as engine, scripted_engine() as elsewhere, live_proxy(engine) as proxy:
        request = f"GET {elsewhere.url}/secret?x=1 HTTP/1.1\r\nHost: elsewhere\r\nConnection: close\r\n\r\n"
        await exchange(proxy, request.encode())
        assert [call.target for call in engine.calls] == ["/secret?x=1"]
        assert elsewhere.calls == []


async def test_requests_that_two_servers_could_read_differently_are_refused() -> None:
    """Both lengths at once are how requests are smuggled."""
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        request = raw_post(b"0\r\n\r\n", "Transfer-Encoding: chunked")
        assert b" 400 " in (await exchange(proxy, request)).split(b"\r\n")[0]
        assert engine.calls == []


async def test_a_fault_of_the_proxy_is_told_logged_and_counted_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(Generator, "_schedule", fail)
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        status, body = await proxy.fetch()
        assert status == 500
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert b"secret" not in body
        assert "secret detail" in caplog.text
        assert proxy.outcomes() == {"rejected": 1}
        assert proxy.reasons() == {"internal": 1}


async def test_an_engine_whose_list_of_models_makes_no_sense_does_not_end_the_proxy() -> None:
    async with scripted_engine() as engine, live_proxy(engine, probe_interval_seconds=0.02) as proxy:
        engine.routes["GET /v1/models"] = lambda call: call.answer(b"[" * 100_000)
        count = engine.probes["GET /health"]
        await until(lambda: engine.probes["GET /health"] > count + 3)
        assert (await proxy.fetch())[0] == 200


async def test_limits_may_come_from_elsewhere() -> None:
    known = EngineLimits(777, 33, 5555)
    async with scripted_engine() as engine, live_proxy(engine, limits=lambda _: known, max_num_seqs=1) as proxy:
        assert proxy.scheduler.engines[0].limits == known


async def test_the_end_leaves_nothing_behind() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await call.write(token())
        await call.gone.wait()

    async with scripted_engine(script) as engine:
        before = asyncio.all_tasks()
        async with live_proxy(engine, probe_interval_seconds=0.01) as proxy:
            cancelled = asyncio.ensure_future(proxy.fetch())
            await until(lambda: proxy.scheduler.dispatched and engine.probes["GET /health"] > 3)
            cancelled.cancel()
            await asyncio.wait([cancelled])
        await until(lambda: engine.connections == 0)
        await until(lambda: asyncio.all_tasks() <= before)
    gc.collect()  # whatever was not closed would warn now, and warnings are errors


async def test_what_is_learnt_of_an_engine_outlives_a_restart(tmp_path: Path) -> None:
    async with scripted_engine() as engine:
        engine.routes["GET /version"] = lambda call: call.answer(b'{"version": "1"}')
        async with live_proxy(engine, state_dir=tmp_path / "state") as proxy:
            model = proxy.scheduler.engines[0].model
            assert model.steps == 0
            for number in range(400):
                model.observe(StepLoad(0, number % 10, 0), 0.123)
        async with live_proxy(engine, state_dir=tmp_path / "state") as proxy:
            model = proxy.scheduler.engines[0].model
            assert model.trusted
            assert model.predict(StepLoad(0, 5, 0)) == pytest.approx(0.123, rel=0.02)
            assert (await proxy.fetch())[0] == 200


class TestDecisionLog:
    async def test_a_live_proxy_can_be_replayed(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        async with (
            scripted_engine() as one,
            scripted_engine() as two,
            live_proxy(one, two, decision_log=path, max_num_seqs=1) as proxy,
        ):
            answers = await asyncio.gather(*(proxy.fetch() for _ in range(40)))
            assert {status for status, _ in answers} == {200}
        log = open_log(path)
        assert log.head.config == Settings(max_num_seqs=1).scheduler_config()
        found = replay(log)
        assert found.difference is None
        assert found.actions == 40
        assert not log.truncated

    async def test_neither_prompts_nor_ids_nor_keys_are_in_it(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        async with scripted_engine() as engine, live_proxy(engine, decision_log=path) as proxy:
            body = b'{"model": "m", "prompt": "SECRET-PROMPT", "stream": true, "user": "SECRET-USER"}'
            headers = {"Authorization": "Bearer SECRET-KEY", "x-request-id": "SECRET-ID"}
            assert (await proxy.fetch(body=body, headers=headers))[0] == 200
        text = path.read_text()
        assert "SECRET" not in text
        assert "Arrived" in text


async def test_traces_without_the_package_for_them_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TelemetryUnavailableError):
        create_app(Settings(otlp_endpoint="http://127.0.0.1:1/v1/traces"))
