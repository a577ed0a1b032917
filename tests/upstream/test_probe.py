"""Probing engines: what is announced, and when."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from builders import make_engine
from live_proxy import until
from scripted_engine import Call, ScriptedEngine, head, scripted_engine

from proxy.core.events import EngineDown, EngineRemoved, EngineReported, EngineUp
from proxy.core.limits import CacheConfig, EngineLimits
from proxy.core.selfreport import EngineReport
from proxy.core.stepmodel import StepLoad
from proxy.upstream.knowledge import Knowledge
from proxy.upstream.probe import Prober

CACHE = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%d"} 1.0\n'


def limits_of(cache: CacheConfig) -> EngineLimits:
    return EngineLimits(512, 64, cache.kv_tokens)


def limits(kv_tokens: int | None) -> EngineLimits:
    return limits_of(CacheConfig(kv_tokens))


class Watch:
    """A prober and all that it announces."""

    def __init__(self, *urls: str, interval_seconds: float = 60.0) -> None:
        self.said: list[EngineUp | EngineDown | EngineReported | EngineRemoved] = []
        self.prober = Prober(urls, limits_of, self.said.append, interval_seconds=interval_seconds)

    async def look(self, times: int = 1) -> list[EngineUp | EngineDown | EngineReported | EngineRemoved]:
        """Probe the first engine and return what that announces."""
        before = len(self.said)
        for _ in range(times):
            await self.prober.look(self.prober.probes[0])
        return self.said[before:]


@asynccontextmanager
async def watching(*engines: ScriptedEngine) -> AsyncIterator[Watch]:
    watch = Watch(*(engine.url for engine in engines))
    yield watch
    await watch.prober._client.aclose()


async def refuse(call: Call) -> None:
    await call.answer(b"", status="503 Service Unavailable")


async def test_an_engine_is_announced_once_with_all_that_is_known() -> None:
    async with scripted_engine(None, "tiny", "adapter") as engine, watching(engine) as watch:
        engine.metrics = (CACHE % (0, 100)).encode()
        found = await watch.look(3)
        assert found == [EngineUp(engine.url, limits(1600), frozenset({"tiny", "adapter"}))]


async def test_refused_means_down_at_once() -> None:
    async with scripted_engine() as engine, watching(engine) as watch:
        await watch.look()
        await engine.stop()
        assert await watch.look() == [EngineDown(engine.url)]
        assert await watch.look(3) == [], "it is said once"


async def test_an_engine_that_is_not_there_yet_is_announced_as_down() -> None:
    """The scheduler has to know that it exists: a request for it is refused with 503, not 404."""
    async with scripted_engine() as engine, watching(engine) as watch:
        await engine.stop()
        assert await watch.look(2) == [EngineDown(engine.url)]


async def test_one_failure_is_no_outage_and_two_are() -> None:
    async with scripted_engine() as engine, watching(engine) as watch:
        healthy = engine.routes["GET /health"]
        await watch.look()
        engine.routes["GET /health"] = refuse
        assert await watch.look() == []
        engine.routes["GET /health"] = healthy
        assert await watch.look() == []
        engine.routes["GET /health"] = refuse
        assert await watch.look() == [], "the count began anew"
        assert await watch.look() == [EngineDown(engine.url)]


async def test_sick_from_the_start() -> None:
    async with scripted_engine() as engine, watching(engine) as watch:
        engine.routes["GET /health"] = refuse
        assert await watch.look() == []
        assert await watch.look() == [EngineDown(engine.url)]
        assert await watch.look() == []


async def test_at_the_start_there_is_no_second_look() -> None:
    async with scripted_engine() as sick, scripted_engine() as absent, scripted_engine(None, "a") as well:
        sick.routes["GET /health"], healthy = refuse, sick.routes["GET /health"]
        await absent.stop()
        async with watching(sick, absent, well) as watch:
            await watch.prober.look_first()
            up = EngineUp(well.url, limits(None), frozenset("a"))
            assert sorted(watch.said, key=repr) == sorted([EngineDown(sick.url), EngineDown(absent.url), up], key=repr)
            assert sick.probes["GET /health"] == 1
            assert await watch.look(3) == [], "it is said once"
            sick.routes["GET /health"] = healthy
            assert [type(said) for said in await watch.look()] == [EngineUp]


async def test_a_fault_of_our_own_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    def limits_that_fail(_: CacheConfig) -> EngineLimits:
        raise ZeroDivisionError

    async with scripted_engine() as engine, watching(engine) as watch:
        watch.prober.limits = limits_that_fail
        assert await watch.look() == []
        assert engine.url in caplog.text
        watch.prober.limits = limits_of
        assert [type(said) for said in await watch.look()] == [EngineUp]


LOAD = "vllm:num_requests_running 3\nvllm:kv_cache_usage_perc 0.25\nvllm:num_preemptions_total %d\n"


async def test_an_engine_s_figures_are_told_at_every_look_until_it_has_none() -> None:
    async with scripted_engine() as engine, watching(engine) as watch:
        engine.metrics = (LOAD % 0).encode()
        up, first = await watch.look()
        assert isinstance(up, EngineUp), "an engine is known before its figures are"
        assert first == EngineReported(engine.url, EngineReport(3, 0, 0.25, 0))
        engine.metrics = (LOAD % 8).encode()
        assert await watch.look() == [EngineReported(engine.url, EngineReport(3, 0, 0.25, 8))]
        engine.metrics = b"vllm:num_requests_running many\n"
        assert await watch.look() == [EngineReported(engine.url, None)]
        assert await watch.look() == [], "it is said once"
        engine.metrics = (LOAD % 9).encode()
        assert await watch.look() == [EngineReported(engine.url, EngineReport(3, 0, 0.25, 9))]
        await engine.stop()
        assert await watch.look() == [EngineDown(engine.url)]
        engine.metrics = b""
        await engine.start()
        assert [type(said) for said in await watch.look()] == [EngineUp], "its figures went with it"


@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
async def test_an_answer_without_end_is_not_read_to_its_end(path: str) -> None:
    async with scripted_engine(None, "a") as engine, watching(engine) as watch:
        await watch.look()
        sent = 0

        async def flood(call: Call) -> None:
            nonlocal sent
            await call.send(head("200 OK", "Content-Type: text/plain", "Connection: close"))
            while not call.gone.is_set() and sent < 64 << 20:
                await call.send(b"x" * 65536)
                sent += 65536

        engine.routes[f"GET {path}"] = flood
        assert await watch.look() == []
        await until(lambda: sent > 0)
        assert sent < 32 << 20


async def test_recovery() -> None:
    async with scripted_engine() as engine, watching(engine) as watch:
        (up,) = await watch.look()
        await engine.stop()
        await watch.look()
        await engine.start()
        assert await watch.look() == [up]
        assert await watch.look() == []


@pytest.mark.parametrize("how", ["silent", "cut", "garbage", "redirect", "endless"])
async def test_bad_health_answers_are_failures(how: str) -> None:
    async def script(call: Call) -> None:
        if how == "silent":
            await call.gone.wait()
        elif how == "garbage":
            await call.send(b"\x00\x01\r\n\r\n")
        elif how == "redirect":
            await call.answer(b"", status="302 Found", headers=("Location: /login",))
        elif how == "endless":
            await call.send(head("200 OK", "Content-Length: 100000"))
            while not call.gone.is_set():
                await call.send(b"x")
                await asyncio.sleep(0.01)  # the engine's slowness, not a wait of the test
        call.close()

    async with scripted_engine() as engine, watching(engine) as watch:
        watch.prober._client.timeout = httpx.Timeout(0.05)
        watch.prober._timeout_seconds = 0.1
        engine.routes["GET /health"] = script
        assert await watch.look() == []
        assert await watch.look() == [EngineDown(engine.url)]


async def test_a_change_of_models_or_cache_is_announced() -> None:
    async with scripted_engine(None, "a") as engine, watching(engine) as watch:
        await watch.look()
        engine.models = ["a", "b"]
        assert await watch.look() == [EngineUp(engine.url, limits(None), frozenset("ab"))]
        engine.metrics = (CACHE % (0, 10)).encode()
        assert await watch.look() == [EngineUp(engine.url, limits(160), frozenset("ab"))]
        engine.metrics = b""
        assert await watch.look() == [], "one scrape without it does not unlearn the size"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{bad",
        b"[]",
        b"null",
        b"7",
        b'{"data": null}',
        b'{"data": 7}',
        b'{"data": "abc"}',
        b'{"data": [1, null]}',
        b'{"object": "list"}',
        b"\xff\xfe\x00",
        b"1" * 10_000,
        b"[" * 100_000,
    ],
)
async def test_bad_lists_of_models_are_no_outage(answer: bytes) -> None:
    """The engine counts as up, with the models that it had before; with none at all it is taken to serve any."""
    async with scripted_engine(None, "a") as engine, watching(engine) as watch:
        listed = engine.routes["GET /v1/models"]
        engine.routes["GET /v1/models"] = lambda call: call.answer(answer)
        assert await watch.look() == [EngineUp(engine.url, limits(None), frozenset())]
        engine.routes["GET /v1/models"] = listed
        assert await watch.look() == [EngineUp(engine.url, limits(None), frozenset("a"))]
        engine.routes["GET /v1/models"] = lambda call: call.answer(answer)
        assert await watch.look() == []


async def test_entries_that_are_no_models_are_left_out() -> None:
    entries = [{"id": "good", "max_model_len": 9, "x": [1]}, {"id": 7}, {}, {"id": None}, {"name": "n"}]
    async with scripted_engine() as engine, watching(engine) as watch:
        engine.routes["GET /v1/models"] = lambda call: call.answer(json.dumps({"data": entries}).encode())
        await watch.look()
        assert watch.prober.models() == [entries[0]]


async def test_an_endless_list_of_models_is_cut() -> None:
    async with scripted_engine(None, *(f"m{n}" for n in range(5000))) as engine, watching(engine) as watch:
        (up,) = await watch.look()
        assert isinstance(up, EngineUp)
        assert len(up.models) == 1000


@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
async def test_a_server_without_these_endpoints_is_up_all_the_same(path: str) -> None:
    async with scripted_engine() as engine, watching(engine) as watch:
        engine.routes[f"GET {path}"] = lambda call: call.answer(b"", status="404 Not Found")
        (up,) = await watch.look()
        assert isinstance(up, EngineUp)


async def test_models_of_all_engines_that_are_up() -> None:
    async with scripted_engine(None, "a", "b") as first, scripted_engine(None, "b", "c") as second:
        second_entries = [{"id": "b", "owned_by": "second"}, {"id": "c"}]
        second.routes["GET /v1/models"] = lambda call: call.answer(json.dumps({"data": second_entries}).encode())
        async with watching(first, second) as watch:
            assert watch.prober.models() == []
            for probe in watch.prober.probes:
                await watch.prober.look(probe)
            assert [(m["id"], m.get("owned_by")) for m in watch.prober.models()] == [
                ("a", "test"),
                ("b", "test"),
                ("c", None),
            ]
            await first.stop()
            await watch.look()
            assert watch.prober.models() == second_entries


async def test_a_model_is_listed_when_it_can_be_had_and_no_sooner() -> None:
    """An adapter that is loaded while the proxy runs: between the list and /metrics of one look, nobody knows of it."""
    async with scripted_engine(None, "tiny") as engine, watching(engine) as watch:
        metrics = engine.routes["GET /metrics"]
        await watch.look()

        async def slow(call: Call) -> None:
            asked.set()
            await go.wait()
            await metrics(call)

        for models in (["tiny", "adapter"], ["tiny"]):
            asked, go = asyncio.Event(), asyncio.Event()
            before = {str(model["id"]) for model in watch.prober.models()}
            engine.routes["GET /metrics"], engine.models = slow, models
            look = asyncio.ensure_future(watch.look())
            await asked.wait()
            assert {str(model["id"]) for model in watch.prober.models()} == before
            go.set()
            assert [said.models for said in await look if isinstance(said, EngineUp)] == [frozenset(models)]
            assert {str(model["id"]) for model in watch.prober.models()} == set(models)


async def test_engines_are_probed_on_their_own_until_cancelled() -> None:
    """One that hangs holds up nobody."""
    async with scripted_engine() as slow, scripted_engine() as quick:
        slow.routes["GET /health"] = lambda call: until(call.gone.is_set, 30)
        watch = Watch(slow.url, quick.url, interval_seconds=0.01)
        task = asyncio.ensure_future(watch.prober.run())
        await until(lambda: quick.probes["GET /health"] >= 5)
        assert [type(said) for said in watch.said] == [EngineUp]
        assert slow.probes["GET /health"] == 1
        await quick.stop()
        await until(lambda: len(watch.said) == 2)
        assert watch.said[1] == EngineDown(quick.url)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await watch.prober.close()
        assert watch.prober._client.is_closed


@pytest.mark.parametrize(("tiles", "caches_prefixes", "warned"), [(True, False, 2), (True, True, 0), (False, False, 0)])
async def test_tiles_that_an_engine_is_unfit_for_are_told_each_time_that_it_comes_up(
    tiles: bool, caches_prefixes: bool, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    def told(cache: CacheConfig) -> EngineLimits:
        return replace(limits_of(cache), caches_prefixes=caches_prefixes)

    async with scripted_engine() as engine:
        prober = Prober((engine.url,), told, lambda _: None, interval_seconds=60.0, tiles=tiles)
        for kv_blocks in (1000, 1001):  # other limits while it is up are no reason to say it again
            engine.metrics = (CACHE % (0, kv_blocks)).encode()
            await prober.look(prober.probes[0])
        await engine.stop()
        await prober.look(prober.probes[0])
        await engine.start()
        await prober.look(prober.probes[0])
        await prober.close()
        said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "is down" not in r.message]
    text = f"engine {engine.url} does not cache prefixes: its prompts go whole, --tiles has no effect there"
    assert said == [text] * warned


class TestKnowledge:
    """What is known about engines of the same kind goes with the news that one is up."""

    @staticmethod
    async def learnt_by(engine: ScriptedEngine, directory: Path) -> list[tuple[str, bool]]:
        """Look at an engine twice; its fingerprint each time, and whether something was remembered."""
        known, said = Knowledge.load(directory), list[EngineUp | EngineDown | EngineReported | EngineRemoved]()
        prober = Prober((engine.url,), limits_of, said.append, interval_seconds=60.0, knowledge=known)
        await prober.look(prober.probes[0])
        await prober.look(prober.probes[0])
        await prober.close()
        belief = make_engine(engine.url)
        for number in range(300):
            belief.model.observe(StepLoad(100 * (number % 5), number % 20, 0), 0.04)
            belief.delay.learn((0.12, 0.06, 0.0))
        known.learn([(prober.probes[0].fingerprint, belief)])
        await known.save()
        return [(prober.probes[0].fingerprint, up.learnt is not None) for up in said if isinstance(up, EngineUp)]

    @staticmethod
    def version(engine: ScriptedEngine, version: str) -> None:
        engine.routes["GET /version"] = lambda call: call.answer(json.dumps({"version": version}).encode())

    async def test_a_restart_begins_warm_and_is_announced_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        async with scripted_engine() as engine:
            self.version(engine, "0.11")
            ((first, cold),) = await self.learnt_by(engine, tmp_path)
            assert "restored" not in caplog.text
            ((again, warm),) = await self.learnt_by(engine, tmp_path)
            assert (first == again, cold, warm) == (True, False, True)
            assert caplog.messages.count(f"engine {engine.url}: step model restored") == 1

    async def test_what_an_engine_tells_later_does_not_throw_away_what_was_learnt_since(self, tmp_path: Path) -> None:
        async with scripted_engine() as engine:
            self.version(engine, "0.11")
            engine.metrics = (CACHE % (0, 1000)).encode()
            await self.learnt_by(engine, tmp_path)
            said = list[EngineUp | EngineDown | EngineReported | EngineRemoved]()
            known = Knowledge.load(tmp_path)
            prober = Prober((engine.url,), limits_of, said.append, interval_seconds=60.0, knowledge=known)
            await prober.look(prober.probes[0])
            engine.metrics = (CACHE % (0, 1001)).encode()
            await prober.look(prober.probes[0])
            await prober.close()
            ups = [up for up in said if isinstance(up, EngineUp)]
            assert [up.learnt is not None for up in ups] == [True, False]
            assert [up.delay is not None for up in ups] == [True, False]

    async def test_another_engine_behind_the_same_address_does_not(self, tmp_path: Path) -> None:
        async with scripted_engine() as engine:
            self.version(engine, "0.11")
            await self.learnt_by(engine, tmp_path)
            self.version(engine, "0.12")
            ((_, warm),) = await self.learnt_by(engine, tmp_path)
            assert not warm
            engine.models = ["other"]
            ((_, warm),) = await self.learnt_by(engine, tmp_path)
            assert not warm

    async def test_an_adapter_makes_no_other_engine(self, tmp_path: Path) -> None:
        async with scripted_engine() as engine:
            self.version(engine, "0.11")
            ((before, _),) = await self.learnt_by(engine, tmp_path)
            cards = [{"id": "m"}, {"id": "adapter", "parent": "m"}]
            engine.routes["GET /v1/models"] = lambda call: call.answer(json.dumps({"data": cards}).encode())
            ((after, warm),) = await self.learnt_by(engine, tmp_path)
            assert (after == before, warm) == (True, True)

    @pytest.mark.parametrize("answer", [b"", b"[]", b'{"version": []}', b"[" * 100_000, b"3"])
    async def test_whatever_an_engine_says_of_its_version(self, answer: bytes, tmp_path: Path) -> None:
        async with scripted_engine() as engine:
            engine.routes["GET /version"] = lambda call: call.answer(answer)
            await self.learnt_by(engine, tmp_path)
            ((_, warm),) = await self.learnt_by(engine, tmp_path)
            assert warm

    async def test_nobody_is_asked_for_a_version_without_need(self) -> None:
        async with scripted_engine() as engine, watching(engine) as watch:
            await watch.look(2)
            assert engine.calls == []


class TestChangingEngines:
    """Engines are added and removed while the others are watched."""

    async def test_an_engine_that_is_added_is_watched_and_one_that_is_removed_is_not(self) -> None:
        async with scripted_engine() as first, scripted_engine() as second, watching(first) as watch:
            watch.prober._interval_seconds = 0.01
            running = asyncio.ensure_future(watch.prober.run())
            try:
                watch.prober.add(second.url)
                watch.prober.add(second.url)
                await until(lambda: EngineUp(second.url, limits(None), frozenset("m")) in watch.said)
                assert len(watch.prober.probes) == 2, "the same one twice is one"
                watch.prober.remove(first.url, 5.0)
                assert watch.said[-1] == EngineRemoved(first.url, 5.0)
                looked, told = first.probes["GET /health"], len(watch.said)
                await until(lambda: second.probes["GET /health"] > 5)
                assert first.probes["GET /health"] <= looked + 1, "no more than what was on its way"
                assert len(watch.said) == told
                assert [model["id"] for model in watch.prober.models()] == ["m"]
                watch.prober.add(first.url)
                await until(lambda: isinstance(watch.said[-1], EngineUp))
                assert watch.said[-1].engine_id == first.url
            finally:
                running.cancel()
                await asyncio.wait([running])

    async def test_what_nobody_was_told_of_is_removed_without_a_word(self) -> None:
        async with scripted_engine() as engine, watching(engine) as watch:
            watch.prober.remove(engine.url, 5.0)
            watch.prober.remove("http://nobody", 5.0)
            assert (watch.said, watch.prober.probes) == ([], [])
