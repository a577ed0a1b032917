import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import failed, result

from loadgen.compat import Compat, compat_figures
from loadgen.intervals import PooledQuantile, bootstrap, quantile
from loadgen.metrics import measure, wilson
from loadgen.sample import Sample
from proxy.core.request import RequestClass

FREE = RequestClass("free")

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


@given(values, st.floats(0, 1))
def test_a_quantile_is_numpys_linear_one(data: list[float], q: float) -> None:
    assert quantile(np.array(data), q) == pytest.approx(np.quantile(data, q), rel=1e-9, abs=1e-9)


def test_between_a_value_and_one_that_never_came_it_never_came() -> None:
    data = np.array([1.0, math.inf, np.nan])
    assert (quantile(data, 0.0), quantile(data, 0.5), quantile(data, 1.0)) == (1.0, math.inf, math.inf)
    assert math.isnan(quantile(np.array([np.nan]), 0.5))


@given(
    st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=12),
    st.floats(0, 1),
    st.data(),
)
def test_a_pooled_quantile_of_a_draw_is_that_of_the_requests_written_out(
    gaps: list[list[int]], q: float, data: st.DataObject
) -> None:
    weights = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(gaps), max_size=len(gaps))))
    pooled = np.array([gap for own in gaps for gap in own], dtype=float)
    owners = np.repeat(np.arange(len(gaps)), [len(own) for own in gaps])
    written_out = [float(g) for own, times in zip(gaps, weights, strict=True) for _ in range(times) for g in own]
    found = PooledQuantile(pooled, owners, len(gaps), q)(weights)
    if written_out:
        assert found == pytest.approx(np.quantile(written_out, q))
    else:
        assert math.isnan(found)


def test_far_from_its_place_a_pooled_quantile_is_still_found() -> None:
    # Half the requests have small gaps, half have large ones; a draw of one half has its median at the other's end.
    pooled = np.arange(200_000, dtype=float)
    owners = np.repeat([0, 1], 100_000)
    p99 = PooledQuantile(pooled, owners, 2, 0.99)
    assert p99(np.array([1, 0])) == pytest.approx(np.quantile(pooled[:100_000], 0.99))
    assert p99(np.array([0, 2])) == pytest.approx(np.quantile(np.repeat(pooled[100_000:], 2), 0.99))


def test_an_interval_counts_requests_and_not_their_gaps() -> None:
    rng = np.random.default_rng(1)
    means = rng.normal(1.0, 0.2, size=50)
    pooled, owners = np.repeat(means, 1000), np.repeat(np.arange(50), 1000)
    found = bootstrap(PooledQuantile(pooled, owners, 50, 0.5), 50)
    assert found is not None
    # Of 50 normal values the median has a deviation of 1.25 * 0.2 / sqrt(50); 50,000 independent ones know it to 0.001.
    assert found.deviation == pytest.approx(0.035, rel=0.5)
    assert found.low < np.median(means) < found.high
    assert bootstrap(PooledQuantile(pooled, owners, 50, 0.5), 50) == found  # seeded


def test_a_share_of_all_is_not_certain() -> None:
    assert wilson(100, 100) == pytest.approx([0.963, 1.0], abs=0.001)
    assert wilson(0, 10) == pytest.approx([0.0, 0.278], abs=0.001)
    assert wilson(0, 0) is None


def test_a_selection_has_its_own_gaps_only() -> None:
    sample = Sample.of([result(gaps=[0.1, 0.2]), result(gaps=[0.3], kind=FREE), result(gaps=[0.4, 0.5])])
    gold = sample.of_class("gold")
    assert gold.gaps.tolist() == pytest.approx([0.1, 0.2, 0.4, 0.5])
    assert gold.owners.tolist() == [0, 0, 1, 1]


def test_failures_are_misses_in_every_figure_and_interval() -> None:
    served = [result(float(i), index=i) for i in range(6)]
    figures = measure([*served, *(failed(6.0 + i, index=6 + i) for i in range(4))])
    everybody = figures["all"]
    assert (everybody["requests"], everybody["completed"], everybody["attainment"]) == (10, 6, 0.6)
    assert everybody["ttft_s"]["p50"] == pytest.approx(0.5)
    assert everybody["ttft_s"]["p99"] is None
    assert everybody["e2e_s"]["p90"] is None
    assert everybody["intervals"]["ttft_s"]["p99"] == [None, None]
    low, high = everybody["intervals"]["attainment"]
    assert low < 0.6 < high
    json.dumps(figures, allow_nan=False)


def test_end_to_end_tpot_and_first_byte() -> None:
    early = result(1.0, ttft=0.5, gaps=[0.1, 0.3])
    early.first_byte_at = 1.2
    figures = measure([early, result(2.0, gaps=[])])
    assert figures["all"]["tpot_s"]["p50"] == pytest.approx(0.2)  # an answer of one token has none
    assert figures["all"]["first_byte_s"]["p50"] == pytest.approx(0.35)
    assert figures["all"]["e2e_s"]["p99"] == pytest.approx(0.896)
    assert "server_queue_s" not in figures["all"]


def test_queue_time_is_there_where_the_server_tells_it() -> None:
    told = result()
    told.on_queued(0.2)
    told.on_queued(0.05)
    assert measure([told, result()])["all"]["server_queue_s"]["p50"] == pytest.approx(0.25)


def test_several_tokens_in_a_chunk_are_one_gap_and_are_told() -> None:
    figures = measure([result(gaps=[0.1, 0.1], chunk_tokens=[1, 4, 1])])
    assert figures["chunks"] == {"chunks": 3, "tokens_per_chunk": 2.0, "with_several": pytest.approx(1 / 3)}
    assert figures["all"]["tpot_s"]["p50"] == pytest.approx(0.2 / 5)
    assert figures["all"]["tbt_s"]["p50"] == pytest.approx(0.1)


def test_groups_are_by_class_tenant_and_length() -> None:
    figures = measure([result(), result(kind=FREE, prompt=300, ttft=1.0)])
    assert {name: group["ttft_s"]["p50"] for name, group in figures["by_class"].items()} == {"gold": 0.5, "free": 1.0}
    assert {name: group["requests"] for name, group in figures["by_prompt_tokens"].items()} == {
        "0-255": 1,
        "256-1023": 1,
    }
    assert figures["by_tenant"] == {}


def test_nothing_can_be_measured() -> None:
    figures: dict[str, Any] = measure([])
    assert figures["all"]["ttft_s"]["p50"] is None
    json.dumps(figures, allow_nan=False)


def test_vllms_figures_count_from_sending_and_chunk_by_chunk() -> None:
    late = result(0.0, ttft=1.0, gaps=[0.1, 0.0, 0.3], late=0.4)
    late.first_byte_at = 0.9  # a chunk with the role only
    found = compat_figures(Compat.VLLM, [late, failed(0.0)])
    assert found["ttft_s"]["p50"] == pytest.approx(0.5)
    assert found["itl_s"]["p50"] == pytest.approx(0.1)
    assert found["itl_s"]["mean"] == pytest.approx(0.4 / 3)
    assert found["tpot_s"]["mean"] == pytest.approx(0.5 / 3)
    assert found["per_s"]["requests"] == pytest.approx(1 / 1.0)
    assert found["per_s"]["output_tokens"] == pytest.approx(4 / 1.0)


def test_the_papers_figures_hide_the_first_gap_and_add_two_zeros() -> None:
    found = compat_figures(Compat.SLAI, [result(gaps=[9.0, 0.1, 0.2]), failed(0.0)])
    assert found["tbt_s"]["mean"] == pytest.approx(0.3 / 4)
    assert found["tbt_s"]["p99"] == pytest.approx(0.2)
    assert found["ttft_s"]["p99"] == pytest.approx(0.5)


@pytest.mark.parametrize("compat", list(Compat))
def test_their_figures_of_nothing_are_none(compat: Compat) -> None:
    found = compat_figures(compat, [failed()])
    assert {value for row in found.values() for name, value in row.items() if name != "meaning"} == {None}
