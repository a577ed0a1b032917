"""The decision log on disk: complete, bounded, beside the event loop, and never the end of the proxy."""

import asyncio
import logging
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from proxy.core.config import SchedulerConfig
from proxy.core.recording import Record
from proxy.telemetry import decisionlog
from proxy.telemetry.decisionlog import PARTS, DecisionLog, DecisionLogError, LogFile, part_path
from proxy.wire.decisions import read_head, read_step

CONFIG = SchedulerConfig()
ROOMY = 1 << 30


def tokens(count: int, start: int = 0) -> list[Record]:
    return [(float(number), "7", 1) for number in range(start, start + count)]


def times(path: Path) -> list[float]:
    """The times of all records of a file, in their order."""
    return [read_step(line).now for line in path.read_bytes().splitlines()[1:]]


class TestFile:
    def test_a_head_and_then_every_record(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        file = LogFile(path, CONFIG, most_bytes=ROOMY)
        file.write(tokens(1234))
        file.close()
        assert times(path) == [float(number) for number in range(1234)]
        head = read_head(path.read_bytes().splitlines()[0])
        assert (head.config, head.part) == (CONFIG, 0)
        assert list(tmp_path.iterdir()) == [path]

    def test_only_its_owner_may_read_it(self, tmp_path: Path) -> None:
        LogFile(tmp_path / "log", CONFIG, most_bytes=ROOMY).close()
        assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600

    def test_it_is_bounded_and_the_youngest_part_is_the_file_itself(self, tmp_path: Path) -> None:
        path, most = tmp_path / "log", 200_000
        file = LogFile(path, CONFIG, most_bytes=most)
        for start in range(0, 40_000, 1000):
            file.write(tokens(1000, start))
        file.close()
        parts = [part_path(path, number) for number in range(PARTS)]
        assert sorted(tmp_path.iterdir()) == sorted(parts)
        assert most / 2 < sum(part.stat().st_size for part in parts) < most + PARTS * len(path.read_bytes())
        heads = [read_head(part.read_bytes().splitlines()[0]) for part in parts]
        assert [head.part for head in heads] == [heads[0].part - n for n in range(PARTS)]
        assert {head.run for head in heads} == {heads[0].run}
        found = [now for part in reversed(parts) for now in times(part)]
        assert found == [float(number) for number in range(40_000 - len(found), 40_000)], "and without a gap"

    def test_a_former_run_is_kept_beside_it(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        for run in range(PARTS + 3):
            file = LogFile(path, CONFIG, most_bytes=ROOMY)
            file.write(tokens(1, run))
            file.close()
        assert [times(part_path(path, number)) for number in range(PARTS)] == [[PARTS + 2.0 - n] for n in range(PARTS)]
        assert len(list(tmp_path.iterdir())) == PARTS

    @pytest.mark.parametrize("name", ["log", "log.1", "log.7"])
    def test_nothing_but_former_logs_is_moved_away(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text("precious: data\n")
        with pytest.raises(DecisionLogError, match="something else"):
            LogFile(tmp_path / "log", CONFIG, most_bytes=ROOMY)
        assert [file.read_text() for file in tmp_path.iterdir()] == ["precious: data\n"]

    def test_neither_a_directory_nor_a_device_is_taken_for_a_log(self, tmp_path: Path) -> None:
        directory = tmp_path / "directory"
        directory.mkdir()
        os.mkfifo(tmp_path / "pipe")
        for path in (directory, tmp_path / "pipe"):
            with pytest.raises(DecisionLogError, match="something else"):
                LogFile(path, CONFIG, most_bytes=ROOMY)
        assert sorted(tmp_path.iterdir()) == [directory, tmp_path / "pipe"]

    def test_an_empty_file_is_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "log").touch()
        LogFile(tmp_path / "log", CONFIG, most_bytes=ROOMY).close()

    def test_a_place_that_cannot_be_written_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(DecisionLogError, match="nowhere"):
            LogFile(tmp_path / "nowhere" / "log", CONFIG, most_bytes=ROOMY)


class SlowFile:
    """Takes nothing before it is allowed to, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.error = error
        self.records: list[Record] = []
        self.closed = False

    def write(self, records: Sequence[Record]) -> None:
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        self.records += records

    def close(self) -> None:
        self.closed = True


def log_of(file: object) -> DecisionLog:
    return DecisionLog(file, interval_seconds=0.001)  # type: ignore[arg-type]


class TestLog:
    async def test_what_was_taken_down_is_on_disk_after_the_end(self, tmp_path: Path) -> None:
        log = DecisionLog(LogFile(tmp_path / "log", CONFIG, most_bytes=ROOMY), interval_seconds=0.001)
        task = asyncio.ensure_future(log.run())
        for record in tokens(3000):
            log.record(record)
            if record[0] % 500 == 0:
                await asyncio.sleep(0.003)
        task.cancel()
        await asyncio.wait([task])
        await log.close()
        assert times(tmp_path / "log") == [float(number) for number in range(3000)]

    async def test_the_loop_does_not_wait_for_the_disk_and_nothing_is_lost_or_reordered(self) -> None:
        file = SlowFile()
        log = log_of(file)
        log.record(tokens(1)[0])
        log.flush()
        for record in tokens(50, 1):
            log.record(record)
            log.flush()
        assert file.records == []
        file.go.set()
        await log.close()
        assert file.records == tokens(51)
        assert file.closed

    async def test_a_disk_that_fails_ends_the_log_and_nothing_else(self, caplog: pytest.LogCaptureFixture) -> None:
        file = SlowFile(OSError(28, "No space left on device"))
        file.go.set()
        log = log_of(file)
        for _ in range(3):
            log.record(tokens(1)[0])
            log.flush()
            await asyncio.sleep(0.02)
        log.flush()
        assert log._records == [], "it does not pile up"
        await log.close()
        told = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert [record.getMessage() for record in told] == ["the decision log ends here: No space left on device"]

    async def test_a_file_that_cannot_be_closed_either_does_not_end_the_proxy(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class FullFile(SlowFile):
            def close(self) -> None:  # as a buffered file does: it tries once more to write what it could not
                raise OSError(28, "No space left on device")

        for error in (OSError(28, "No space left on device"), None):
            caplog.clear()
            file = FullFile(error)
            file.go.set()
            log = log_of(file)
            log.record(tokens(1)[0])
            await log.close()
            told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
            assert told == ["the decision log ends here: No space left on device"]

    async def test_a_disk_that_hangs_does_not_fill_the_memory(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decisionlog, "_MOST_RECORDS", 100)
        file = SlowFile()
        log = log_of(file)
        for record in tokens(1000):
            log.record(record)
            log.flush()
            assert len(log._records) <= 101
        assert "too slow" in caplog.text
        file.go.set()
        await log.close()
        assert file.records == tokens(1), "what was on its way, and then nothing: no gap"
