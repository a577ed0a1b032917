"""Gaps of one stream: what the report of a request says about them."""

import sys

import pytest

from proxy.core.request import STRICT, RequestClass
from proxy.telemetry.report import MAX_GAPS, RequestReport, TokenTimes


def times_of(*reads: float, tbt_seconds: float | None = None) -> TokenTimes:
    times = TokenTimes(tbt_seconds)
    for now in reads:
        times.on_read(now, 1)
    return times


def test_no_token_and_one_token_make_no_gap() -> None:
    for times in (times_of(), times_of(3.0)):
        assert (times.gap_count, times.gap_max, times.misses) == (0, 0.0, 0)
        assert times.gap_mean() is None
        assert times.gap_p99() is None
    assert times_of(3.0).first_at == 3.0


def test_maximum_mean_and_p99() -> None:
    times = times_of(1.0, 1.25, 1.5, 2.5)
    assert times.gap_max == 1.0
    assert times.gap_mean() == 0.5
    assert times.gap_p99() == 1.0


@pytest.mark.parametrize(
    ("gaps", "position"), [(1, 1), (2, 2), (99, 99), (100, 99), (101, 100), (200, 198), (1000, 990)]
)
def test_p99_is_the_smallest_gap_that_99_percent_do_not_exceed(gaps: int, position: int) -> None:
    now, times = 0.0, TokenTimes()
    times.on_read(now, 1)
    for gap in range(gaps, 0, -1):  # whole seconds, longest first
        now += gap
        times.on_read(now, 1)
    assert times.gap_p99() == position


def test_no_percentile_exceeds_the_maximum() -> None:
    times = times_of(0.0, 0.1)  # in single precision 0.1 is more than 0.1
    assert times.gap_p99() == times.gap_max == 0.1


def test_a_gap_as_long_as_the_deadline_keeps_it() -> None:
    assert times_of(0.0, 0.5, 1.0, 1.75, tbt_seconds=0.5).misses == 1
    assert times_of(0.0, 0.5, 1.0, 1.75).misses == 0, "nothing was promised"


def test_each_read_returns_the_gap_that_it_ended() -> None:
    times = TokenTimes()
    assert [times.on_read(now, 3) for now in (1.0, 1.5, 4.0)] == [None, 0.5, 2.5]
    assert times.chunks == 9


def test_a_stream_of_any_length_takes_bounded_memory() -> None:
    times = TokenTimes(tbt_seconds=1.5)
    for now in range(3 * MAX_GAPS):
        times.on_read(float(now), 1)
    times.on_read(3 * MAX_GAPS + 1.0, 1)
    assert len(times.gaps) == MAX_GAPS
    assert sys.getsizeof(times.gaps) < 128 * 1024
    assert times.gap_count == 3 * MAX_GAPS
    assert (times.gap_max, times.misses) == (2.0, 1), "they cover the gaps that are not kept, too"
    assert times.gap_mean() == pytest.approx((3 * MAX_GAPS + 1) / (3 * MAX_GAPS))


def report(request_class: RequestClass = STRICT) -> RequestReport:
    return RequestReport("1-x", "x", "chat", 10.0, request_class)


def test_ttft_counts_from_arrival_and_so_includes_the_queue() -> None:
    found = report()
    assert found.ttft_seconds is None
    assert found.queue_seconds is None
    found.dispatched_at = 12.0
    found.times.on_read(12.5, 1)
    assert found.ttft_seconds == 2.5
    assert found.queue_seconds == 2.0


@pytest.mark.parametrize(("limit", "missed"), [(None, False), (2.5, False), (2.4, True)])
def test_a_ttft_deadline_is_missed_by_exceeding_it(limit: float | None, missed: bool) -> None:
    found = report(RequestClass("c", ttft_seconds=limit))
    assert not found.missed_ttft, "nothing came yet, and what is not streamed has no TTFT"
    found.times.on_read(12.5, 1)
    assert found.missed_ttft is missed
