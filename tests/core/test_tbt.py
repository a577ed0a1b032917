"""TBT admission: a prompt spares the deadlines of streams in flight, as far as that can be."""

from typing import Any

import pytest
from builders import make_engine
from playbook import Play
from test_tiles import trained

from proxy.core.admission import GateConfig
from proxy.core.engine import EngineBelief
from proxy.core.request import RELAXED, STRICT
from proxy.core.stepmodel import OnlineStepModel, StepLoad
from proxy.core.tbt import harm_seconds

SPARING = GateConfig(keep_tbt=True, backlog_factor=3.0)
"""Three steps of backlog, so that it is the deadline that holds a prompt back."""


def streaming(*, model: OnlineStepModel | None = None, tbt_seconds: float | None = 0.1, **limits: Any) -> EngineBelief:
    engine = make_engine(**{"token_budget": 4096, **limits})
    engine.model = trained() if model is None else model
    engine.release("s", 1000, 0.0, tbt_seconds)
    engine.on_tokens("s", 1, 0.05)
    return engine


def stage(*engines: str, gate: GateConfig = SPARING) -> Play:
    """Engines of which the first has a strict stream, ``s``, whose first token came at 0.05."""
    play = Play(gate=gate, token_budget=4096)
    for engine_id in engines[1:]:
        play.down(engine_id)
    assert play.arrive("s", 16, request_class=STRICT) == ["dispatch s e0"]
    play.tokens("s", at=0.05)
    for engine_id in engines[1:]:
        play.up(engine_id, token_budget=4096)
        play.engine(engine_id).health.join(0.05, gently=False)  # as if it had been there all the time
    for engine_id in engines:
        play.engine(engine_id).model = trained()
    return play


# -- harm --


@pytest.mark.parametrize("tbt_seconds", [0.06, 0.1, 0.3])
def test_a_prompt_is_harmless_as_long_as_its_step_keeps_the_tightest_deadline(tbt_seconds: float) -> None:
    engine = streaming(tbt_seconds=tbt_seconds)
    engine.release("relaxed", 10, 0.05, 5.0)
    engine.on_tokens("relaxed", 1, 0.1)
    engine.on_tokens("s", 1, 0.1)
    largest = max(n for n in range(1, 4000) if not harm_seconds(engine, n, 0.1))
    load = StepLoad(largest, 2, engine._stream_context, largest * largest / 2, 1)
    assert engine.model.predict(load) + engine.model.margin_seconds(load) == pytest.approx(tbt_seconds, abs=0.001)
    assert 0 < harm_seconds(engine, largest + 1, 0.1) < 0.001


def test_harm_is_the_overrun_of_all_streams_in_all_the_steps_that_a_prompt_takes() -> None:
    engine = streaming()
    once = harm_seconds(engine, 4000, 0.06)
    assert once > 0.1
    assert harm_seconds(engine, 12_000, 0.06) == pytest.approx(3 * once, rel=0.05)
    engine.release("t", 16, 0.06, 0.1)
    engine.on_tokens("t", 1, 0.1)
    engine.on_tokens("s", 1, 0.1)
    assert harm_seconds(engine, 4000, 0.11) == pytest.approx(2 * once, rel=0.05)


def test_what_is_sent_already_counts_unless_the_prompt_is_to_be_alone() -> None:
    engine = streaming()
    alone = harm_seconds(engine, 600, 0.051)
    assert alone == 0
    engine.release("other", 600, 0.051)
    assert harm_seconds(engine, 600, 0.052) > 0
    assert harm_seconds(engine, 600, 0.052, alone=True) == 0


def test_without_deadlines_or_knowledge_of_the_engine_nothing_is_harmful() -> None:
    assert harm_seconds(streaming(tbt_seconds=None), 4000, 0.06) == 0
    assert harm_seconds(streaming(model=OnlineStepModel()), 4000, 0.06) == 0


# -- placement --


def test_a_prompt_that_would_break_a_deadline_waits_for_a_step_of_its_own() -> None:
    play = stage("e0")
    assert play.arrive("a", 600, at=0.051) == ["dispatch a e0"]
    assert play.arrive("b", 700, at=0.052) == []
    assert play.tokens("s", at=0.07) == ["dispatch b e0"], "a is in the step that has begun"


def test_without_the_rule_it_would_not_wait() -> None:
    play = stage("e0", gate=GateConfig(backlog_factor=3.0))
    assert play.arrive("a", 600, at=0.051) == ["dispatch a e0"]
    assert play.arrive("b", 700, at=0.052) == ["dispatch b e0"]


def test_a_prompt_that_no_step_of_the_engine_can_hold_in_time_does_not_wait_for_one() -> None:
    play = stage("e0")
    assert play.arrive("short", 100, at=0.051) == ["dispatch short e0"]
    assert play.scheduler.harmful_releases == 0
    play.tokens("s", at=0.07)
    play.tokens("s", at=0.1)
    play.tokens("short", at=0.1)
    assert play.arrive("long", 3000, at=0.101) == ["dispatch long e0"]
    assert play.scheduler.harmful_releases == 1, "it is counted"


def test_it_goes_to_an_engine_whose_streams_have_the_time() -> None:
    play = stage("e0", "e1")
    assert play.arrive("r", 500, request_class=RELAXED, at=0.06) == ["dispatch r e1"]
    play.tokens("r", at=0.1)
    assert play.arrive("more", 3000, request_class=RELAXED, at=0.101) == ["dispatch more e1"]
    assert play.arrive("long", 3000, at=0.102) == ["dispatch long e1"], "three steps of backlog are allowed"


def test_it_waits_for_such_an_engine_at_most_as_long_as_the_harm_would_last() -> None:
    gate = GateConfig(keep_tbt=True, backlog_factor=0.5)
    play = stage("e0", "e1", gate=gate)
    assert play.arrive("r", 500, at=0.06) == ["dispatch r e1"]
    play.tokens("r", at=0.1)
    assert play.arrive("first", 3000, at=0.101) == ["dispatch first e1"]
    harm = harm_seconds(play.engine("e0"), 3000, 0.102)
    assert harm > 0.15
    assert play.arrive("long", 3000, at=0.102) == [], "e1 is busy, but will do"
    now = 0.102
    while now + 0.05 < 0.102 + harm:
        now += 0.05
        assert play.tokens("s", at=now) == []
    assert play.tokens("s", at=now + 0.05) == ["dispatch long e0"]


def test_an_idle_engine_takes_what_comes() -> None:
    play = stage("e0")
    play.end("s", at=0.06)
    assert play.arrive("long", 4000, at=0.07) == ["dispatch long e0"]
