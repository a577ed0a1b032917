import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean, quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.request import RELAXED, STRICT, RequestClass
from proxy.sim.workload import (
    PAPER_CLASSES,
    SHAREGPT_LIKE,
    ClassShare,
    Lengths,
    ScheduledRequest,
    Surge,
    Trace,
    TraceError,
    draw_workload,
    load_trace,
    parse_class,
    parse_surge,
    parse_tenants,
    sharegpt_like,
)

SMALL = Trace("small", tuple(Lengths(n, n + 1) for n in range(1, 11)), 10)


def draw(rate: float = 2.0, requests: int = 200, seed: int = 1, trace: Trace = SMALL) -> list[ScheduledRequest]:
    return draw_workload(trace, rate=rate, requests=requests, seed=seed)


# -- drawing --


def test_one_seed_gives_one_workload_and_another_seed_another() -> None:
    assert draw(seed=3) == draw(seed=3)
    assert [r.at_seconds for r in draw(seed=3)] != [r.at_seconds for r in draw(seed=4)]


def test_a_seed_at_two_rates_gives_the_same_requests_only_closer_together() -> None:
    slow, fast = draw(rate=0.5), draw(rate=4.0)
    for one, other in zip(slow, fast, strict=True):
        assert one.at_seconds == pytest.approx(other.at_seconds * 8)
        assert (one.index, one.prompt_tokens, one.output_tokens) == (
            other.index,
            other.prompt_tokens,
            other.output_tokens,
        )
        assert (one.request_class, one.content_seed) == (other.request_class, other.content_seed)


def test_a_longer_workload_begins_with_the_shorter_one() -> None:
    assert draw(requests=500)[:200] == draw(requests=200)


def test_classes_have_no_influence_on_lengths_and_arrivals() -> None:
    plain = draw_workload(SMALL, rate=2.0, requests=100, seed=1, classes=(ClassShare(RELAXED, 1.0),))
    assert {r.request_class for r in plain} == {RELAXED}
    for one, other in zip(plain, draw(requests=100), strict=True):
        assert (one.at_seconds, one.prompt_tokens, one.content_seed) == (
            other.at_seconds,
            other.prompt_tokens,
            other.content_seed,
        )


def test_arrivals_are_poisson_at_the_asked_rate() -> None:
    times = [r.at_seconds for r in draw(rate=5.0, requests=20_000)]
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert fmean(g * g for g in gaps) == pytest.approx(2 * 0.2**2, rel=0.08)  # exponential: E[x^2] = 2 E[x]^2
    assert sum(g > 0.2 for g in gaps) / len(gaps) == pytest.approx(0.368, abs=0.01)


def test_every_row_of_the_trace_is_used_before_any_is_used_again() -> None:
    drawn = [r.prompt_tokens for r in draw(requests=35)]
    for start in (0, 10, 20):
        assert sorted(drawn[start : start + 10]) == list(range(1, 11))
    assert len(set(drawn[30:])) == 5
    assert drawn[:10] != drawn[10:20], "each round is shuffled anew"


def test_a_prompt_keeps_the_output_of_its_row() -> None:
    assert all(r.output_tokens == r.prompt_tokens + 1 for r in draw())


def test_five_percent_are_strict() -> None:
    kinds = Counter(r.request_class.name for r in draw(requests=20_000))
    assert kinds["strict"] / kinds.total() == pytest.approx(0.05, abs=0.005)
    assert set(kinds) == {"strict", "relaxed"}


def test_contents_differ() -> None:
    assert len({r.content_seed for r in draw(requests=5000)}) == 5000


@pytest.mark.parametrize(("rate", "requests"), [(0.0, 1), (-1.0, 1), (1.0, 0), (1.0, -5)])
def test_a_workload_of_nothing_is_refused(rate: float, requests: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        draw(rate=rate, requests=requests)


@pytest.mark.parametrize("shares", [(0.5,), (0.5, 0.6), ()])
def test_shares_that_do_not_add_up_are_refused(shares: tuple[float, ...]) -> None:
    classes = [ClassShare(RequestClass(str(i)), share) for i, share in enumerate(shares)]
    with pytest.raises(ValueError, match="add up"):
        draw_workload(SMALL, rate=1.0, requests=1, seed=0, classes=classes)


# -- classes --


def test_a_class_is_read_with_its_share_and_deadlines() -> None:
    assert parse_class("gold:0.25:tbt=0.1:ttft=2") == ClassShare(RequestClass("gold", 2.0, 0.1), 0.25)
    assert parse_class("rest:1") == ClassShare(RequestClass("rest"), 1.0)
    assert [parse_class("strict:0.05:tbt=0.1"), parse_class("relaxed:0.95:tbt=0.5")] == list(PAPER_CLASSES)
    assert (STRICT.tbt_seconds, RELAXED.tbt_seconds) == (0.1, 0.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gold",
        "gold:",
        "gold:much",
        ":0.5",
        "gold:0",
        "gold:-0.5",
        "gold:1.5",
        "gold:nan",
        "gold:inf",
        "gold:0.5:tbt",
        "gold:0.5:tbt=",
        "gold:0.5:tbt=0",
        "gold:0.5:tbt=-1",
        "gold:0.5:tbt=nan",
        "gold:0.5:ttft=inf",
        "gold:0.5:tbt=1=2",
        "gold:0.5:tpot=1",
    ],
)
def test_any_other_text_is_no_class(text: str) -> None:
    with pytest.raises(ValueError, match="class"):
        parse_class(text)


# -- the built-in trace --


def test_the_built_in_trace_has_the_quantiles_of_its_fit() -> None:
    trace = sharegpt_like()
    percents = (10, 25, 50, 75, 90, 99)
    for lengths, expected in (
        ([row.prompt_tokens for row in trace.lengths], (110, 527, 1778, 3790, 5675, 7643)),
        ([row.output_tokens for row in trace.lengths], (100, 221, 420, 640, 810, 975)),
    ):
        cuts = quantiles(lengths, n=100)
        # Pairs longer than 8,192 tokens together are left out, which takes a little off the longest.
        assert [cuts[p - 1] for p in percents] == pytest.approx(expected, rel=0.05)


def test_the_built_in_trace_is_always_the_same_and_holds_its_bounds() -> None:
    trace = load_trace(SHAREGPT_LIKE)
    assert trace == sharegpt_like()
    assert len(trace.lengths) == trace.rows_read == 20_000
    assert all(row.prompt_tokens >= 1 and row.output_tokens >= 2 for row in trace.lengths)
    assert max(row.prompt_tokens + row.output_tokens for row in trace.lengths) <= 8192
    assert sharegpt_like(100, seed=1).lengths != sharegpt_like(100, seed=2).lengths


# -- files --


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def lengths_of(path: Path) -> list[tuple[int, int]]:
    trace = load_trace(str(path))
    assert trace.rows_read == len(trace.lengths) + trace.dropped.total()
    assert trace.dropped.total() == 0
    return [(row.prompt_tokens, row.output_tokens) for row in trace.lengths]


@pytest.mark.parametrize(
    "text",
    [
        "num_prefill_tokens,num_decode_tokens\n374,44\n396,109\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396,109\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens\n5,GPT-4,374,44,418\n45,GPT-4,396,109,505\n",
        "output_tokens,ignored,prompt_tokens\n44,x,374\n109,y,396\n",
        "num_prefill_tokens,num_decode_tokens\r\n374,44\r\n396,109\r\n",
        "\ufeffnum_prefill_tokens,num_decode_tokens\n374,44\n396,109\n",
        "num_prefill_tokens,num_decode_tokens\n374,44\n396,109",
        "num_prefill_tokens,num_decode_tokens\n374.0,44.0\n396,1.09e2\n",
        '"num_prefill_tokens","num_decode_tokens"\n"374","44"\n\n 396 , 109 \n\n',
    ],
    ids=["vidur", "azure", "burstgpt", "plain", "crlf", "bom", "no final newline", "floats", "quotes and blanks"],
)
def test_a_csv_trace_is_read_by_the_names_of_its_columns(trace_file: Path, text: str) -> None:
    trace_file.write_bytes(text.encode())
    assert lengths_of(trace_file) == [(374, 44), (396, 109)]


def test_rows_that_are_not_usable_are_counted_by_reason(trace_file: Path) -> None:
    rows = ["10,20", "0,5", "5,0", "-1,5", "1.5,2", "x,2", ",2", "7", "nan,2", "inf,2", "1e400,2", "11,21,extra"]
    trace_file.write_text("\n".join(["prompt_tokens,output_tokens", *rows]))
    trace = load_trace(str(trace_file))
    assert trace.lengths == (Lengths(10, 20), Lengths(11, 21))
    assert trace.rows_read == len(rows)
    assert trace.dropped == {"empty prompt or output": 3, "not a whole number": 4, "not a number": 3}


@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(
    rows=st.lists(st.tuples(*[st.one_of(st.integers(-2, 9000).map(str), st.sampled_from(["", "x", "0.5", "1e3"]))] * 2))
)
def test_every_row_is_either_kept_or_counted(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.csv"
    rows = [("7", "8"), *rows]
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{p},{o}\n" for p, o in rows))
    trace = load_trace(str(path))
    assert trace.rows_read == len(trace.lengths) + trace.dropped.total() == len(rows)
    assert all(row.prompt_tokens >= 1 and row.output_tokens >= 1 for row in trace.lengths)


def conversation(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


def test_every_answer_of_a_conversation_is_a_request_with_all_before_it_as_prompt(trace_file: Path) -> None:
    turns = (("human", "x" * 45), ("gpt", "x" * 90), ("human", "x" * 9), ("gpt", "x" * 18))
    trace_file.write_text(json.dumps([conversation(*turns)]))
    assert lengths_of(trace_file) == [(10, 20), (32, 4)]


def test_turns_may_be_json_strings(trace_file: Path) -> None:
    plain = conversation(("human", "x" * 45), ("gpt", "x" * 90))
    turns = plain["conversations"]
    assert isinstance(turns, list)
    trace_file.write_text(json.dumps([{"conversations": [json.dumps(turn) for turn in turns]}]))
    assert lengths_of(trace_file) == [(10, 20)]


def test_conversations_without_a_usable_answer_are_counted_by_reason(trace_file: Path) -> None:
    good = conversation(("human", "x" * 45), ("assistant", "x" * 90))
    no_answer = "no assistant turn with text before it"
    no_list = "no list of turns under 'conversations'"
    bad = [
        (conversation(), no_answer),
        (conversation(("human", "x" * 45)), no_answer),
        (conversation(("gpt", "x" * 45)), no_answer),
        (conversation(("human", "x" * 45), ("gpt", "")), no_answer),
        ({"conversations": ["not json", 5, None, {"from": "gpt"}, {"from": "gpt", "value": 7}]}, no_answer),
        ({"conversations": "text"}, no_list),
        ({}, no_list),
        ([], no_list),
        ("text", no_list),
        (None, no_list),
    ]
    trace_file.write_text("\n " + json.dumps([*(item for item, _ in bad), good]))
    trace = load_trace(str(trace_file))
    assert trace.lengths == (Lengths(10, 20),)
    assert trace.rows_read == len(bad) + 1
    assert trace.dropped == Counter(reason for _, reason in bad)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "needs a header"),
        ("\n\n", "needs a header"),
        ("a,b\n1,2\n", "found a, b"),
        ("num_prefill_tokens\n5\n", "needs a header"),
        ('{"conversations": []}', "needs a header"),
        ("prompt_tokens,output_tokens\n", "the file is empty"),
        ("prompt_tokens,output_tokens\n0,0\n", "no usable row"),
        ("[]", "the file is empty"),
        ("[{}]", "no usable row"),
        ('[{"conversations": [', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1] trailing", "not valid JSON"),
    ],
)
def test_a_file_without_a_usable_row_is_an_error_that_names_the_file_and_says_why(
    trace_file: Path, text: str, expected: str
) -> None:
    trace_file.write_text(text)
    with pytest.raises(TraceError, match=expected) as caught:
        load_trace(str(trace_file))
    assert str(trace_file) in str(caught.value)


def test_a_file_that_is_not_utf8_is_an_error(trace_file: Path) -> None:
    trace_file.write_bytes("prompt_tokens,output_tokens\n1,2\n".encode("utf-16"))
    with pytest.raises(TraceError, match="not UTF-8"):
        load_trace(str(trace_file))


def test_a_file_that_is_not_there_is_an_error_that_names_the_built_in_trace(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.csv", tmp_path):
        with pytest.raises(TraceError, match=SHAREGPT_LIKE):
            load_trace(str(path))


def test_a_name_that_no_file_can_have_is_an_error() -> None:
    with pytest.raises(TraceError, match="cannot read"):
        load_trace("a\0b")


def test_a_field_of_a_csv_that_is_too_long_is_an_error(trace_file: Path) -> None:
    trace_file.write_text("prompt_tokens,output_tokens,text\n1,2," + "x" * 200_000 + "\n")
    with pytest.raises(TraceError, match="not a CSV of lengths"):
        load_trace(str(trace_file))


def test_a_turn_nested_too_deeply_is_left_out(trace_file: Path) -> None:
    trace_file.write_text(json.dumps([{"conversations": ["[" * 100_000]}]))
    with pytest.raises(TraceError, match="no assistant turn"):
        load_trace(str(trace_file))


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_a_rate_is_a_finite_number(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        draw(rate=rate)


def test_a_negative_share_is_refused_even_if_all_add_up() -> None:
    with pytest.raises(ValueError, match="negative"):
        draw_workload(SMALL, rate=1.0, requests=1, seed=0, classes=[ClassShare(RELAXED, 1.5), ClassShare(STRICT, -0.5)])


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        draw(trace=Trace("none", (), 0))


# -- surges --


def test_a_surge_brings_the_same_requests_closer_together_and_only_while_it_lasts() -> None:
    calm = draw(rate=2.0, requests=400)
    surge = draw_workload(SMALL, rate=2.0, requests=400, seed=1, surge=Surge(2.5, 20.0))
    assert [(r.prompt_tokens, r.output_tokens) for r in surge] == [(r.prompt_tokens, r.output_tokens) for r in calm]
    within = [(a.at_seconds, b.at_seconds) for a, b in zip(calm, surge, strict=True) if b.at_seconds <= 20.0]
    after = [(a.at_seconds, b.at_seconds) for a, b in zip(calm, surge, strict=True) if b.at_seconds > 20.0]
    assert all(b == pytest.approx(a / 2.5) for a, b in within)
    assert all(a - b == pytest.approx(30.0) for a, b in after)
    assert 70 < len(within) < 130, "five requests per second for 20 s"


@given(st.floats(0.01, 100), st.floats(0.1, 1000), st.lists(st.floats(0, 10_000), min_size=2))
def test_a_surge_keeps_the_order(factor: float, seconds: float, times: list[float]) -> None:
    moved = [Surge(factor, seconds).compress(t) for t in sorted(times)]
    assert all(a <= b + 1e-9 * max(1.0, b) for a, b in pairwise(moved))


def test_a_surge_is_of_all_tenants() -> None:
    tenants = {"a": 1.0, "b": 3.0}
    calm = draw_workload(SMALL, rate=2.0, requests=400, seed=1, tenants=tenants)
    surge = draw_workload(SMALL, rate=2.0, requests=400, seed=1, tenants=tenants, surge=Surge(2.5, 20.0))
    assert [(r.tenant, r.content_seed) for r in surge] == [(r.tenant, r.content_seed) for r in calm]
    assert [r.at_seconds for r in surge] == [Surge(2.5, 20.0).compress(r.at_seconds) for r in calm]


def test_a_surge_as_text() -> None:
    assert parse_surge("2.5:60") == Surge(2.5, 60.0)


@pytest.mark.parametrize("text", ["", "2", "2:", ":60", "0:60", "2:-1", "2:inf", "nan:60", "2:60:1", "a:b"])
def test_a_surge_in_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FACTOR:SECONDS"):
        parse_surge(text)


# -- tenants --


def test_a_tenant_sends_the_same_requests_whoever_else_there_is() -> None:
    def of_calm(rate: float, requests: int, tenants: dict[str, float]) -> list[tuple[float, int, int, int]]:
        drawn = draw_workload(SMALL, rate=rate, requests=requests, seed=1, tenants=tenants)
        assert [r.index for r in drawn] == list(range(requests))
        assert all(one.at_seconds <= other.at_seconds for one, other in pairwise(drawn))
        calm = [r for r in drawn if r.tenant == "calm"]
        return [(round(r.at_seconds, 6), r.prompt_tokens, r.output_tokens, r.content_seed) for r in calm]

    alone = of_calm(2.0, 50, {"calm": 1.0})
    beside = of_calm(22.0, 550, {"calm": 1.0, "flood": 10.0})
    both = min(len(alone), len(beside))
    assert both > 30
    assert alone[:both] == beside[:both]


def test_tenants_have_their_parts_of_the_rate() -> None:
    drawn = draw_workload(SMALL, rate=5.0, requests=4000, seed=1, tenants={"a": 1.0, "b": 3.0})
    assert Counter(r.tenant for r in drawn)["a"] == pytest.approx(1000, rel=0.1)
    assert drawn[-1].at_seconds == pytest.approx(800, rel=0.1)


def test_tenants_are_read_with_their_parts() -> None:
    assert parse_tenants("calm=1, flood=10") == {"calm": 1.0, "flood": 10.0}


@pytest.mark.parametrize("text", ["", "a", "a=", "a=0", "a=-1", "a=1,a=2", "=1", "a=1,", "a=inf", "a b=1", "a=nan"])
def test_wrong_tenants_are_told(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=PART"):
        parse_tenants(text)


def test_a_class_may_have_a_weight() -> None:
    assert parse_class("gold:0.5:ttft=1:weight=4").request_class == RequestClass("gold", 1.0, None, 4.0)
