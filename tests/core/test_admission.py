import pytest
from builders import ONE_STEP as GATE
from builders import make_engine

from proxy.core.admission import GateConfig, admits, is_shut, leaves_free
from proxy.core.engine import EngineBelief
from proxy.core.feedback import FeedbackDelay


def busy_engine(*, token_budget: int = 512, max_num_seqs: int = 128, kv_tokens: int | None = None) -> EngineBelief:
    """An engine that has one decode of 100 prompt tokens and one token, and nothing to prefill."""
    engine = make_engine(token_budget=token_budget, max_num_seqs=max_num_seqs, kv_tokens=kv_tokens)
    engine.release("decode", 100, 0.0)
    engine.on_tokens("decode", 1, 0.03)
    return engine


@pytest.mark.parametrize("prompt_tokens", [1, 512, 513, 1_000_000])
def test_an_idle_engine_always_admits(prompt_tokens: int) -> None:
    assert admits(make_engine(max_num_seqs=1, kv_tokens=10), prompt_tokens, GATE, now=0.0)


def test_an_engine_that_is_down_admits_nothing_even_when_idle() -> None:
    engine = make_engine()
    engine.up = False
    assert not admits(engine, 1, GATE, now=0.0)


def test_a_closed_engine_admits_again_from_the_very_instant_it_reopens() -> None:
    engine = make_engine()
    engine.closed_until = 2.0
    assert not admits(engine, 1, GATE, now=1.999999)
    assert admits(engine, 1, GATE, now=2.0)


def test_a_busy_engine_admits_while_its_backlog_is_below_one_step_of_prompt_tokens() -> None:
    engine = busy_engine()
    assert engine.prefill_budget == 511
    engine.release("a", 510, 0.04)
    assert admits(engine, 10_000, GATE, now=0.04)
    engine.release("b", 1, 0.04)
    assert not admits(engine, 1, GATE, now=0.04)


def test_a_gate_is_shut_where_no_prompt_is_admitted_however_short() -> None:
    idle, closed, busy, full = make_engine(), make_engine(), busy_engine(), busy_engine(max_num_seqs=1)
    closed.closed_until = 2.0
    engines = (idle, closed, busy, full)
    assert [is_shut(engine, GATE, 0.04) for engine in engines] == [False, True, False, True]
    busy.release("a", 511, 0.04)
    assert is_shut(busy, GATE, 0.04)
    assert [admits(engine, 1, GATE, 0.04) for engine in engines] == [True, False, False, False]


def test_a_larger_backlog_factor_lets_more_be_released_ahead() -> None:
    engine = busy_engine()
    engine.release("a", 1000, 0.04)
    assert not admits(engine, 1, GateConfig(backlog_factor=1.9), now=0.04)
    assert admits(engine, 1, GateConfig(backlog_factor=2.0), now=0.04)


def test_a_slow_loop_lets_as_many_steps_be_released_ahead_as_it_lasts() -> None:
    engine = busy_engine()
    assert engine.step_seconds == pytest.approx(0.03)
    engine.release("a", 3 * 511 - 1, 0.04)
    engine.delay = FeedbackDelay(0.06)
    assert not admits(engine, 1, GATE, now=0.04)
    engine.delay = FeedbackDelay(0.061)
    assert admits(engine, 1, GATE, now=0.04)


def test_no_more_requests_are_released_than_the_engine_has_slots() -> None:
    engine = busy_engine(max_num_seqs=2)
    assert admits(engine, 1, GATE, now=0.04)
    engine.release("a", 1, 0.04)
    assert not admits(engine, 1, GATE, now=0.04)
    engine.end("decode", 0.05)
    assert admits(engine, 1, GATE, now=0.05)


def test_the_kv_cache_is_filled_up_to_the_watermark_and_the_growth_of_what_runs() -> None:
    engine = busy_engine(kv_tokens=1000)
    gate = GateConfig(kv_watermark=0.1, kv_growth_tokens=50)
    assert engine.kv_tokens == 101
    # 900 below the watermark, less 101 in use and 50 to grow for each of the two sequences.
    assert admits(engine, 699, gate, now=0.04)
    assert not admits(engine, 700, gate, now=0.04)


def test_what_is_released_counts_against_the_kv_cache_before_it_has_begun() -> None:
    engine = busy_engine(kv_tokens=1000)
    gate = GateConfig(kv_watermark=0.1, kv_growth_tokens=50)
    engine.release("a", 400, 0.04)
    assert admits(engine, 249, gate, now=0.04)
    assert not admits(engine, 250, gate, now=0.04)


def test_an_unknown_kv_size_closes_no_gate() -> None:
    assert admits(busy_engine(kv_tokens=None), 10_000_000, GATE, now=0.04)


def test_a_prompt_larger_than_the_whole_cache_is_left_to_the_engine_to_refuse() -> None:
    engine = busy_engine(kv_tokens=1000)
    assert not admits(engine, 900, GATE, now=0.04)
    assert admits(engine, 1001, GATE, now=0.04)


def test_a_prompt_larger_than_what_the_reserves_leave_waits_until_it_has_room_without_them() -> None:
    engine = make_engine(kv_tokens=1000)
    engine.release("decode", 500, 0.0)
    engine.on_tokens("decode", 1, 0.03)
    assert not admits(engine, 990, GATE, now=0.04)
    engine.release("other", 1, 0.04)
    engine.end("decode", 0.05)
    assert admits(engine, 990, GATE, now=0.05)


@pytest.mark.parametrize(
    "fields",
    [
        {"backlog_factor": 0.0},
        {"tenant_headroom": 1.0},
        {"tenant_headroom": -0.1},
        {"backlog_factor": float("nan")},
        {"feedback_seconds": float("inf")},
        {"backlog_factor": -1.0},
        {"feedback_seconds": -0.001},
        {"kv_growth_tokens": -1},
        {"kv_watermark": 1.0},
        {"kv_watermark": -0.1},
    ],
)
def test_a_gate_that_makes_no_sense_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        GateConfig(**fields)  # type: ignore[arg-type]


def test_while_anything_is_kept_for_others_a_share_of_the_engine_stays_free() -> None:
    gate = GateConfig(kv_watermark=0.0, kv_growth_tokens=0, tenant_headroom=0.3)
    engine = busy_engine(max_num_seqs=10, kv_tokens=1000)
    assert leaves_free(engine, 599, 1.0, gate), "101 + 599 of 1,000"
    assert not leaves_free(engine, 600, 1.0, gate)
    assert not leaves_free(engine, 500, 400.0, gate), "what is kept counts where it is more"
    assert leaves_free(engine, 399, 1e9, gate), "but never more than half of the cache is kept"
    assert not leaves_free(engine, 400, 1e9, gate)
    assert leaves_free(engine, 899, 0.0, gate), "nothing is kept: nobody else is there"
    for n in range(6):
        assert leaves_free(engine, 1, 1.0, gate)
        engine.release(f"s{n}", 1, 0.04)
    assert not leaves_free(engine, 1, 1.0, gate), "7 of 10 slots"
    assert leaves_free(engine, 1, 0.0, gate)


def test_slots_stay_free_also_where_the_size_of_the_cache_is_unknown_and_an_idle_engine_is_open_to_all() -> None:
    gate = GateConfig(tenant_headroom=0.5)
    assert not leaves_free(busy_engine(max_num_seqs=2), 1, 1.0, gate)
    assert leaves_free(busy_engine(max_num_seqs=3), 1_000_000, 1.0, gate)
    assert leaves_free(make_engine(max_num_seqs=1, kv_tokens=10), 1_000_000, 1e9, gate)
