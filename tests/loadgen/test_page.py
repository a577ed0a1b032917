"""The page is complete in itself, says what it shows, and survives what a run may hold."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import failed, result

from loadgen.charts import Axis, Chart, Series, linear_ticks, number, svg
from loadgen.compat import Compat
from loadgen.curves import cdf, curves_of
from loadgen.page import page_of
from loadgen.report import Document, build_document
from loadgen.results import Result

_VOID = {"meta", "path", "br"}


class Checker(HTMLParser):
    """Every element is closed, and nothing asks for anything outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert not {"src", "href", "srcset"} & {name for name, _ in attrs}
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in _VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert "url(" not in page
    assert "@import" not in page
    return checker


def document(*records: Result, **more: Any) -> Document:
    config = {
        "version": "1",
        "rate": 2.0,
        "urls": ["http://a<b>:1"],
        "model": "<script>",
        "classes": [{"name": "gold", "ttft_s": 2.0, "tbt_s": 0.1}],
    }
    return build_document(records, planned=len(records), config=config, trace={"name": "t"}, **more)


def test_a_runs_page_is_whole_and_fetches_nothing() -> None:
    served = [result(float(i), ttft=0.1 * (i + 1), gaps=[0.05] * 5, index=i, prompt=100 * i + 1) for i in range(30)]
    page = page_of(document(*served, failed(31.0, index=31), compat=list(Compat)))
    checker = check(page)
    text = " ".join(checker.text)
    for expected in ("TTFT, distribution", "TBT, distribution", "TTFT by prompt length", "Queue over time", "As vllm"):
        assert expected in text
    assert checker.tags.count("svg") >= 5
    assert "<script>" in text  # the model's name, as text
    assert page.count("<figure>") == page.count("Figures of this plot")
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


@pytest.mark.parametrize("records", [(), (failed(),), (result(gaps=[]),)])
def test_a_page_of_hardly_anything_can_be_drawn(records: tuple[Result, ...]) -> None:
    check(page_of(document(*records)))


def test_a_run_that_is_not_valid_says_so_on_its_page() -> None:
    page = page_of(document(result(), interrupted=True))
    assert "not valid: interrupted before its end" in page


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), max_size=20),
    st.booleans(),
    st.booleans(),
)
def test_any_points_are_drawn_within_the_frame(points: list[tuple[float, float]], log_x: bool, log_y: bool) -> None:
    chart = Chart("t", Axis("x", log=log_x), Axis("y", log=log_y), [Series("s", points, scatter=True)])
    drawn = svg(chart)
    assert "nan" not in drawn
    assert "inf" not in drawn
    for x, y in re.findall(r"M([-\d.]+) ([-\d.]+)h0", drawn):
        assert 0 <= float(x) <= 460
        assert 0 <= float(y) <= 280


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    ticks = linear_ticks(low, low + width)
    assert len(ticks) <= 11
    assert all(low - width * 1e-6 - 1e-9 <= tick <= low + width * 1.000001 + 1e-9 for tick in ticks)
    assert ticks == sorted(ticks)


def test_numbers_are_short() -> None:
    assert [number(v) for v in (0, 0.05, 1.5, 1234.5, 2e7, 0.00002)] == ["0", "0.05", "1.5", "1,234", "2e7", "2e-5"]


def test_a_distribution_ends_at_the_share_that_came() -> None:
    curve = cdf(array(1.0, 2.0, 3.0, float("inf")))
    assert curve[0] == [1.0, 0.0]
    assert curve[-1][0] == 3.0
    assert curve[-1][1] == pytest.approx(0.75)
    assert cdf(array()) == []


def array(*values: float) -> Any:
    import numpy as np

    return np.array(values)


def test_series_count_what_waits_and_what_streams() -> None:
    records = [result(0.0, ttft=50.0, gaps=[50.0]), result(100.0, ttft=0.0, gaps=[])]
    series = curves_of(records)["series"]
    at = dict(zip(series["at_s"], zip(series["waiting"], series["streaming"], strict=True), strict=True))
    early = next(pair for when, pair in at.items() if 20 < when < 40)
    late = next(pair for when, pair in at.items() if 60 < when < 90)
    assert (early, late) == ((1.0, 0.0), (0.0, 1.0))
