"""Settings that change while the proxy runs."""

import asyncio
import hashlib
import logging
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from live_proxy import LiveProxy, serving, until
from scripted_engine import Call, ScriptedEngine, scripted_engine, token

from proxy.config import Settings
from proxy.configload import load_settings
from proxy.server import reload as reloading
from proxy.server.app import PROXY, create_app
from proxy.server.files import read_files
from proxy.server.notify import Notifier
from proxy.server.reconfigure import put_in_force
from proxy.server.reload import LIVE, Reloader, compare, signature

KEY = "sk-canary-of-a-client"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


@pytest.fixture(autouse=True)
def _same_level_of_log() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@dataclass
class Stage:
    proxy: LiveProxy
    file: Path
    reloader: Reloader

    async def write(self, text: str) -> bool:
        """Change the configuration file and have it read anew."""
        self.file.write_text(text)
        return await self.reloader.reload()


@asynccontextmanager
async def stage(tmp_path: Path, *engines: ScriptedEngine, text: str = "") -> AsyncIterator[Stage]:
    file = tmp_path / "slai.yaml"
    file.write_text(text)
    urls = ",".join(engine.url for engine in engines)
    arguments = ["--config", str(file), *(["--engines", urls] if urls else []), "--probe-interval-seconds", "600"]

    def load() -> Settings:
        return load_settings(arguments, "slai-proxy serve")[0]

    settings = load()
    files = read_files(settings)
    app = create_app(settings, files=files)
    async with serving(app, tls=files.tls) as proxy:
        reloader = Reloader(
            settings,
            load,
            lambda new, found: put_in_force(app, new, found, files.tls),
            asyncio.Event(),
            Notifier(),
        )
        reloader.tell(app[PROXY].metrics)
        yield Stage(proxy, file, reloader)


async def test_what_can_change_does_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with scripted_engine() as engine, stage(tmp_path, engine) as on:
        scheduler = on.proxy.scheduler
        assert await on.write(
            "max_queue_requests: 7\nqueue_timeout_seconds: 9\nkv_watermark: 0.2\ntoken_budget: 100\n"
            "classes: {gold: {tbt_seconds: 1}, relaxed: {}}\ntenants: {acme: {weight: 5}}\n"
            "body_timeout_seconds: 3\nhead_timeout_seconds: 4\nmax_connections: 99\nconnect_timeout_seconds: 1\n"
        )
        assert (scheduler.config.max_queue_requests, scheduler.config.queue_timeout_seconds) == (7, 9.0)
        assert scheduler.config.gate.kv_watermark == 0.2
        assert scheduler.config.tenant_weights == {"acme": 5.0}
        limits = on.proxy.connections.limits
        assert (limits.head_seconds, limits.most) == (4.0, 99)
        assert on.proxy.app[PROXY].client.timeouts.connect == 1.0
        assert "max_queue_requests 10000 -> 7" in caplog.text
        assert "classes added gold, removed strict, changed relaxed" in caplog.text
        # Served by the new class, and accounted there.
        async with on.proxy.post(headers={"x-slo-class": "gold"}) as response:
            assert response.status == 200
            await response.read()
        assert (await on.proxy.fetch(headers={"x-slo-class": "strict"}))[0] == 400
        assert on.proxy.samples("slai_requests_total")[("gold", "completed")] == 1
        assert on.proxy.samples("slai_config_reloads_total") == {("ok",): 1, ("failed",): 0}
        for probe in on.proxy.prober.probes:
            await on.proxy.prober.look(probe)
        assert scheduler.engines[0].limits.token_budget == 100


async def test_requests_that_run_and_wait_are_not_disturbed(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin()
        await go.wait()
        await call.write(token())
        await call.end()

    text = "max_num_seqs: 1\n"
    async with scripted_engine(script) as engine, stage(tmp_path, engine, text=text) as on:
        running = asyncio.ensure_future(on.proxy.fetch())
        waiting = asyncio.ensure_future(on.proxy.fetch())
        await until(lambda: on.proxy.scheduler.waiting and on.proxy.scheduler.dispatched)
        assert await on.write(text + "max_queue_requests: 0\nclasses: {other: {}}\ndefault_class: other\n")
        assert (await on.proxy.fetch())[0] == 429
        go.set()
        assert [(await request)[0] for request in (running, waiting)] == [200, 200]
        await on.proxy.idle()
        samples = on.proxy.samples("slai_requests_total")
        assert samples[("relaxed", "completed")] == 2, "they end in the class in which they came"


@pytest.mark.parametrize(
    "bad",
    [
        "max_queue_requests: -1\n",
        "no_such: 1\n",
        "port: [\n",
        "a: 1\na: 2\n",
        "keys_file: /no/such/file\n",
        "tls_cert: /no/such/file\n",
        "classes: {}\n",
    ],
)
async def test_what_does_not_hold_changes_nothing_and_shows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    async with scripted_engine() as engine, stage(tmp_path, engine) as on:
        before = on.proxy.app[PROXY].settings
        assert not await on.write("queue_timeout_seconds: 9\n" + bad)
        assert on.proxy.app[PROXY].settings is before
        assert on.proxy.scheduler.config.queue_timeout_seconds == 300
        assert on.proxy.samples("slai_config_reloads_total") == {("ok",): 0, ("failed",): 1}
        assert on.proxy.samples("slai_config_last_reload_successful") == {(): 0}
        assert "the settings stay as they are" in caplog.text
        assert await on.write("queue_timeout_seconds: 9\n")
        assert on.proxy.scheduler.config.queue_timeout_seconds == 9
        assert on.proxy.samples("slai_config_last_reload_successful") == {(): 1}


async def test_a_fault_while_reading_is_not_the_last_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Settings) -> None:
        raise ZeroDivisionError

    async with scripted_engine() as engine, stage(tmp_path, engine) as on:
        monkeypatch.setattr(reloading, "read_files", fail)
        assert not await on.write("queue_timeout_seconds: 9\n")
        assert on.proxy.samples("slai_config_last_reload_successful") == {(): 0}
        assert "a fault of the proxy" in caplog.text
        monkeypatch.undo()
        assert await on.write("queue_timeout_seconds: 9\n")


async def test_what_needs_a_restart_is_named_and_the_rest_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_engine() as engine, stage(tmp_path, engine) as on:
        assert await on.write("policy: fcfs\nport: 1\ntiles: true\nkv_watermark: 0.5\n")
        assert "these take effect only with a restart: port, policy, tiles" in caplog.text
        settings = on.proxy.app[PROXY].settings
        assert (settings.policy, settings.port, settings.tiles, settings.kv_watermark) == ("spf", 8000, False, 0.5)
        assert on.proxy.scheduler.config.tiles is None


async def test_keys_come_and_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"mine: {{sha256: '{DIGEST}', requests_per_minute: 2}}\n")
    bearer = {"Authorization": f"Bearer {KEY}"}
    async with scripted_engine() as engine, stage(tmp_path, engine, text=f"keys_file: {keys}\n") as on:
        assert (await on.proxy.fetch())[0] == 401
        assert (await on.proxy.fetch(headers=bearer))[0] == 200
        keys.write_text(f"mine: {{sha256: '{DIGEST}', requests_per_minute: 1}}\n")
        assert await on.reloader.reload()
        assert (await on.proxy.fetch(headers=bearer))[0] == 429
        keys.write_text("{}")
        assert await on.reloader.reload()
        assert (await on.proxy.fetch(headers=bearer))[0] == 401
    assert KEY not in caplog.text
    assert DIGEST not in caplog.text


async def test_engines_come_and_go(tmp_path: Path) -> None:
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        stage(tmp_path, text=f"engines: [{one.url}]\n") as on,
    ):
        assert await on.write(f"engines: [{one.url}, {two.url}]\n")
        await until(lambda: sum(engine.up for engine in on.proxy.scheduler.engines) == 2)
        assert await on.write(f"engines: [{two.url}]\n")
        await until(lambda: [engine.id for engine in on.proxy.scheduler.engines] == [two.url])
        assert (await on.proxy.fetch())[0] == 200
        assert two.calls


async def test_a_new_certificate(tmp_path: Path) -> None:
    authority, other = (trustme.CA(key_type=trustme.KeyType.ECDSA) for _ in range(2))
    certificate = tmp_path / "cert.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    trust = ssl.create_default_context()
    other.configure_trust(trust)
    async with scripted_engine() as engine, stage(tmp_path, engine, text=f"tls_cert: {certificate}\n") as on:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await on.proxy.client.get("/livez", ssl=trust)
        other.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
        assert await on.reloader.reload()
        async with on.proxy.client.get("/livez", ssl=trust) as response:
            assert response.status == 200
        certificate.write_text("no certificate")
        assert not await on.reloader.reload()
        await on.proxy.client.close()


async def test_a_key_to_engines_and_what_is_trusted(tmp_path: Path) -> None:
    key = tmp_path / "engine.key"
    key.write_text("first")
    text = f"engine_key_file: {key}\nengine_tls_verify: false\n"
    async with scripted_engine() as engine, stage(tmp_path, engine, text=text) as on:
        key.write_text("second")
        trust = on.proxy.app[PROXY].trust
        before = trust.tls
        assert await on.reloader.reload()
        await on.proxy.fetch()
        assert engine.calls[-1].header("authorization") == ["Bearer second"]
        assert trust.tls is not before
        for probe in on.proxy.prober.probes:
            await on.proxy.prober.look(probe)
        assert on.proxy.scheduler.engines[0].up


class TestWatching:
    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reloading, "POLL_SECONDS", 0.01)

    async def watched(self, on: Stage, change: Any, holds: Any) -> None:
        task = asyncio.ensure_future(on.reloader.run())
        try:
            await until(lambda: on.reloader._seen)
            change()
            await until(holds)
        finally:
            task.cancel()

    async def test_a_file_that_changes_is_read(self, tmp_path: Path) -> None:
        async with scripted_engine() as engine, stage(tmp_path, engine) as on:
            config = on.proxy.scheduler
            await self.watched(
                on,
                lambda: on.file.write_text("queue_timeout_seconds: 9\n"),
                lambda: config.config.queue_timeout_seconds == 9,
            )

    async def test_a_file_of_the_same_size_put_in_its_place_is_read(self, tmp_path: Path) -> None:
        text = "queue_timeout_seconds: 9\n"
        async with scripted_engine() as engine, stage(tmp_path, engine, text=text) as on:

            def replace() -> None:
                new = tmp_path / "new"
                new.write_text("queue_timeout_seconds: 8\n")
                found = on.file.stat()
                os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
                new.rename(on.file)

            await self.watched(on, replace, lambda: on.proxy.scheduler.config.queue_timeout_seconds == 8)

    async def test_a_directory_of_kubernetes_is_exchanged(self, tmp_path: Path) -> None:
        # config -> ..data/config, ..data -> ..1; an update makes ..2 and moves the link ..data there.
        for version, seconds in ((1, 9), (2, 8)):
            (tmp_path / f"..{version}").mkdir()
            (tmp_path / f"..{version}" / "slai.yaml").write_text(f"queue_timeout_seconds: {seconds}\n")
        (tmp_path / "..data").symlink_to("..1")
        (tmp_path / "mount").mkdir()
        (tmp_path / "mount" / "slai.yaml").symlink_to("../..data/slai.yaml")
        async with scripted_engine() as engine, stage(tmp_path, engine) as on:
            arguments = ["--config", str(tmp_path / "mount" / "slai.yaml"), "--engines", engine.url]
            on.reloader.load = lambda: load_settings(arguments, "x")[0]
            on.reloader.settings = on.reloader.load()

            def update() -> None:
                (tmp_path / "..data_tmp").symlink_to("..2")
                (tmp_path / "..data_tmp").rename(tmp_path / "..data")

            await self.watched(on, update, lambda: on.proxy.scheduler.config.queue_timeout_seconds == 8)

    async def test_a_file_that_is_being_written_is_not_read_yet(self, tmp_path: Path) -> None:
        async with scripted_engine() as engine, stage(tmp_path, engine) as on:
            looks = iter([1, 1, 2, 3, 4, *[5] * 1000])

            async def look() -> Any:
                return {on.file: next(looks)}

            on.reloader.__class__ = type("Looking", (Reloader,), {"_look": lambda self: look(), "__slots__": ()})
            await self.watched(on, lambda: None, lambda: on.reloader.reloads["ok"])
            assert next(looks) == 5
            assert on.reloader.reloads["ok"] == 1

    async def test_a_file_that_changes_while_it_is_read_is_read_again(self, tmp_path: Path) -> None:
        async with scripted_engine() as engine, stage(tmp_path, engine) as on:
            load, times = on.reloader.load, iter([9, 8])

            def load_and_change() -> Settings:
                found = load()
                if (seconds := next(times, None)) is not None:
                    on.file.write_text(f"queue_timeout_seconds: {seconds}\n" + " " * seconds)
                return found

            on.reloader.load = load_and_change
            await self.watched(on, on.reloader.asked.set, lambda: on.proxy.scheduler.config.queue_timeout_seconds == 8)

    async def test_a_signal_is_heeded_although_no_file_has_changed(self, tmp_path: Path) -> None:
        async with scripted_engine() as engine, stage(tmp_path, engine) as on:
            await self.watched(on, on.reloader.asked.set, lambda: on.reloader.reloads["ok"] == 1)


def test_every_name_of_what_can_change_is_a_setting() -> None:
    assert set(Settings.model_fields) >= LIVE


def test_simulated_engines_stay() -> None:
    running = Settings(engines=("http://127.0.0.1:1",))
    change = compare(running, Settings(drain_seconds=3.0), fixed_engines=True)
    assert change.settings.engines == running.engines
    assert (change.changed, change.stays) == (["drain_seconds 30.0 -> 3.0"], [])
    assert compare(running, Settings(engines=("http://a",)), fixed_engines=True).stays == ["engines"]


def test_equal_settings_are_no_change() -> None:
    assert Settings().scheduler_config() == Settings().scheduler_config()
    assert compare(Settings(), Settings()).changed == []


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert signature([tmp_path / "none"]) == (None,)
