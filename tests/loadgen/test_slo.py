import math

import pytest
from samples import failed, result

from loadgen.sample import Sample
from loadgen.slo import Limit, SloError, parse_slo
from proxy.core.request import RequestClass

FREE = RequestClass("free")


def margin(text: str, sample: Sample) -> float:
    (limit,) = parse_slo(text).limits
    return limit.margin(limit.value(sample))


def test_an_slo_is_read_and_written() -> None:
    slo = parse_slo(" ttft_p50<=0.5s,tbt_p99.9 [strict] <= 100ms , attainment>=0.99, e2e_mean<2e1s")
    assert slo.limits == (
        Limit("ttft", "p50", "", 0.5),
        Limit("tbt", "p99.9", "strict", 0.1),
        Limit("attainment", "", "", 0.99),
        Limit("e2e", "mean", "", 20.0),
    )
    assert str(slo) == "ttft_p50<=500ms, tbt_p99.9[strict]<=100ms, attainment>=99%, e2e_mean<=20s"
    assert parse_slo(str(slo)) == slo


@pytest.mark.parametrize(
    ("text", "why", "marked"),
    [
        ("tft_p50<=1s", "did you mean ttft_p50?", "tft_p50"),
        ("ttft_p50<=1s, latency<=1s", "there are ttft, tbt", "latency"),
        ("ttft<=1s", "ttft of what?", "ttft"),
        ("ttft_p500<=1s", "ttft of what?", "p500"),
        ("ttft_p50<=0.5", "a latency has a unit: 0.5s or 0.5ms", "0.5"),
        ("ttft_p50<=1h", "a latency has a unit", "1h"),
        ("ttft_p50>=1s", "better when smaller: write <=", ">="),
        ("attainment<=1", "better when larger: write >=", "<="),
        ("attainment>=120%", "a share lies between", "120%"),
        ("attainment>=1s", "a share is a number up to 1", "s"),
        ("ttft_p50", "comes <= or >=", "^"),
        ("ttft_p50<=", "here the limit is missing", "^"),
        ("ttft_p50<=0s", "must be positive", "0s"),
        ("ttft_p50<=1.2.3s", "is not a number", "1.2.3"),
        ("ttft_p50<=1s,", "here a figure was expected", "^"),
        ("", "here a figure was expected", "^"),
        ("tbt_p99[]<=1s", "the brackets name a class", "[]"),
        ("ttft_p50<=1s tbt_p99<=1s", "a comma separates limits", "tbt_p99<=1s"),
        ("ttft_p50<=1s, ttft_p50<=2s", "limited twice", "ttft_p50"),
    ],
)
def test_a_mistake_is_shown_at_its_place(text: str, why: str, marked: str) -> None:
    with pytest.raises(SloError) as error:
        parse_slo(text)
    first, shown, pointer = str(error.value).split("\n")
    assert why in first
    assert shown == f"  {text}"
    place = pointer.index("^")
    assert marked == "^" or shown[place : place + pointer.count("^")] == marked


def test_a_class_that_there_is_not_is_told_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="no class is named 'gold'; there are free, strict"):
        parse_slo("tbt_p99[gold]<=1s").check_classes(["strict", "free"])


def test_margins_are_zero_at_the_limit() -> None:
    sample = Sample.of([result(ttft=0.5, gaps=[0.1]), result(ttft=0.5, gaps=[0.1], kind=FREE)])
    assert margin("ttft_p50<=0.5s", sample) == pytest.approx(0.0)
    assert margin("ttft_mean<=0.25s", sample) == pytest.approx(math.log(2))
    assert margin("tbt_max[free]<=200ms", sample) == pytest.approx(math.log(0.5))
    assert margin("attainment>=1", sample) == 0.0
    assert margin("completed>=50%", sample) == -0.5


def test_who_was_refused_has_waited_for_ever() -> None:
    sample = Sample.of([result(), failed(), failed()])
    assert margin("ttft_p50<=9s", sample) == math.inf
    assert margin("ttft_mean<=9s", sample) == math.inf
    assert margin("tbt_p99<=1s", Sample.of([failed()])) == math.inf


def test_of_answers_of_one_token_no_tbt_is_broken() -> None:
    assert margin("tbt_p99<=1ms", Sample.of([result(gaps=[])])) == -math.inf


def test_a_class_of_which_nobody_came_breaks_nothing() -> None:
    assert margin("tbt_p99[free]<=1ms", Sample.of([result()])) == -math.inf


def test_a_limit_that_cannot_be_kept_any_more() -> None:
    # Half-way between the fifth and the sixth of ten: with five late ones the fifth may still make up for the sixth.
    slow, quick = [result(ttft=3.0, kind=FREE)] * 6, [result()] * 4
    limit = parse_slo("ttft_p50<=1s").limits[0]
    assert not limit.hopeless(Sample.of(slow[:5]), 10)
    assert limit.hopeless(Sample.of(slow), 10)
    assert limit.margin(limit.value(Sample.of([*slow, *quick]))) > 0
    share = parse_slo("attainment>=90%").limits[0]
    assert not share.hopeless(Sample.of([failed()]), 10)
    assert share.hopeless(Sample.of([failed(), failed()]), 10)
    assert not parse_slo("tbt_p99<=1ms").limits[0].hopeless(Sample.of(slow), 10)


def test_how_sure_a_margin_is() -> None:
    sample = Sample.of([result(ttft=0.1 * (1 + i % 7), index=i) for i in range(200)])
    assert 0.01 < parse_slo("ttft_p50<=0.5s").limits[0].deviation(sample) < 0.3
    assert parse_slo("ttft_p99<=0.5s").limits[0].deviation(Sample.of([failed()] * 9)) == math.inf
