"""What follows from engines' own figures: corrections, others' load, caution after preemptions."""

from typing import Any

import pytest
from builders import make_engine
from invariants import check_engine
from playbook import Play

from proxy.core.admission import GateConfig, fits_kv
from proxy.core.engine import EngineBelief
from proxy.core.events import EngineReported
from proxy.core.selfreport import EngineReport, SelfReports

GATE = GateConfig()


def report(usage: float = 0.0, running: int = 0, *, waiting: int = 0, preemptions: int = 0) -> EngineReport:
    return EngineReport(running, waiting, usage, preemptions)


def told(*usages: float, capacity: int | None = 10_000, own: int = 2000, **more: Any) -> SelfReports:
    found = SelfReports()
    for n, usage in enumerate(usages):
        found.take(report(usage, **more), capacity, own, 0, 2.0 * n)
    return found


def test_the_account_is_corrected_little_by_little() -> None:
    assert told(0.3).kv_error == pytest.approx(250)
    assert told(*[0.3] * 30).kv_error == pytest.approx(1000, rel=0.01)
    assert told(*[0.1] * 30).kv_error == pytest.approx(-1000, rel=0.01)


def test_an_engine_with_a_queue_may_have_preempted_so_what_it_lacks_is_not_free() -> None:
    assert told(*[0.1] * 30, waiting=1).kv_error == 0
    assert told(*[0.3] * 30, waiting=1).kv_error > 900


def test_without_a_known_capacity_there_is_nothing_to_correct() -> None:
    assert told(0.9, capacity=None).kv_error == 0


def test_sequences_of_others_count_when_three_reports_in_a_row_have_them() -> None:
    found = SelfReports()
    seen = []
    for n, running in enumerate([9, 9, 8, 12, 4, 4, 9, 9, 9]):
        found.take(report(running=running, waiting=1), None, 0, 5, 2.0 * n)
        seen.append(found.foreign)
    assert seen == [0, 0, 4, 4, 0, 0, 0, 0, 5]


def test_each_report_of_preemptions_adds_caution_which_fades() -> None:
    found = SelfReports()
    for n, count in enumerate([40, 40, 47, 47, 48]):
        found.take(report(preemptions=count), None, 0, 0, 2.0 * n)
    assert found.caution == pytest.approx(0.02, rel=0.05), "what was before we came is none of ours"
    found.take(report(preemptions=0), None, 0, 0, 10.0)
    assert found.caution < 0.02, "it has restarted, and counts anew"
    found.take(report(preemptions=0), None, 0, 0, 130.0)
    assert found.caution == pytest.approx(0.01, rel=0.1)
    for n in range(100):
        found.take(report(preemptions=n), None, 0, 0, 130.0 + n)
    assert found.caution <= 0.1


def test_what_an_engine_said_is_forgotten_when_it_says_nothing_more() -> None:
    found = told(*[0.3] * 5, running=7)
    assert (found.fresh, found.foreign) == (True, 7)
    found.forget()
    assert found.told is None
    assert (found.fresh, found.foreign, found.kv_error) == (False, 0, 0)


# -- what the engine's belief and the gate make of it --


def engine_that_has_learnt(length: int = 50, **limits: Any) -> EngineBelief:
    engine = make_engine(**limits)
    for _ in range(200):
        engine.outputs.learn(length)
    return engine


def test_the_belief_compares_like_with_like() -> None:
    """An engine holds what it has worked on, a partly filled block for each sequence, and not what is to come."""
    engine = make_engine(token_budget=512, kv_tokens=10_000)
    engine.release("a", 1000, 0.0)
    engine.on_tokens("a", 1, 0.1)
    engine.release("b", 2000, 0.1)
    for n in range(50):
        engine.on_report(report((1001 + 2 * 8) / 10_000, 2), 0.2 + 2 * n)
    assert engine.reports.kv_error == pytest.approx(0, abs=1)
    assert engine.reports.foreign == 0


def test_the_load_of_others_takes_slots_tokens_and_room() -> None:
    engine = make_engine(token_budget=512, max_num_seqs=10, kv_tokens=10_000)
    engine.release("a", 100, 0.0)
    engine.on_tokens("a", 1, 0.1)
    assert (engine.prefill_budget, engine.is_full) == (511, False)
    assert fits_kv(engine, 5000, GATE)
    for n in range(30):
        engine.on_report(report(0.6, 10), 0.2 + 2 * n)
    assert (engine.prefill_budget, engine.is_full) == (502, True)
    assert not fits_kv(engine, 5000, GATE)
    check_engine(engine)
    engine.on_report(None, 99.0)
    assert (engine.prefill_budget, engine.is_full) == (511, False)
    assert fits_kv(engine, 5000, GATE)


def test_an_engine_without_work_of_ours_still_gets_some_whatever_others_do() -> None:
    play = Play(max_num_seqs=4)
    for n in range(5):
        play.handle(EngineReported("e0", report(0.99, 400)), 2.0 * n)
    assert play.arrive("a") == ["dispatch a e0"]
    assert play.arrive("b") == []


def test_a_report_that_tells_of_room_lets_the_waiting_in() -> None:
    play = Play(max_num_seqs=4)
    play.arrive("a", at=0.0)
    for n in range(3):
        play.handle(EngineReported("e0", report(running=4)), 1.0 + n)
    play.tokens("a")
    assert play.arrive("b") == []
    assert play.handle(EngineReported("e0", report(running=1)), 5.0) == ["dispatch b e0"]


def test_reports_of_unknown_engines_are_ignored_and_a_dead_engine_s_are_forgotten() -> None:
    play = Play()
    assert play.handle(EngineReported("nobody", report(1.0, 5))) == []
    assert [e.id for e in play.scheduler.engines] == ["e0"]
    for n in range(3):
        play.handle(EngineReported("e0", report(running=4)), 1.0 + n)
    assert play.engine().reports.foreign == 4
    play.down()
    assert play.engine().reports.foreign == 0


def test_preemptions_raise_what_the_gate_keeps_free() -> None:
    engine = engine_that_has_learnt(kv_tokens=10_000, token_budget=512)
    engine.release("a", 5000, 0.0)
    engine.on_tokens("a", 1, 0.0)
    engine.on_report(report(0.51, 1), 0.0)
    most = max(prompt for prompt in range(0, 5000, 10) if fits_kv(engine, prompt, GATE))
    engine.on_report(report(0.51, 1, preemptions=3), 2.0)
    assert not fits_kv(engine, most - 60, GATE)
    assert fits_kv(engine, most - 140, GATE)


def test_learnt_lengths_replace_the_flat_growth_and_a_report_the_watermark() -> None:
    """Answers of a few tokens need next to nothing; nobody knows before some have ended."""
    new, engine = make_engine(kv_tokens=100_000), engine_that_has_learnt(3, kv_tokens=100_000)
    for one in (new, engine):
        for n in range(50):
            one.release(f"r{n}", 1800, 0.0)
            one.on_tokens(f"r{n}", 1, 0.0)
    assert [fits_kv(one, 5000, GATE) for one in (new, engine)] == [False, True]
    assert [fits_kv(one, 8000, GATE) for one in (new, engine)] == [False, False]
    engine.on_report(report(0.90, 50), 0.0)
    assert fits_kv(engine, 8000, GATE), "it would tell if it were wrong"
    long = engine_that_has_learnt(2000, kv_tokens=100_000)
    for n in range(50):
        long.release(f"r{n}", 500, 0.0)
    assert not fits_kv(long, 500, GATE), "they will have four times as many tokens"


def test_lengths_are_learnt_from_streams_and_from_answers_in_one_piece_but_not_from_what_never_began() -> None:
    play = Play()
    for n in range(120):
        play.arrive(f"s{n}", 10)
        play.tokens(f"s{n}", 3)
        play.tokens(f"s{n}", 2)
        play.end(f"s{n}")
    outputs = play.engine().outputs
    assert outputs.learnt
    assert outputs.survival(3) > 0.9
    assert outputs.survival(6) < 0.1
    before = repr(outputs)
    play.arrive("x")
    play.not_started("x", 0.0)
    play.end("x")
    assert repr(outputs) == before
