"""The compiled core (make test-compiled) beside the same as Python runs it: the same decisions at the same times."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import proxy.core
from proxy.core import is_compiled

pytestmark = [
    pytest.mark.skipif(not is_compiled(), reason="the core is not compiled: make test-compiled"),
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).parents[2]

TRAFFIC: dict[str, str] = {
    "whole prompts": "--policy gate --rate 1.7",
    "tiles": "--policy tiles --rate 1.7 --jitter",
    "two engines, deadlines, refusals": "--policy slai --rate 4.5 --engines 2 --retries 2 --class all:1:tbt=0.1:ttft=3",
    "throughput": "--policy rad --rate 2.5",
    "tenants": "--policy gate --rate 2.5 --tenants calm=1,flood=10 --guarantee calm=30000 --quota flood=60000",
    "a small cache": "--policy tiles --rate 1.8 --watermark 0.05 --profile l40s --max-num-seqs 24",
}


def slai_proxy(arguments: str, *, compiled: bool) -> str:
    """Run a command of ours with one core or the other, and return what it printed."""
    environment = dict(os.environ)
    if not compiled:  # then it is the checkout's, whose install is an editable one
        del environment["PYTHONPATH"]
    command = [sys.executable, "-m", "proxy", *arguments.split()]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_runs_the_core_that_it_should() -> None:
    assert slai_proxy("--version", compiled=True).endswith("(core compiled)\n")
    assert "compiled" not in slai_proxy("--version", compiled=False)


def test_all_of_the_core_is_compiled_but_the_letters_of_fleets() -> None:
    (package,) = proxy.core.__path__
    sources = sorted(path.relative_to(package) for path in Path(package).rglob("*.py") if path.name != "__init__.py")
    modules = [import_module("proxy.core." + ".".join(source.with_suffix("").parts)) for source in sources]
    assert len(modules) > 60
    assert [m.__name__ for m in modules if str(m.__file__).endswith(".py")] == ["proxy.core.fleet.letters"]


@pytest.mark.parametrize("traffic", TRAFFIC.values(), ids=TRAFFIC)
def test_what_one_core_decided_the_other_decides_anew(traffic: str, tmp_path: Path) -> None:
    for compiled in True, False:
        log = tmp_path / f"compiled-{compiled}.jsonl"
        slai_proxy(f"simulate {traffic} --requests 400 --seeds 5 --decision-log {log}", compiled=compiled)
        slai_proxy(f"replay {log}", compiled=not compiled)


@pytest.mark.parametrize("more", ["--replicas 1,3 --tenants calm=1,flood=4", "--policy gate-plugin-deadline,tiles"])
def test_simulations_come_out_the_same(more: str) -> None:
    arguments = f"simulate --rate 1.7 --requests 300 --seeds 1,2 --json {more}"
    figures = [json.loads(slai_proxy(arguments, compiled=compiled)) for compiled in (True, False)]
    assert figures[0] == figures[1]
