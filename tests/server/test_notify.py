"""What systemd is told, over a real socket of the kind that it listens on."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from live_proxy import until

from proxy.server.notify import Notifier


@pytest.fixture(params=["file", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        if request.param == "file":
            address = str(tmp_path / "notify")
            end.bind(address)
        else:
            address = f"@slai-proxy-test-{os.getpid()}-{id(end)}"
            end.bind("\0" + address[1:])
        end.setblocking(False)
        yield end, address


def test_readiness_reload_and_end(systemd: tuple[socket.socket, str]) -> None:
    end, address = systemd
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": address})
    notifier.ready("2 of 2 engines up")
    assert end.recv(1000) == b"READY=1\nSTATUS=2 of 2 engines up"
    notifier.reloading()
    assert end.recv(1000).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    notifier.stopping("draining")
    assert end.recv(1000) == b"STOPPING=1\nSTATUS=draining"


async def test_the_watchdog_hears_twice_as_often_as_it_asks(systemd: tuple[socket.socket, str]) -> None:
    end, address = systemd
    heard: list[bytes] = []

    def hear() -> bool:
        with suppress(BlockingIOError):
            heard.append(end.recv(1000))
        return len(heard) >= 3

    notifier = Notifier.from_environment({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000"})
    task = asyncio.ensure_future(notifier.run())
    await until(hear)
    task.cancel()
    assert heard == [b"WATCHDOG=1"] * 3


def test_what_is_meant_for_another_process_is_not_done() -> None:
    told = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000000"}
    assert Notifier.from_environment(told).watchdog_seconds == 1.0
    assert Notifier.from_environment(told | {"WATCHDOG_PID": "7"}, pid=7).watchdog_seconds == 1.0
    for wrong in ({"WATCHDOG_PID": "8"}, {"WATCHDOG_PID": "x"}, {"WATCHDOG_USEC": "-1"}, {"WATCHDOG_USEC": "x"}):
        assert Notifier.from_environment(told | wrong, pid=7) == Notifier("/x")


async def test_elsewhere_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier.from_environment({"WATCHDOG_USEC": "1"})
    notifier.ready("x")
    await notifier.run()
    assert not caplog.records
    Notifier("/no/such/socket").ready("x")
    assert "cannot be notified" in caplog.text
