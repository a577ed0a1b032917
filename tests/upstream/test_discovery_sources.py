"""Engines in a file, in DNS and in Kubernetes, as they come and go."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from live_proxy import live_proxy, until
from scripted_engine import scripted_engine

from proxy.upstream.discovery import SourceError, Urls
from proxy.upstream.discovery_dns import AddressSource, ServiceRecordSource
from proxy.upstream.discovery_file import FileSource
from proxy.upstream.discovery_kubernetes import KubernetesSource

OFTEN = 0.01


async def changed(answers: AsyncGenerator[Urls], before: Urls | None = None) -> Urls:
    """Wait for an answer that is another one than ``before``."""
    async with asyncio.timeout(5):
        async for urls in answers:
            if urls != before:
                return urls
    raise AssertionError("a source never ends")


class TestFile:
    async def test_what_it_lists_in_yaml_json_or_below_a_key(self, tmp_path: Path) -> None:
        path = tmp_path / "engines"
        urls = None
        path.write_text("- http://a:1/\n- http://b:2\n")
        async with aclosing(FileSource(path, OFTEN).watch()) as answers:
            for content, expected in (
                ("- http://a:1/\n- http://b:2\n", {"http://a:1", "http://b:2"}),
                ('["http://c:3"]', {"http://c:3"}),
                ("engines: [http://d:4]", {"http://d:4"}),
                ("", set()),
            ):
                path.write_text(content)
                urls = await changed(answers, urls)
                assert urls == expected

    async def test_a_symbolic_link_that_is_turned_as_of_a_config_map(self, tmp_path: Path) -> None:
        for name in ("old", "new"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "engines.yaml").write_text(f"[http://{name}:1]")
        (tmp_path / "..data").symlink_to("old")
        (tmp_path / "engines.yaml").symlink_to("..data/engines.yaml")
        async with aclosing(FileSource(tmp_path / "engines.yaml", OFTEN).watch()) as answers:
            assert await changed(answers) == {"http://old:1"}
            (tmp_path / "..data_tmp").symlink_to("new")
            (tmp_path / "..data_tmp").replace(tmp_path / "..data")
            assert await changed(answers, frozenset({"http://old:1"})) == {"http://new:1"}

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ("a: [", "neither YAML nor JSON"),
            ("just text", "not a list of base URLs"),
            ("[1, 2]", "not a list of base URLs"),
            ("[dns+http://x:1]", "is not a base URL"),
            ("[http://x:1/v1]", "without /v1"),
            ("x" * ((1 << 20) + 1), "longer than"),
        ],
    )
    async def test_nonsense_is_told(self, tmp_path: Path, content: str, why: str) -> None:
        path = tmp_path / "engines"
        path.write_text(content)
        with pytest.raises(SourceError, match=why):
            await anext(FileSource(path, OFTEN).watch())

    async def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="No such file"):
            await anext(FileSource(tmp_path / "none", OFTEN).watch())


class TestAddresses:
    @staticmethod
    def resolve(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        """Let the loop answer one after the other, and the last one for ever."""
        left = list(answers)

        async def getaddrinfo(*_: Any, **__: Any) -> Any:
            found = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(found, Exception):
                raise found
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 8000)) for address in found]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)

    async def test_every_address_is_an_engine_and_they_are_looked_up_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.resolve(monkeypatch, ["10.0.0.1", "10.0.0.2", "10.0.0.1"], ["10.0.0.2", "fd00::3"])
        async with aclosing(AddressSource("vllm", 8000, "/p", OFTEN).watch()) as answers:
            first = await changed(answers)
            assert first == {"http://10.0.0.1:8000/p", "http://10.0.0.2:8000/p"}
            assert await changed(answers, first) == {"http://10.0.0.2:8000/p", "http://[fd00::3]:8000/p"}

    async def test_no_such_name_is_an_empty_set_and_no_answer_is_a_failure(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.resolve(monkeypatch, socket.gaierror(socket.EAI_NONAME, "x"), socket.gaierror(socket.EAI_AGAIN, "later"))
        async with aclosing(AddressSource("vllm", 8000, "", OFTEN).watch()) as answers:
            assert await anext(answers) == frozenset()
            with pytest.raises(SourceError, match="vllm cannot be looked up: later"):
                await anext(answers)

    async def test_a_real_name(self) -> None:
        assert "http://127.0.0.1:81" in await anext(AddressSource("localhost", 81, "", OFTEN).watch())


class NameServer(asyncio.DatagramProtocol):
    """Answers service records from ``servers``; ``None``: that it cannot."""

    def __init__(self) -> None:
        self.servers: list[tuple[str, int]] | None = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        from dns import message, rcode, rrset

        query = message.from_wire(data)
        answer = message.make_response(query)
        if self.servers is None:
            answer.set_rcode(rcode.SERVFAIL)
        elif not self.servers:
            answer.set_rcode(rcode.NXDOMAIN)
        else:
            records = [f"0 0 {port} {host}." for host, port in self.servers]
            answer.answer.append(rrset.from_text(query.question[0].name, 1, "IN", "SRV", *records))
        self.transport.sendto(answer.to_wire(), address)


async def test_service_records() -> None:
    asyncresolver = pytest.importorskip("dns.asyncresolver")
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    try:
        resolver = asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], transport.get_extra_info("sockname")[1]
        async with aclosing(ServiceRecordSource("_vllm._tcp.x.org", "", OFTEN, resolver).watch()) as answers:
            assert await anext(answers) == frozenset()
            server.servers = [("gpu1.x.org", 8001), ("gpu2.x.org", 8002)]
            assert await changed(answers, frozenset()) == {"http://gpu1.x.org:8001", "http://gpu2.x.org:8002"}
            server.servers = None
            with pytest.raises(SourceError, match="cannot be looked up"):
                await anext(answers)
    finally:
        transport.close()


def endpoint_slice(
    name: str, *addresses: str, unready: tuple[str, ...] = (), port: int = 8000, port_name: str = "http"
) -> dict[str, Any]:
    ready = [{"addresses": [a], "conditions": {"ready": True}} for a in addresses]
    return {
        "metadata": {"name": name, "resourceVersion": "5", "labels": {"kubernetes.io/service-name": "vllm"}},
        "addressType": "IPv4",
        "endpoints": [*ready, *({"addresses": [a], "conditions": {"ready": False}} for a in unready)],
        "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
    }


class ApiServer:
    """As much of a Kubernetes API server as serves EndpointSlices."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.version = 10
        self.status = 200
        self.lists = 0
        self.watched_from: list[str] = []
        self.watches: list[asyncio.Queue[dict[str, Any] | None]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.path == "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
        assert request.query["labelSelector"] == "kubernetes.io/service-name=vllm"
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        if "watch" not in request.query:
            self.lists += 1
            return web.json_response(
                {
                    "kind": "EndpointSliceList",
                    "apiVersion": "discovery.k8s.io/v1",
                    "metadata": {"resourceVersion": str(self.version)},
                    "items": self.slices,
                }
            )
        self.watched_from.append(request.query["resourceVersion"])
        changes: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.watches.append(changes)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while (change := await changes.get()) is not None:
            await response.write(json.dumps(change).encode() + b"\n")
        return response

    async def change(self, answers: AsyncGenerator[Urls], kind: str, value: dict[str, Any]) -> Urls:
        """Tell of a change, and return what comes of it."""
        asking = asyncio.ensure_future(anext(answers))
        await until(lambda: self.watches)
        self.watches[-1].put_nowait({"type": kind, "object": value})
        return await asyncio.wait_for(asking, 5)

    def end_watches(self) -> None:
        while self.watches:
            self.watches.pop().put_nowait(None)


@asynccontextmanager
async def api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    """Serve one, to which a kubeconfig leads."""
    pytest.importorskip("kubernetes")
    server = ApiServer()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    path = tmp_path / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "k", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            }
        )
    )
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    try:
        yield server
    finally:
        server.end_watches()
        await runner.cleanup()


class TestKubernetes:
    SOURCE = KubernetesSource("vllm", "models", "8000", "")

    async def test_ready_endpoints_of_all_slices_as_they_change(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with api_server(tmp_path, monkeypatch) as server:
            server.slices = [endpoint_slice("a", "10.0.0.1", unready=("10.0.0.9",)), endpoint_slice("b", "10.0.0.2")]
            async with aclosing(self.SOURCE.watch()) as answers:
                assert await anext(answers) == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}
                more = await server.change(answers, "MODIFIED", endpoint_slice("a", "10.0.0.1", "10.0.0.9"))
                assert len(more) == 3
                less = await server.change(answers, "DELETED", endpoint_slice("b"))
                assert less == {"http://10.0.0.1:8000", "http://10.0.0.9:8000"}
                assert "http://10.0.0.3:8000" in await server.change(answers, "ADDED", endpoint_slice("c", "10.0.0.3"))
                assert server.watched_from == ["10"]

    async def test_a_watch_that_ends_or_has_fallen_behind_begins_with_a_new_list(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        async with api_server(tmp_path, monkeypatch) as server:
            server.slices = [endpoint_slice("a", "10.0.0.1")]
            async with aclosing(self.SOURCE.watch()) as answers:
                first = await anext(answers)
                server.slices, server.version = [endpoint_slice("a", "10.0.0.2")], 20
                asking = asyncio.ensure_future(anext(answers))
                await until(lambda: server.watches)
                server.end_watches()
                second = await asyncio.wait_for(asking, 5)
                assert second == {"http://10.0.0.2:8000"} != first
                server.slices, server.version = [endpoint_slice("a", "10.0.0.3")], 30
                assert await server.change(answers, "ERROR", gone) == {"http://10.0.0.3:8000"}
                assert server.lists == 3
                asking = asyncio.ensure_future(anext(answers))
                await until(lambda: server.watched_from == ["10", "20", "30"])
                asking.cancel()
                await asyncio.wait([asking])

    async def test_a_server_that_refuses_or_is_not_there_is_a_failure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with api_server(tmp_path, monkeypatch) as server:
            server.status = 403
            with pytest.raises(SourceError, match="the Kubernetes API answers 403"):
                await anext(self.SOURCE.watch())
        with pytest.raises(SourceError, match="the Kubernetes API cannot be reached"):
            await anext(self.SOURCE.watch())

    async def test_no_access_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("kubernetes")
        monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
        with pytest.raises(SourceError, match="no access to a Kubernetes API"):
            await anext(self.SOURCE.watch())

    @pytest.mark.parametrize(("port", "found"), [("8000", 8000), ("http", 8000), ("", 8000), ("metrics", None)])
    async def test_the_port_by_name_number_or_none(
        self, port: str, found: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with api_server(tmp_path, monkeypatch) as server:
            server.slices = [endpoint_slice("a", "10.0.0.1")]
            source = KubernetesSource("vllm", "models", port, "")
            if found is None:
                with pytest.raises(SourceError, match="service vllm has no port metrics"):
                    await anext(source.watch())
            else:
                async with aclosing(source.watch()) as answers:
                    assert await anext(answers) == {f"http://10.0.0.1:{found}"}


async def test_a_proxy_follows_a_file(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    async with scripted_engine() as first, scripted_engine() as second:
        path.write_text(f"[{first.url}]")
        async with live_proxy(f"file:{path}", discovery_interval_seconds=OFTEN) as proxy:
            assert [e.id for e in proxy.scheduler.engines] == [first.url], "it is known when the first request comes"
            assert (await proxy.fetch())[0] == 200
            path.write_text(f"[{second.url}]")
            await until(lambda: [e.id for e in proxy.scheduler.engines if e.up] == [second.url])
            assert (await proxy.fetch())[0] == 200
            assert (len(first.calls), len(second.calls)) == (1, 1)
            assert proxy.samples("slai_discovery_up") == {(f"file:{path}",): 1}
            path.write_text("[")
            await until(lambda: proxy.samples("slai_discovery_up") == {(f"file:{path}",): 0})
            assert (await proxy.fetch())[0] == 200, "the last known engines are kept"
