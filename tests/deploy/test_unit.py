"""The systemd unit: systemd reads all of it, and it gives the proxy the time that it takes to drain."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.config import Settings

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "slai-proxy.service"


def values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("kind", ["notify-reload", "notify"])
def test_systemd_understands_every_line(tmp_path: Path, kind: str) -> None:
    text = UNIT.read_text().replace("/opt/slai-proxy/bin/slai-proxy", f"{sys.executable} -m proxy")
    if kind == "notify":  # as the unit itself says for systemd before 253
        text = text.replace("Type=notify-reload", "Type=notify\nExecReload=/bin/kill -HUP $MAINPID")
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    told = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False, timeout=60)
    lines = [line for line in told.stderr.splitlines() if unit.name in line]
    if kind == "notify-reload":
        lines = [line for line in lines if not line.endswith("Failed to parse service type, ignoring: notify-reload")]
    assert (told.returncode, lines) == (0, [])


def test_it_waits_for_the_drain_and_knows_the_exit_code_of_settings_that_do_not_hold() -> None:
    settings = Settings(engines=("http://127.0.0.1:9",))
    (wait,) = values("TimeoutStopSec")
    assert float(wait) > settings.drain_grace_seconds + settings.drain_seconds
    assert values("RestartPreventExitStatus") == ["2"]
    (start,) = values("ExecStart")
    (check,) = values("ExecStartPre")
    assert start.split()[-2:] == check.split()[-2:], "what is checked is what is started with"
