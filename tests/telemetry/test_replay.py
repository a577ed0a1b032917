"""Deciding a log anew: the same decisions, or the first that differs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interpreted import interpreted

from proxy.core.actions import Action
from proxy.core.config import SchedulerConfig
from proxy.core.events import Arrived, EngineReported, EngineUp, Event
from proxy.core.feedback import DelaySnapshot
from proxy.core.ordering import first_come_first_served
from proxy.core.policies import PolicyName, configure
from proxy.core.recording import Record, RecordedScheduler
from proxy.core.request import RequestClass
from proxy.core.tiles import TileConfig
from proxy.sim.engine import EngineConfig
from proxy.sim.profiles import PROFILES
from proxy.sim.simulator import SimulationConfig, simulate
from proxy.sim.workload import ClassShare, draw_workload, sharegpt_like
from proxy.telemetry.decisionlog import PARTS, LogFile, part_path
from proxy.telemetry.replay import LogError, open_log, replay
from proxy.wire.decisions import Head, line_of

CONFIG = SchedulerConfig(max_queue_requests=20)
CLASSES = (
    ClassShare(RequestClass("strict", tbt_seconds=0.1, weight=2.0), 0.2),
    ClassShare(RequestClass("prompt", ttft_seconds=2.0, tbt_seconds=0.5), 0.4),
    ClassShare(RequestClass("relaxed", tbt_seconds=0.5), 0.4),
)


FAR = DelaySnapshot((0.1, 0.05), (0.2, 0.1), (0.5, 0.1))


class Warm(RecordedScheduler):
    """One whose engines begin with what an earlier run has learnt of their delay."""

    def handle(self, event: Event, now: float) -> list[Action]:
        return super().handle(replace(event, delay=FAR) if isinstance(event, EngineUp) else event, now)


def records_of(
    config: SchedulerConfig,
    *,
    requests: int = 60,
    engines: int = 2,
    seed: int = 1,
    kind: type[RecordedScheduler] = RecordedScheduler,
) -> list[Record]:
    """What a simulated proxy under pressure is told and decides."""
    drawn = draw_workload(
        sharegpt_like(500),
        rate=3.5 * engines,
        requests=requests,
        seed=seed,
        classes=CLASSES,
        tenants={"one": 0.6, "two": 0.3, "three": 0.1},
    )
    workload = [replace(r, output_tokens=max(1, r.output_tokens // 6)) for r in drawn]
    records: list[Record] = []

    def make(config: SchedulerConfig) -> RecordedScheduler:
        return kind(config, records.append)

    simulation = SimulationConfig(EngineConfig(PROFILES["rtx6000ada"]), engines, report_seconds=0.5)
    simulate(workload, simulation, config, make_scheduler=make)
    return records


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return records_of(CONFIG)


@pytest.fixture
def path(tmp_path: Path, records: list[Record]) -> Path:
    """A log of ``records``."""
    path = tmp_path / "log"
    write(path, records)
    return path


def write(path: Path, records: list[Record], config: SchedulerConfig = CONFIG) -> None:
    path.write_bytes(Head(config, "run").line() + b"".join(map(line_of, records)))


def edit(path: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    told = json.loads(lines[number])
    change(told)
    lines[number] = json.dumps(told).encode() + b"\n"
    path.write_bytes(b"".join(lines))


def line_with(path: Path, words: bytes, nth: int = 0) -> int:
    """Index of the nth line that holds ``words``."""
    return [number for number, line in enumerate(path.read_bytes().splitlines()) if words in line][nth]


RULES = {
    "gate": CONFIG,
    "short queue": SchedulerConfig(ordering=first_come_first_served(), max_queue_requests=3),
    "tiles": SchedulerConfig(tiles=TileConfig()),
    "impatient": SchedulerConfig(queue_timeout_seconds=2.0, max_wait_seconds=1.0),
    "slai": configure(PolicyName.SLAI, SchedulerConfig(tenant_weights={"one": 2.0}), 10.0),
    "rad": configure(PolicyName.RAD, SchedulerConfig(), 10.0),
}


@pytest.mark.parametrize("rules", RULES)
def test_every_decision_is_reproduced(rules: str, tmp_path: Path) -> None:
    records = records_of(RULES[rules])
    write(tmp_path / "log", records, RULES[rules])
    found = replay(open_log(tmp_path / "log"))
    assert found.difference is None
    assert found.events == len(records)
    assert found.actions == sum(len(r[2]) for r in records if isinstance(r[2], list)) >= 60
    events = [record[1] for record in records]
    assert any(isinstance(event, EngineReported) for event in events)
    assert {event.request.tenant for event in events if isinstance(event, Arrived)} == {"one", "two", "three"}


@interpreted
def test_what_an_earlier_run_has_learnt_is_part_of_the_log(tmp_path: Path, records: list[Record]) -> None:
    warm = records_of(CONFIG, kind=Warm)
    assert warm[2:] != records[2:], "it matters"
    write(tmp_path / "log", warm)
    assert replay(open_log(tmp_path / "log")).difference is None


def test_a_decision_that_was_another_is_found_with_what_led_to_it(path: Path) -> None:
    number = line_with(path, b'"Dispatch"', nth=20)
    edit(path, number, lambda told: told["actions"][0].update(engine_id="elsewhere"))
    found = replay(open_log(path))
    assert found.difference is not None
    assert found.difference.where == f"{path}:{number + 1}"
    assert found.events == number - 1
    assert [a.request_id for a in found.difference.actions] == [a.request_id for a in found.difference.step.actions]
    assert found.difference.actions != found.difference.step.actions
    assert [where for where, _ in found.difference.before] == [f"{path}:{number + 1 - n}" for n in (5, 4, 3, 2, 1)]


def test_a_decision_that_is_missing_or_too_many_is_found(path: Path) -> None:
    number = line_with(path, b'"Dispatch"', nth=5)
    edit(path, number, lambda told: told["actions"].clear())
    found = replay(open_log(path)).difference
    assert found is not None
    assert (found.step.actions, len(found.actions)) == ([], 1)


def test_other_rules_decide_otherwise(path: Path, records: list[Record]) -> None:
    write(path, records, SchedulerConfig(ordering=first_come_first_served(), max_queue_requests=20))
    assert replay(open_log(path)).difference is not None


def test_an_event_that_the_scheduler_cannot_take_is_a_difference(path: Path) -> None:
    edit(path, line_with(path, b'"Arrived"', nth=1), lambda told: told["event"]["request"].update(id="0"))
    found = replay(open_log(path)).difference
    assert found is not None
    assert found.error == "ValueError: request id '0' is in use"


def test_a_last_line_that_is_cut_off_is_left_out(path: Path, records: list[Record]) -> None:
    path.write_bytes(path.read_bytes()[:-4])
    log = open_log(path)
    found = replay(log)
    assert found.difference is None
    assert log.truncated
    assert found.events == len(records) - 1


def test_a_damaged_line_is_told_with_its_place(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[7] = b"\x00" * 40 + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(LogError, match=r"log:8: no JSON: the log is damaged"):
        replay(open_log(path))


def test_what_is_no_log_is_told(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="No such file"):
        open_log(tmp_path / "missing")
    with pytest.raises(LogError, match="cannot read"):
        open_log(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(LogError, match="no decision log"):
        open_log(tmp_path / "empty")


def in_five(records: list[Record]) -> int:
    """A bound with which a log of ``records`` has five parts or six."""
    return PARTS * sum(map(len, map(line_of, records))) // 5


class TestParts:
    @staticmethod
    def written(path: Path, records: list[Record], most_bytes: int) -> None:
        file = LogFile(path, CONFIG, most_bytes=most_bytes)
        file.write(records)
        file.close()

    def test_all_parts_are_replayed_as_one(self, tmp_path: Path, records: list[Record]) -> None:
        path = tmp_path / "log"
        self.written(path, records[:50], 1 << 30)  # of a former run, and none of its business
        self.written(path, records, in_five(records))
        log = open_log(path)
        assert len(log.parts) > 3
        found = replay(log)
        assert found.difference is None
        assert found.events == len(records)

    def test_a_beginning_that_is_gone_is_told(self, tmp_path: Path, records: list[Record]) -> None:
        path = tmp_path / "log"
        self.written(path, records, in_five(records))
        oldest = open_log(path).parts[0]
        oldest.unlink()
        with pytest.raises(LogError, match=r"part 1 is gone.*--decision-log-bytes"):
            open_log(path)
        oldest.write_bytes(b"something else\n")
        with pytest.raises(LogError, match="part 1 is gone"):
            open_log(path)

    def test_a_line_cut_off_within_an_older_part_is_damage(self, tmp_path: Path, records: list[Record]) -> None:
        path = tmp_path / "log"
        self.written(path, records, in_five(records))
        older = part_path(path, 1)
        older.write_bytes(older.read_bytes()[:-4])
        with pytest.raises(LogError, match="damaged"):
            replay(open_log(path))
