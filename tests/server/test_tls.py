"""TLS towards clients and engines, and the proxy's own keys to engines."""

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web
from live_proxy import COMPLETIONS, LiveProxy, live_proxy, serving
from scripted_engine import ScriptedEngine, scripted_engine

from proxy.config import Settings
from proxy.configfile import ConfigError
from proxy.server.app import create_app
from proxy.server.files import read_files
from proxy.tls import load_certificate
from proxy.upstream.credentials import EngineKeys, read_engine_keys

CANARY = "engine-key-canary"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


def write(certificate: trustme.LeafCert, path: Path) -> Path:
    certificate.private_key_and_cert_chain_pem.write_to_path(str(path))
    return path


class TestForClients:
    @asynccontextmanager
    async def proxy(self, engine: ScriptedEngine, certificate: Path) -> AsyncIterator[tuple[LiveProxy, ssl.SSLContext]]:
        settings = Settings(engines=(engine.url,), tls_cert=certificate, probe_interval_seconds=600)
        files = read_files(settings)
        assert files.tls is not None
        async with serving(create_app(settings, files=files), tls=files.tls) as proxy:
            yield proxy, files.tls

    async def test_requests_are_served_under_the_names_of_the_certificate(
        self, authority: trustme.CA, tmp_path: Path
    ) -> None:
        certificate = write(authority.issue_cert("127.0.0.1"), tmp_path / "cert.pem")
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        async with scripted_engine() as engine, self.proxy(engine, certificate) as (proxy, _):
            async with proxy.post(ssl=trust) as response:
                assert response.status == 200
                assert b"[DONE]" in await response.read()
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await proxy.post(ssl=ssl.create_default_context())
            await proxy.client.close()

    async def test_old_versions_are_refused(self, authority: trustme.CA, tmp_path: Path) -> None:
        certificate = write(authority.issue_cert("127.0.0.1"), tmp_path / "cert.pem")
        async with scripted_engine() as engine, self.proxy(engine, certificate) as (proxy, context):
            assert context.minimum_version is ssl.TLSVersion.TLSv1_2
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
            with pytest.warns(DeprecationWarning, match="TLSv1_1"):
                old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises(aiohttp.ClientConnectorError):
                await proxy.client.get("/livez", ssl=old)

    async def test_a_new_certificate_is_shown_to_new_connections(self, authority: trustme.CA, tmp_path: Path) -> None:
        certificate = write(authority.issue_cert("127.0.0.1"), tmp_path / "cert.pem")
        other = trustme.CA(key_type=trustme.KeyType.ECDSA)
        trust = ssl.create_default_context()
        other.configure_trust(trust)
        async with scripted_engine() as engine, self.proxy(engine, certificate) as (proxy, context):
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await proxy.client.get("/livez", ssl=trust)
            load_certificate(context, write(other.issue_cert("127.0.0.1"), certificate), None, "tls_cert")
            async with proxy.client.get("/livez", ssl=trust) as response:
                assert response.status == 200
            await proxy.client.close()

    async def test_a_connection_that_speaks_no_tls_is_of_no_harm(
        self, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        certificate = write(authority.issue_cert("127.0.0.1"), tmp_path / "cert.pem")
        async with (
            scripted_engine() as engine,
            self.proxy(engine, certificate) as (proxy, _),
            aiohttp.ClientSession() as plain,
        ):
            with pytest.raises(aiohttp.ClientError):
                await plain.get(f"http://127.0.0.1:{proxy.port}/livez")
        # An exporter that an earlier test has left to its retries still says that its collector is gone.
        ours = [r for r in caplog.records if not r.name.startswith("opentelemetry")]
        assert not [r for r in ours if r.levelno >= logging.ERROR]


class TestOfEngines:
    @asynccontextmanager
    async def engine(self, context: ssl.SSLContext) -> AsyncIterator[tuple[str, list[str | None]]]:
        """An engine over https, and the names by which it was asked for in the handshake."""
        names: list[str | None] = []
        context.sni_callback = lambda _, name, __: names.append(name)

        async def answer(request: web.Request) -> web.StreamResponse:
            if request.headers.get("Upgrade") == "websocket":
                socket = web.WebSocketResponse()
                await socket.prepare(request)
                await socket.send_str("hello")
                return socket
            return web.json_response({"data": [{"id": "m"}], "choices": []})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield f"https://localhost:{runner.addresses[0][1]}", names
        await runner.cleanup()

    async def ask(self, url: str, **settings: Any) -> int:
        async with live_proxy(url, **settings) as proxy:
            up = proxy.scheduler.engines[0].up
            status, _ = await proxy.fetch(COMPLETIONS, b'{"model": "m", "prompt": "a"}')
            assert up is (status == 200), "probes and requests trust the same"
            return status

    async def test_only_a_known_authority_is_trusted(self, authority: trustme.CA, tmp_path: Path) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("localhost").configure_cert(context)
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        async with self.engine(context) as (url, names):
            assert await self.ask(url) == 503
            assert await self.ask(url, engine_tls_ca=tmp_path / "ca.pem") == 200
            assert set(names) == {"localhost"}, "it is asked for by its name (SNI)"
            assert await self.ask(url, engine_tls_verify=False) == 200

    async def test_websockets_go_to_them_by_tls_too(self, authority: trustme.CA, tmp_path: Path) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("localhost").configure_cert(context)
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        async with (
            self.engine(context) as (url, _),
            live_proxy(url, engine_tls_ca=tmp_path / "ca.pem") as proxy,
            proxy.client.ws_connect("/v1/realtime") as socket,
        ):
            assert await socket.receive_str() == "hello"

    async def test_the_name_has_to_be_that_of_the_certificate(self, authority: trustme.CA, tmp_path: Path) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("other.example").configure_cert(context)
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        async with self.engine(context) as (url, _):
            assert await self.ask(url, engine_tls_ca=tmp_path / "ca.pem") == 503

    async def test_engines_may_want_a_certificate(self, authority: trustme.CA, tmp_path: Path) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("localhost").configure_cert(context)
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        ours = write(authority.issue_cert("proxy.example"), tmp_path / "ours.pem")
        async with self.engine(context) as (url, _):
            assert await self.ask(url, engine_tls_ca=tmp_path / "ca.pem") == 503
            assert await self.ask(url, engine_tls_ca=tmp_path / "ca.pem", engine_tls_cert=ours) == 200


class TestMistakes:
    @pytest.mark.parametrize(
        ("settings", "told"),
        [
            ({"tls_cert": "none"}, "tls_cert: cannot use .*none with itself: No such file"),
            ({"tls_cert": "text"}, "tls_cert: cannot use .*text with itself: "),
            ({"tls_cert": "cert", "tls_key": "other"}, "tls_cert: .*key values mismatch"),
            ({"engine_tls_ca": "none"}, "engine_tls_ca: cannot use .*none: No such file"),
            ({"engine_tls_ca": "text"}, "engine_tls_ca: cannot use .*text"),
            ({"engine_tls_cert": "text"}, "engine_tls_cert: "),
            ({"debug_key_file": "none"}, "No such file"),
            ({"debug_key_file": "text"}, "expected one key"),
            ({"engine_key_file": "text"}, "text, line 1: neither KEY nor URL KEY"),
        ],
    )
    def test_files_that_do_not_hold(
        self, authority: trustme.CA, tmp_path: Path, settings: dict[str, str], told: str
    ) -> None:
        write(authority.issue_cert("a"), tmp_path / "cert")
        write(authority.issue_cert("b"), tmp_path / "other")
        (tmp_path / "text").write_text("some words here\n")
        with pytest.raises(ConfigError, match=told):
            read_files(Settings(**{name: tmp_path / file for name, file in settings.items()}))  # type: ignore[arg-type]

    def test_a_key_needs_its_certificate(self) -> None:
        with pytest.raises(ValueError, match="tls_key needs tls_cert"):
            Settings(tls_key=Path("x"))


class TestEngineKeys:
    async def test_it_takes_the_place_of_what_the_client_sent_and_comes_back_nowhere(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        (tmp_path / "key").write_text(CANARY + "\n")
        async with scripted_engine() as engine, live_proxy(engine, engine_key_file=tmp_path / "key") as proxy:
            for headers in ({}, {"Authorization": "Bearer of-the-client"}, {"x-api-key": "of-the-client"}):
                for path in (COMPLETIONS, "/v1/embeddings"):
                    async with proxy.post(path, headers=headers) as response:
                        assert CANARY not in str(response.headers) + (await response.read()).decode()
            assert len(engine.calls) == 6
            for call in engine.calls:
                assert call.header("authorization") == [f"Bearer {CANARY}"]
                assert "of-the-client" not in str(call.headers)
            assert CANARY not in proxy.exposition()
        assert CANARY not in caplog.text

    async def test_each_engine_gets_its_own(self, tmp_path: Path) -> None:
        async with scripted_engine() as one, scripted_engine() as two:
            (tmp_path / "key").write_text(f"# keys\n{one.url}/ key-of-one\n\nkey-of-others\n")
            async with live_proxy(one, two, engine_key_file=tmp_path / "key") as proxy:
                for _ in range(4):
                    await proxy.fetch("/v1/embeddings")
            assert {key for call in one.calls for key in call.header("authorization")} <= {"Bearer key-of-one"}
            assert {key for call in two.calls for key in call.header("authorization")} <= {"Bearer key-of-others"}
            assert one.calls or two.calls

    def test_probes_carry_it_too(self) -> None:
        keys = EngineKeys({"http://a": "ka"}, "kb")
        assert keys.headers("http://a") == {"Authorization": "Bearer ka"}
        assert keys.headers("http://b") == {"Authorization": "Bearer kb"}
        assert EngineKeys().headers("http://b") == {}
        assert "ka" not in repr(keys)

    @pytest.mark.parametrize(
        ("text", "told"),
        [("", "no key"), ("a b c", "line 1"), ("k\nl", "line 2: a second key"), ("ké", "line 1"), ("a\x01", "line 1")],
    )
    def test_mistakes_do_not_repeat_the_key(self, tmp_path: Path, text: str, told: str) -> None:
        (tmp_path / "f").write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_engine_keys(tmp_path / "f")
