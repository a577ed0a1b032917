"""What is recorded is all that it takes to decide the same again."""

import pytest
from builders import make_limits, make_request

from proxy.core.actions import Dispatch
from proxy.core.config import SchedulerConfig
from proxy.core.events import Arrived, Ended, EngineUp, Event, TokensProduced
from proxy.core.recording import Record, RecordedScheduler

UP = EngineUp("e0", make_limits(max_num_seqs=1))


def recorded(*calls: tuple[float, Event | None]) -> list[Record]:
    records: list[Record] = []
    scheduler = RecordedScheduler(SchedulerConfig(), records.append)
    for now, event in calls:
        if event is None:
            scheduler.tick(now)
        else:
            scheduler.handle(event, now)
    return records


def test_every_call_with_its_time_and_its_answer() -> None:
    arrived, waits = Arrived(make_request("a")), Arrived(make_request("b"), 0.5)
    found = recorded((0.0, UP), (1.0, arrived), (2.0, waits), (3.0, None), (4.0, TokensProduced("a", 2)))
    assert found == [
        (0.0, UP, []),
        (1.0, arrived, [Dispatch("a", "e0")]),
        (2.0, waits, []),
        (3.0, None, []),
        (4.0, "a", 2),
    ]


def test_tokens_that_release_something_are_events_with_actions() -> None:
    up = EngineUp("e0", make_limits(token_budget=100))
    long, short = Arrived(make_request("a", 400)), Arrived(make_request("b", 10))
    found = recorded((0.0, up), (1.0, long), (1.001, short), (1.1, TokensProduced("a")))
    assert found[-1] == (1.1, TokensProduced("a", 1), [Dispatch("b", "e0")])


def test_tokens_are_recorded_once_by_whichever_way_they_come() -> None:
    records: list[Record] = []
    scheduler = RecordedScheduler(SchedulerConfig(), records.append)
    scheduler.handle(TokensProduced("x", 3), 1.0)
    scheduler.on_tokens("x", 4, 2.0)
    assert records == [(1.0, "x", 3), (2.0, "x", 4)]


def test_an_event_that_is_refused_by_an_error_is_not_recorded() -> None:
    records: list[Record] = []
    scheduler = RecordedScheduler(SchedulerConfig(), records.append)
    scheduler.handle(UP, 0.0)
    scheduler.handle(Arrived(make_request("a")), 0.0)
    with pytest.raises(ValueError, match="in use"):
        scheduler.handle(Arrived(make_request("a")), 0.0)
    scheduler.handle(Ended("a"), 1.0)
    assert [record[1] for record in records] == [UP, Arrived(make_request("a")), Ended("a")]
