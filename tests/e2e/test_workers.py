"""``--workers``: several real processes behind one port."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import scripted_engine
from serving_process import serving, spawn

from proxy.keys import digest_of

pytestmark = pytest.mark.e2e


async def counted(client: aiohttp.ClientSession, name: str) -> dict[str, float]:
    """A metric of all processes, by the process."""
    async with client.get("/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples if sample.name == name):
        found[sample.labels["worker"]] = found.get(sample.labels["worker"], 0.0) + sample.value
    return found


def children_of(pid: int) -> dict[int, str]:
    """The processes that ``pid`` has started, and their commands."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


def workers_of(pid: int) -> list[int]:
    return [child for child, command in children_of(pid).items() if "proxy serve" in command]


def lives(pid: int) -> bool:
    with suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def is_there(directory: str) -> bool:
    return Path(directory).is_dir()


async def ask(url: str, headers: dict[str, str] | None = None) -> int:
    """One request on a connection of its own: the system deals connections out, not requests."""
    body = {"model": "m", "prompt": "hello", "max_tokens": 2}
    async with (
        aiohttp.ClientSession(url, headers=headers) as client,
        client.post("/v1/completions", json=body) as answer,
    ):
        await answer.read()
        return answer.status


async def test_all_processes_serve_and_are_told_together() -> None:
    async with scripted_engine() as engine, serving("--engines", engine.url, "--workers", "2") as proxy:
        assert await asyncio.gather(*(ask(proxy.url) for _ in range(40))) == [200] * 40
        async with aiohttp.ClientSession(proxy.url) as client:
            requests = await counted(client, "slai_requests_total")
        assert set(requests) == {"0", "1"}
        assert sum(requests.values()) == 40
        assert min(requests.values()) > 0
        proxy.stop()
        assert await proxy.exit_code() == 0


async def test_one_leads_as_soon_as_all_are_there() -> None:
    async with scripted_engine() as engine, serving("--engines", engine.url, "--workers", "2") as proxy:
        async with aiohttp.ClientSession(proxy.url) as client, client.get("/metrics") as answer:
            told = text_string_to_metric_families(await answer.text())
        roles = [s.labels["role"] for family in told for s in family.samples if s.name == "slai_fleet_role" and s.value]
        assert sorted(roles) == ["follower", "leader"]


async def test_a_key_has_one_quota_at_all_processes() -> None:
    keys = json.dumps({"k": {"sha256": digest_of("sk-test"), "requests_per_minute": 5}})
    headers = {"Authorization": "Bearer sk-test"}
    async with (
        scripted_engine() as engine,
        serving("--engines", engine.url, "--workers", "2", "--keys", keys) as proxy,
    ):
        statuses = await asyncio.gather(*(ask(proxy.url, headers) for _ in range(40)))
        assert statuses.count(200) in {5, 6}, "one comes back every twelve seconds"
        assert statuses.count(429) == 40 - statuses.count(200)


async def test_one_that_is_killed_is_started_anew_while_the_other_serves() -> None:
    async with scripted_engine() as engine, serving("--engines", engine.url, "--workers", "2") as proxy:
        victim = workers_of(proxy.process.pid)[-1]
        os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(60), aiohttp.ClientSession(proxy.url) as client:
            while lives(victim) or set(await counted(client, "slai_requests_total")) != {"0", "1"}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        statuses = await asyncio.gather(*(ask(proxy.url) for _ in range(20)))
        assert statuses == [200] * 20
        proxy.stop()
        assert await proxy.exit_code() == 0


async def test_nothing_is_left_when_the_supervisor_is_killed() -> None:
    async with scripted_engine() as engine, serving("--engines", engine.url, "--workers", "2") as proxy:
        children = children_of(proxy.process.pid)
        assert len(children) == 3, "two workers and the server at which they meet"
        (directory, *_) = re.findall(r"unix://(\S+)/", " ".join(children.values()))
        assert is_there(directory)
        proxy.stop(signal.SIGKILL)
        async with asyncio.timeout(30):
            while any(map(lives, children)):  # noqa: ASYNC110 - they are not ours to wait for
                await asyncio.sleep(0.1)
        assert not is_there(directory)


async def test_settings_that_do_not_hold_end_all_with_one_status() -> None:
    process = await spawn(
        "serve", "--port", "0", "--workers", "2", "--engines", "http://127.0.0.1:1", "--tls-cert", "/none"
    )
    async with asyncio.timeout(30):
        _, said = await process.communicate()
    assert process.returncode == 2
    assert b"/none" in said


async def test_workers_without_engines_are_refused() -> None:
    process = await spawn("serve", "--port", "0", "--workers", "2")
    async with asyncio.timeout(30):
        _, said = await process.communicate()
    assert process.returncode == 2
    assert b"workers" in said
    assert b"engines" in said


async def test_workers_do_not_share_a_port_with_those_of_another() -> None:
    """The system would deal clients out to both, and each would fill the engines by itself."""
    async with scripted_engine() as engine, serving("--engines", engine.url, "--workers", "2") as proxy:
        port = proxy.url.rpartition(":")[2]
        process = await spawn("serve", "--port", port, "--engines", engine.url, "--workers", "2")
        async with asyncio.timeout(30):
            _, said = await process.communicate()
        assert process.returncode == 1
        assert b"choose another --port" in said
        assert await ask(proxy.url) == 200


async def test_one_that_cannot_listen_ends_all_with_its_status() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1] - 1  # the second worker's is the next
        process = await spawn(
            "serve", "--port", "0", "--workers", "2", "--engines", "http://127.0.0.1:1", "--debug-port", str(first)
        )
        async with asyncio.timeout(30):
            _, said = await process.communicate()
    assert process.returncode == 1
    assert b"choose another --debug-port" in said


async def test_systemd_is_told_when_all_have_read_the_settings_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)

        async def told() -> str:
            async with asyncio.timeout(30):
                return (await asyncio.get_running_loop().sock_recv(systemd, 4096)).decode()

        async with scripted_engine() as engine, serving("--engines", engine.url, "--workers", "2") as proxy:
            assert (await told()).startswith("READY=1")
            proxy.stop(signal.SIGHUP)
            assert (await told()).startswith("RELOADING=1\nMONOTONIC_USEC=")
            assert (await told()).startswith("READY=1")
            proxy.stop()
            assert (await told()).startswith("STOPPING=1")
            assert await proxy.exit_code() == 0


async def test_one_that_stands_still_is_started_anew_where_systemd_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    monkeypatch.setenv("NOTIFY_SOCKET", "@nobody-listens-here")
    async with scripted_engine() as engine, serving("--engines", engine.url, "--workers", "2") as proxy:
        victim, _ = workers_of(proxy.process.pid)
        os.kill(victim, signal.SIGSTOP)
        async with asyncio.timeout(30):
            while lives(victim) or len(workers_of(proxy.process.pid)) < 2:  # noqa: ASYNC110 - it is not ours
                await asyncio.sleep(0.1)
        proxy.stop()
        assert await proxy.exit_code() == 0
