"""The life of a process: what systemd is told, settings read anew, and the codes with which it ends."""

import asyncio
import hashlib
import shlex
import signal
import socket
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
from live_proxy import until
from serving_process import serving, spawn
from test_serve import FAST, JSON, body_of

from proxy.config import Settings
from proxy.configload import load_settings

pytestmark = pytest.mark.e2e

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "slai-proxy.service"


class Systemd:
    """The other end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.heard: list[str] = []

    def hears(self, word: str) -> bool:
        while True:
            try:
                self.heard += self._end.recv(4096).decode().splitlines()
            except BlockingIOError:
                return word in self.heard


async def test_a_life_under_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, file = tmp_path / "notify", tmp_path / "slai.yaml"
    file.write_text("log_level: info\n")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as end:
        end.bind(str(address))
        end.setblocking(False)
        systemd = Systemd(end)
        monkeypatch.setenv("NOTIFY_SOCKET", str(address))
        monkeypatch.setenv("WATCHDOG_USEC", "100000")
        arguments = ("--config", str(file), "--drain-grace-seconds", "0", *FAST)
        async with serving(*arguments) as proxy, aiohttp.ClientSession() as client:
            await until(lambda: systemd.hears("READY=1"))
            assert "STATUS=2 of 2 engines up" in systemd.heard
            await until(lambda: systemd.hears("WATCHDOG=1") and systemd.heard.count("WATCHDOG=1") > 2)

            async def status_of_a_request(**headers: str) -> int:
                async with client.post(
                    f"{proxy.url}/v1/completions", data=body_of(proxy, 1), headers=JSON | headers
                ) as response:
                    await response.read()
                    return response.status

            assert await status_of_a_request() == 200
            systemd.heard.clear()
            digest = hashlib.sha256(b"k").hexdigest()
            file.write_text(f"keys: {{k: {{sha256: '{digest}'}}}}\n")
            proxy.stop(signal.SIGHUP)
            await until(lambda: systemd.hears("READY=1"))
            assert systemd.heard.index("RELOADING=1") < systemd.heard.index("READY=1")
            assert [line for line in systemd.heard if line.startswith("MONOTONIC_USEC=")]
            assert await status_of_a_request() == 401
            assert await status_of_a_request(Authorization="Bearer k") == 200
            # Without a signal, too.
            file.write_text("log_level: info\n")
            async with asyncio.timeout(10):
                while await status_of_a_request() != 200:
                    pass
            proxy.stop()
            await until(lambda: systemd.hears("STOPPING=1"))
            await client.close()
            assert await proxy.exit_code() == 0
        assert [line for line in proxy.said if "settings read anew: keys added k" in line]
        assert digest not in "".join(proxy.said)


async def ends(arguments: tuple[str, ...]) -> tuple[int, str]:
    """Exit code and last words of a process that does not come up."""
    process = await spawn("serve", "--port", "0", *arguments, "--log-level", "error")
    assert process.stderr is not None
    said = (await process.stderr.read()).decode()
    return await process.wait(), said


async def test_it_ends_with_a_code_that_tells_why() -> None:
    cases = [
        (("--tls-cert", "/no/such/file"), 2, "tls_cert: cannot use /no/such/file"),
        (("--host", "192.0.2.1"), 1, "cannot listen on 192.0.2.1"),
    ]
    ended = await asyncio.gather(*(ends(arguments) for arguments, _, _ in cases))
    for (arguments, code, told), (found, said) in zip(cases, ended, strict=True):
        assert found == code, arguments
        assert told in said
        assert len(said.splitlines()) == 1, said


def test_the_unit_names_what_there_is() -> None:
    lines = [line for line in UNIT.read_text().splitlines() if line.startswith(("ExecStart=", "ExecStartPre="))]
    assert len(lines) == 2
    for line in lines:
        program, command, *flags = shlex.split(line.partition("=")[2])
        assert program.endswith("/bin/slai-proxy")
        assert command in ("serve", "check-config")
        assert flags == ["--config", "/etc/slai-proxy/slai.yaml"]
    found = load_settings([], "serve")[0]
    assert isinstance(found, Settings)
    timeout = int(UNIT.read_text().partition("TimeoutStopSec=")[2].split()[0])
    assert timeout > found.drain_seconds + found.drain_grace_seconds
