import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.wire.timing import queue_seconds, queue_timing


def told(*values: str) -> float | None:
    return queue_seconds(CIMultiDictProxy(CIMultiDict([("server-timing", value) for value in values])))


def test_what_is_written_is_read() -> None:
    assert queue_timing(0.01234) == "queue;dur=12.3"
    assert told(queue_timing(1.5)) == 1.5


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ('cache;desc="x;y", queue;dur=2', 0.002),
        ('queue;desc="in line";dur=2.5', 0.0025),
        ('Queue ; dur = "3"', 0.003),
        ("queue;dur=0", 0.0),
        ("db;dur=5", None),
        ("queue", None),
        ("my-queue;dur=5", None),
        ("queue;dur=", None),
        ("queue;dur=1.2.3", None),
        ("queue;dur=-4", None),
        ("queue;dur=99999999999999", None),
        ("", None),
    ],
)
def test_other_metrics_and_nonsense_are_looked_past(value: str, seconds: float | None) -> None:
    assert told(value) == seconds


def test_every_server_on_the_way_adds_its_own() -> None:
    assert told("queue;dur=5", "cpu;dur=1,queue;dur=20") == pytest.approx(0.025)
    assert told() is None
