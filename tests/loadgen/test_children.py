import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen import children
from loadgen.children import ChildError, running

ADDRESS = r"at (\S+)"

Module = Callable[[str], list[str]]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Write a module for a child to run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(code: str) -> list[str]:
        (tmp_path / "a_child.py").write_text(f"import os, signal, sys, time\n{code}")
        return ["a_child", "word"]

    return write


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_child_runs_within_the_context(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLAI_ORDER", "fcfs")
    arguments = module(
        "print('hello', flush=True)\n"
        "print('at', sys.argv[1] + ','.join(k for k in os.environ if k.startswith('SLAI_')), flush=True)\n"
        "time.sleep(600)"
    )
    async with running("it", arguments, address=ADDRESS) as child:
        assert child.address == "word"  # and none of the caller's settings
        assert not child.ended.done()
    assert gone(child.process.pid)


async def test_a_child_that_talks_much_is_not_blocked(module: Module) -> None:
    arguments = module("print('at x'); print('x' * 3_000_000); print('line\\n' * 100_000, flush=True); sys.exit(7)")
    async with running("it", arguments, address=ADDRESS) as child:
        assert await child.ended == 7


async def test_a_child_that_dies_at_start_is_quoted(module: Module) -> None:
    arguments = module("print('one'); print('two', file=sys.stderr); sys.exit(3)")
    with pytest.raises(
        ChildError, match=r"^it ended with status 3; the last that it said:\n(  two\n  one|  one\n  two)$"
    ):
        async with running("it", arguments, address=ADDRESS):
            pass


async def test_a_child_that_dies_later_is_quoted(module: Module) -> None:
    arguments = module("print('at x', flush=True); print('oh', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    async with running("it", arguments, address=ADDRESS) as child:
        await asyncio.wait((child.ended,))
        assert str(await child.failure()).splitlines() == [
            "it was ended by signal 9; the last that it said:",
            "  at x",
            "  oh",
        ]


async def test_a_silent_child_is_not_waited_for_forever(module: Module) -> None:
    with pytest.raises(ChildError, match=r"^it did not come up in 0.2 s and said nothing$"):
        async with running("it", module("time.sleep(600)"), address=ADDRESS, patience_seconds=0.2):
            pass


async def test_a_child_that_does_not_want_to_end_is_killed(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_PATIENCE_SECONDS", 0.1)
    arguments = module("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('at x', flush=True); time.sleep(600)")
    async with running("it", arguments, address=ADDRESS) as child:
        pass
    assert child.ended.result() == -9
    assert gone(child.process.pid)
