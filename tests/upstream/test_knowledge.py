"""What was learnt about engines outlives a restart, and no file can do harm."""

import asyncio
import json
import logging
import os
import stat
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from builders import make_engine, make_limits
from live_proxy import until

from proxy.core.engine import EngineBelief
from proxy.core.stepmodel import StepLoad
from proxy.upstream import knowledge
from proxy.upstream.knowledge import FILE_NAME, Knowledge, StateDirError, fingerprint, prepare


def engine_that_saw(steps: int, seconds: float = 0.04, engine_id: str = "e0") -> EngineBelief:
    engine = make_engine(engine_id, models=["m"])
    for number in range(steps):
        engine.model.observe(StepLoad(100 * (number % 5), number % 20, 50 * (number % 20)), seconds)
    return engine


def engine_far_away(engine_id: str = "e0") -> EngineBelief:
    engine = engine_that_saw(300, engine_id=engine_id)
    for _ in range(50):
        engine.delay.learn((0.12, 0.06, 0.0))
    return engine


async def kept(directory: Path, *engines: tuple[str, EngineBelief]) -> Knowledge:
    known = Knowledge.load(directory)
    assert known.learn(engines)
    await known.save()
    return known


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class TestFingerprint:
    SEEN: ClassVar[dict[str, Any]] = {
        "models": ["b", "a"],
        "limits": make_limits(kv_tokens=100_000),
        "version": "0.11.0",
    }

    def test_it_is_the_same_for_the_same_engine(self) -> None:
        assert fingerprint(**self.SEEN) == fingerprint(["a", "b"], make_limits(kv_tokens=100_000), "0.11.0")

    @pytest.mark.parametrize(
        "other",
        [
            {"models": ["a"]},
            {"limits": make_limits(token_budget=8192, kv_tokens=100_000)},
            {"limits": make_limits(kv_tokens=100_000, block_tokens=32)},
            {"limits": make_limits(kv_tokens=200_000)},
            {"limits": make_limits()},
            {"version": "0.12.0"},
        ],
    )
    def test_another_engine_has_another(self, other: dict[str, Any]) -> None:
        assert fingerprint(**self.SEEN | other) != fingerprint(**self.SEEN)

    def test_a_few_blocks_more_or_less_do_not_matter(self) -> None:
        """An engine profiles its memory anew at each start."""
        near = make_limits(kv_tokens=100_480)
        assert fingerprint(**self.SEEN | {"limits": near}) == fingerprint(**self.SEEN)

    def test_it_is_short_whatever_the_engine_says(self) -> None:
        assert len(fingerprint(["x" * 10_000] * 1000, make_limits(), "v" * 100_000)) == 32


class TestKeeping:
    async def test_what_was_learnt_is_there_after_a_restart(self, tmp_path: Path) -> None:
        engine = engine_that_saw(500)
        await kept(tmp_path / "new" / "place", ("f", engine))
        found = Knowledge.load(tmp_path / "new" / "place")
        assert found.recall("f") == engine.model.snapshot()
        assert found.recall("other") is None

    async def test_so_is_its_delay(self, tmp_path: Path) -> None:
        engine = engine_far_away()
        await kept(tmp_path, ("f", engine), ("g", engine_that_saw(300, engine_id="e1")))
        found = Knowledge.load(tmp_path)
        assert found.recall_delay("f") == engine.delay.snapshot() is not None
        assert found.recall_delay("g") is None, "nothing was learnt of it"
        assert found.recall_delay("other") is None

    async def test_a_file_from_before_delays_were_kept_is_as_good_as_ever(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        await kept(tmp_path, ("f", engine_far_away()))
        told = json.loads((tmp_path / FILE_NAME).read_bytes())
        del told["engines"]["f"]["delay"]
        (tmp_path / FILE_NAME).write_text(json.dumps(told))
        found = Knowledge.load(tmp_path)
        assert found.recall("f") is not None
        assert found.recall_delay("f") is None
        assert warnings(caplog) == []

    async def test_only_its_owner_may_read_it_and_nothing_else_is_left(self, tmp_path: Path) -> None:
        await kept(tmp_path, ("f", engine_that_saw(300)))
        file = tmp_path / FILE_NAME
        assert files_in(tmp_path) == [file]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def test_what_is_not_trusted_or_not_new_is_not_worth_saving(self, tmp_path: Path) -> None:
        known, engine = Knowledge(tmp_path / "f"), engine_that_saw(300)
        assert not known.learn([("f", engine_that_saw(20))])
        assert known.learn([("f", engine)])
        assert not known.learn([("f", engine)])
        engine.model.observe(StepLoad(0, 1, 1), 0.04)
        assert known.learn([("f", engine)])
        restored = engine_that_saw(0, engine_id="e1")
        restored.model.restore(engine.model.snapshot())
        assert restored.model.trusted
        assert not known.learn([("f", restored)]), "it has seen nothing of its own"

    def test_of_equal_engines_that_which_saw_most_is_kept(self, tmp_path: Path) -> None:
        most, least = engine_that_saw(900, engine_id="e1"), engine_that_saw(300)
        for order in ([("f", most), ("f", least)], [("f", least), ("f", most)]):
            known = Knowledge(tmp_path / "f")
            known.learn(order)
            assert known.recall("f") == most.model.snapshot()

    async def test_those_used_least_lately_make_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(knowledge, "_MOST_ENGINES", 3)
        known = Knowledge.load(tmp_path)
        engines = [engine_that_saw(200 + number, engine_id=f"e{number}") for number in range(5)]
        known.learn([(f"f{number}", engine) for number, engine in enumerate(engines[:3])])
        assert known.recall("f0") is not None
        known.learn([("f3", engines[3])])
        await known.save()
        found = Knowledge.load(tmp_path)
        assert [found.recall(f"f{n}") is not None for n in range(4)] == [True, False, True, True]

    async def test_it_is_kept_again_and_again_without_a_word(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(knowledge, "_KEEP_SECONDS", 0.001)
        known, engine = Knowledge.load(tmp_path), engine_that_saw(0)
        task = asyncio.ensure_future(known.run(lambda: [("f", engine)]))
        for steps in (300, 500):
            for _ in range(steps):
                engine.model.observe(StepLoad(0, 1, 1), 0.04)
            await until(lambda: Knowledge.load(tmp_path).recall("f") == engine.model.snapshot())
        task.cancel()
        await asyncio.wait([task])

    async def test_a_directory_that_cannot_be_written_is_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        known = Knowledge.load(tmp_path / "file")
        known.learn([("f", engine_that_saw(300))])
        await known.save()
        assert any("cannot keep what was learnt" in warning for warning in warnings(caplog))

    async def test_saves_that_overlap_leave_a_whole_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        known = Knowledge.load(tmp_path)
        known.learn([("f", engine_that_saw(300))])
        at_work: list[int] = []

        def slowly(file: int) -> None:
            assert at_work == [], "two write the same file"
            at_work.append(file)
            time.sleep(0.002)
            at_work.clear()

        monkeypatch.setattr(os, "fsync", slowly)
        await asyncio.gather(*(known.save() for _ in range(20)))
        assert Knowledge.load(tmp_path).recall("f") is not None
        assert files_in(tmp_path) == [tmp_path / FILE_NAME]


DAMAGE = {
    "empty": b"",
    "no JSON": b"{",
    "not text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "foreign": b'{"format": "something else"}',
    "no mapping": b"[]",
    "newer": b'{"format": "slai-proxy step models", "version": 2, "engines": {}}',
    "without engines": b'{"format": "slai-proxy step models", "version": 1}',
    "engines of another kind": b'{"format": "slai-proxy step models", "version": 1, "engines": {"f": 3}}',
    "huge": b" " * (2 << 20),
}


@pytest.mark.parametrize("data", DAMAGE.values(), ids=DAMAGE.keys())
async def test_a_file_that_makes_no_sense_is_a_warning_and_put_aside(
    data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(data)
    known = await kept(tmp_path, ("f", engine_that_saw(300)))
    assert known.recall("g") is None
    assert len(warnings(caplog)) == 1
    assert (tmp_path / FILE_NAME).with_suffix(".unreadable").read_bytes() == data
    assert Knowledge.load(tmp_path).recall("f") is not None


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"model": {"type": "EngineLimits"}},
        {"model": {"type": "StepModelSnapshot"}},
        {"model": [1, 2]},
        {"model": "x"},
    ],
)
async def test_an_entry_that_makes_no_sense_is_not_used(change: dict[str, Any], tmp_path: Path) -> None:
    await kept(tmp_path, ("f", engine_that_saw(300)), ("g", engine_that_saw(300, engine_id="e1")))
    told = json.loads((tmp_path / FILE_NAME).read_bytes())
    told["engines"]["f"] |= change
    (tmp_path / FILE_NAME).write_text(json.dumps(told))
    found = Knowledge.load(tmp_path)
    assert found.recall("f") is None
    assert found.recall("g") is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "much", None, 1e300, 10**400])
async def test_no_figure_can_make_a_model_that_fails(value: Any, tmp_path: Path) -> None:
    """Whatever is accepted predicts a finite, sensible time."""
    await kept(tmp_path, ("f", engine_that_saw(300)))
    file = tmp_path / FILE_NAME
    for position in (0, 1, 5, 20):
        told = json.loads(file.read_bytes())
        told["engines"]["f"]["model"]["gram"][position] = value
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / FILE_NAME).write_text(json.dumps(told))
        learnt = Knowledge.load(tmp_path / "other").recall("f")
        if learnt is not None:
            engine = make_engine()
            engine.model.restore(learnt)
            for _ in range(50):
                engine.model.observe(StepLoad(500, 10, 1000), 0.05)
            assert 0 <= engine.model.predict(StepLoad(500, 10, 1000)) < 10


class TestTheDirectory:
    def test_it_is_made_for_its_owner_and_left_empty(self, tmp_path: Path) -> None:
        directory = tmp_path / "a" / "b"
        prepare(directory)
        prepare(directory)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert files_in(directory) == []

    @pytest.mark.parametrize(
        ("place", "why"),
        [("file", "not a directory"), ("file/below", "Not a directory"), ("/proc/none/such", "No such file")],
    )
    def test_what_cannot_be_made_is_told(self, place: str, why: str, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StateDirError) as caught:
            prepare(tmp_path / place)
        assert str(caught.value).startswith(f"--state-dir {tmp_path / place}: {why}")

    def test_so_is_one_that_is_there_and_not_writable(self, tmp_path: Path) -> None:
        directory = Path("/proc/self")  # not even root can write there, as it could where only the mode forbids it
        with pytest.raises(StateDirError, match=f"^--state-dir {directory}: ."):
            prepare(directory)


@pytest.mark.parametrize("errors", [None, 0, "x", [], {"type": "EngineLimits"}])
async def test_a_model_with_errors_of_another_kind_is_not_used(errors: object, tmp_path: Path) -> None:
    await kept(tmp_path, ("f", engine_that_saw(300)))
    told = json.loads((tmp_path / FILE_NAME).read_bytes())
    told["engines"]["f"]["model"]["prompt_errors"] = errors
    (tmp_path / FILE_NAME).write_text(json.dumps(told))
    assert Knowledge.load(tmp_path).recall("f") is None


@pytest.mark.parametrize(
    "change",
    [
        {"most_seconds": [0.1]},
        {"most_seconds": [0.1, 9.0]},
        {"most_seconds": ["much", None]},
        {"most_seconds": 3},
        {"misses": None},
        {"type": "EngineLimits"},
        {"type": "int", "value": "3"},
        {"more": 1},
    ],
)
async def test_a_delay_that_makes_no_sense_is_not_used_but_the_model_beside_it(
    change: dict[str, Any], tmp_path: Path
) -> None:
    await kept(tmp_path, ("f", engine_far_away()))
    told = json.loads((tmp_path / FILE_NAME).read_bytes())
    told["engines"]["f"]["delay"] |= change
    (tmp_path / FILE_NAME).write_text(json.dumps(told))
    found = Knowledge.load(tmp_path)
    assert found.recall_delay("f") is None
    assert found.recall("f") is not None
