"""Lines of a decision log: what is written can be read, and what is damaged is told."""

import json

import pytest
from builders import make_limits, make_request

from proxy.core.actions import Dispatch, Reject, Slice
from proxy.core.config import SchedulerConfig
from proxy.core.events import Arrived, EngineUp, TokensProduced
from proxy.core.ordering import first_come_first_served
from proxy.core.recording import Record
from proxy.core.request import RejectReason
from proxy.wire.decisions import DecisionLineError, Head, Step, line_of, read_head, read_step

HEAD = Head(SchedulerConfig(ordering=first_come_first_served()), "run-1", part=3, unix_seconds=12.5)


def test_the_head_comes_back_as_it_went() -> None:
    line = HEAD.line()
    assert read_head(line) == HEAD
    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]


@pytest.mark.parametrize(
    "record",
    [
        (1.000001, None, []),
        (2.0, EngineUp("http://e0", make_limits(), frozenset({"m", "n"})), []),
        (3.0, Arrived(make_request("7", 12, model="m"), 2.5), [Dispatch("7", "http://e0")]),
        (4.0, TokensProduced("7", 2), [Slice("8", "e", 64, 0, 1), Reject("9", RejectReason.QUEUE_FULL, 0.1 + 0.2)]),
    ],
)
def test_every_record_comes_back_as_it_went(record: Record) -> None:
    now, event, actions = record
    assert read_step(line_of(record)) == Step(now, event, actions)  # type: ignore[arg-type]


def test_tokens_are_short() -> None:
    line = line_of((12.345678, "1234", 1))
    assert line == b'[12.345678,"1234",1]\n'
    assert read_step(line) == Step(12.345678, TokensProduced("1234", 1), [])


@pytest.mark.parametrize("line", [b"", b"{}", b"[1]", b"x", b'{"format": "other"}', b"\xff", b"[" * 100_000])
def test_what_is_no_log_is_told(line: bytes) -> None:
    with pytest.raises(DecisionLineError, match="no decision log"):
        read_head(line)


def test_another_version_of_the_format_is_told() -> None:
    told = json.loads(HEAD.line()) | {"version": 99}
    with pytest.raises(DecisionLineError, match="version 99 of the format; this program reads 1"):
        read_head(json.dumps(told).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"config": None},
        {"config": {"type": "GateConfig"}},
        {"config": {"type": "SchedulerConfig", "unheard_of": 1}},
        {"part": "x"},
        {"run": 7},
    ],
)
def test_a_damaged_head_is_told(change: dict[str, object]) -> None:
    told = json.loads(HEAD.line()) | change
    with pytest.raises(DecisionLineError, match="damaged"):
        read_head(json.dumps(told).encode())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"3",
        b"[1,2]",
        b'{"t": 1}',
        b'{"t": "x", "event": null, "actions": []}',
        b'{"t": 1, "event": {"type": "Dispatch", "request_id": "a", "engine_id": "b"}, "actions": []}',
        b'{"t": 1, "event": null, "actions": [{"type": "Ended", "request_id": "a"}]}',
        b'{"t": 1, "event": null, "actions": 3}',
        b'{"t": 1, "event": {"type": "Invented"}, "actions": []}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_damaged_line_is_told(line: bytes) -> None:
    with pytest.raises(DecisionLineError):
        read_step(line)
