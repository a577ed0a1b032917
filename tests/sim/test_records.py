import json
from dataclasses import replace

import pytest
from builders import make_record, make_scheduled

from proxy.core.request import RequestClass
from proxy.sim.records import LENGTH_BUCKETS, RequestRecord, quantiles, summarise

GOLD = RequestClass("gold", ttft_seconds=1.0, tbt_seconds=0.1)
FREE = RequestClass("free")
INF = float("inf")


# -- one request --


def test_the_ttft_counts_from_the_intended_arrival_however_late_it_was_sent() -> None:
    record = RequestRecord(make_scheduled(at_seconds=10.0), sent_at=12.0)
    assert record.ttft_seconds is None
    record.on_tokens(13.5)
    assert record.ttft_seconds == 3.5


def test_a_gap_lies_between_two_arrivals_of_tokens() -> None:
    record = make_record(1.0, 1.25, 2.0)
    assert list(record.gaps) == [0.25, 0.75]
    assert record.tokens == 3


def test_tokens_that_arrive_together_end_one_gap_and_add_no_zeros() -> None:
    record = RequestRecord(make_scheduled())
    record.on_tokens(1.0, 2)
    record.on_tokens(1.0)
    record.on_tokens(1.5, 3)
    record.on_tokens(1.5)
    assert list(record.gaps) == [0.5]
    assert record.tokens == 7


def test_a_request_is_complete_when_it_ended_without_an_error_and_with_tokens() -> None:
    assert make_record(1.0, 1.1).completed
    assert not make_record(1.0, 1.1, finished=False).completed
    assert not make_record(1.0, 1.1, error="cut").completed
    assert not make_record().completed


@pytest.mark.parametrize(
    ("record", "attained"),
    [
        (make_record(1.0, 1.0625, request_class=GOLD), True),
        (make_record(1.0, request_class=GOLD), True),
        (make_record(1.001, 1.05, request_class=GOLD), False),
        (make_record(0.5, 0.601, 0.65, request_class=GOLD), False),
        (make_record(11.0, 11.0625, at_seconds=10.0, request_class=GOLD), True),
        (make_record(0.5, 0.55, request_class=GOLD, finished=False), False),
        (make_record(0.5, 0.55, request_class=GOLD, error="cut"), False),
        (make_record(request_class=GOLD, error="http 429"), False),
        (make_record(1000.0, 2000.0, request_class=FREE), True),
        (make_record(request_class=FREE, error="http 429"), False),
    ],
    ids=[
        "in time",
        "one token",
        "late",
        "gap",
        "later arrival",
        "unfinished",
        "cut",
        "refused",
        "no promise",
        "free but refused",
    ],
)
def test_a_request_attains_when_it_completes_within_all_deadlines(record: RequestRecord, attained: bool) -> None:
    assert record.attained == attained


# -- quantiles --


def test_quantiles_interpolate_between_the_values() -> None:
    assert quantiles([4.0, 1.0, 3.0, 2.0], 0, 50, 90, 100) == pytest.approx(
        {"p0": 1.0, "p50": 2.5, "p90": 3.7, "p100": 4.0}
    )
    assert quantiles([7.0], 50, 99) == {"p50": 7.0, "p99": 7.0}
    assert quantiles((float(n) for n in range(101)), 99) == {"p99": 99.0}


def test_there_is_no_quantile_of_nothing_and_none_that_is_infinite() -> None:
    assert quantiles([], 50, 99) == {"p50": None, "p99": None}
    assert quantiles([INF, INF], 50) == {"p50": None}
    assert quantiles([1.0, 2.0, 3.0, INF], 50, 99) == {"p50": 3.0, "p99": None}
    assert quantiles([1.0, INF], 50) == {"p50": None}, "half of them never began"


# -- a run --


def test_refusing_most_requests_leaves_no_median_ttft() -> None:
    served = [make_record(0.1, 0.2, index=i) for i in range(4)]
    refused = [make_record(index=10 + i, error="queue_full") for i in range(6)]
    summary = summarise(served + refused)
    assert summary["ttft_s"] == {"p50": None, "p90": None, "p99": None}
    assert (summary["requests"], summary["completed"]) == (10, 4)
    assert summary["errors"] == {"queue_full": 6}
    assert summary["attainment"] == {"relaxed": 0.4}


def test_refusing_some_requests_does_not_make_the_median_better() -> None:
    every = [make_record(0.1 * n, 0.1 * n + 0.01, index=n) for n in range(1, 11)]
    longest_refused = every[:7] + [make_record(index=n, error="queue_full") for n in range(8, 11)]
    before, after = (summarise(records)["ttft_s"]["p50"] for records in (every, longest_refused))
    assert before == pytest.approx(0.55)
    assert after >= before


def test_gaps_are_pooled_over_the_streams_of_a_class() -> None:
    records = [
        make_record(1.0, 1.1, 1.2, request_class=GOLD),
        make_record(1.0, 1.5, index=1, request_class=GOLD),
        make_record(1.0, 3.0, index=2, request_class=FREE),
    ]
    summary = summarise(records)
    assert summary["tbt_s"]["gold"]["p50"] == pytest.approx(0.1)
    assert summary["tbt_s"]["gold"]["p99"] == pytest.approx(0.492)
    assert summary["tbt_s"]["free"]["p50"] == 2.0
    assert summary["attainment"] == {"gold": 0.0, "free": 1.0}
    assert summary["ttft_s_by_class"]["free"]["p50"] == 1.0


def test_rates_are_over_the_time_from_the_first_arrival_to_the_last_end() -> None:
    records = [
        make_record(2.0, 3.0, at_seconds=1.0),
        make_record(3.0, 5.0, at_seconds=2.0, index=1),
        make_record(4.0, 9.0, at_seconds=3.0, index=2),
    ]
    summary = summarise(records)
    assert summary["offered_per_s"] == 1.0
    assert summary["completed_per_s"] == 3 / 8
    assert summary["tokens_per_s"] == 6 / 8


def test_goodput_counts_those_that_attained_by_the_time_of_the_whole_run() -> None:
    records = [
        make_record(1.0, 1.05, request_class=GOLD),
        make_record(2.0, 9.0, at_seconds=1.0, index=1, request_class=GOLD),
        make_record(3.0, 9.0, at_seconds=2.0, index=2, request_class=FREE),
        make_record(at_seconds=4.0, index=3, request_class=FREE, error="queue_full"),
    ]
    assert [r.attained for r in records] == [True, False, True, False]
    assert summarise(records)["attained_per_s"] == 2 / 9


def test_prompts_are_sorted_into_buckets_by_their_lower_edge() -> None:
    lengths = [1, 255, 256, 1023, 1024, 8191, 8192, 100_000]
    summary = summarise([make_record(1.0, index=i, prompt_tokens=n) for i, n in enumerate(lengths)])
    buckets = summary["ttft_s_by_prompt_tokens"]
    assert {label: bucket["requests"] for label, bucket in buckets.items()} == {
        "0-255": 2,
        "256-1023": 2,
        "1024-2047": 1,
        "4096-8191": 1,
        "8192+": 2,
    }
    assert LENGTH_BUCKETS == (0, 256, 1024, 2048, 4096, 8192)


def test_a_bucket_counts_the_refused_too() -> None:
    records = [make_record(1.0), make_record(index=1, error="x"), make_record(index=2, error="x")]
    assert summarise(records)["ttft_s_by_prompt_tokens"]["0-255"] == {"requests": 3, "p50": None, "p99": None}


@pytest.mark.parametrize(
    "records",
    [[], [make_record(0.0)], [make_record(error="x")], [make_record(finished=False)]],
    ids=["none", "one", "refused", "cut"],
)
def test_a_run_of_next_to_nothing_has_a_summary_that_is_valid_json(records: list[RequestRecord]) -> None:
    summary = summarise(records)
    assert summary["requests"] == len(records)
    assert summary["offered_per_s"] is None
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


@pytest.mark.parametrize(
    ("refusals", "retries", "let_in"), [(0, 0, 0), (1, 0, 0), (1, 1, 1), (2, 1, 0), (2, 2, 1), (3, 2, 0)]
)
def test_retries_that_were_let_in(refusals: int, retries: int, let_in: int) -> None:
    record = make_record(1.0)
    record.refusals, record.retries = refusals, retries
    assert record.retries_let_in == let_in
    found = summarise([record])
    assert (found["refusals"], found["retries"], found["retries_let_in"]) == (refusals, retries, let_in)


def test_ttft_is_told_by_tenant_where_there_are_any() -> None:
    calm, flood = make_record(1.0), make_record(5.0, index=1)
    calm.request, flood.request = replace(calm.request, tenant="calm"), replace(flood.request, tenant="flood")
    found = summarise([calm, flood, make_record(9.0, index=2)])["ttft_s_by_tenant"]
    assert {name: (row["requests"], row["p99"]) for name, row in found.items()} == {"calm": (1, 1.0), "flood": (1, 5.0)}
