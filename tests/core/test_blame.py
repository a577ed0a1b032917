"""Why a token came late, as told by the steps that ended meanwhile."""

import random

import pytest
from builders import make_engine

from proxy.core.blame import Cause, PastStep, blame
from proxy.core.selfreport import EngineReport
from proxy.core.stepmodel import OnlineStepModel, StepCoefficients, StepLoad
from proxy.sim.engine import EngineConfig, SimulatedEngine
from proxy.sim.profiles import PROFILES

MODEL = OnlineStepModel(StepCoefficients(0.02, 1e-4, 0.0, 0.0, 0.0, 0.0))
"""20 ms, and 10 ms more for every hundred prompt tokens."""


def past(ended_at: float, seconds: float, prompt_tokens: int = 0) -> PastStep:
    load = StepLoad(prompt_tokens, 4, 400, 0.0, int(prompt_tokens > 0))
    return PastStep(ended_at, seconds, load, "r" if prompt_tokens else None, prompt_tokens)


@pytest.mark.parametrize(
    ("steps", "chunks", "cause"),
    [
        ([past(1.0, 0.30, 2800)], 1, Cause.PREFILL),
        ([past(0.8, 0.02), past(1.0, 0.28, 2500)], 1, Cause.PREFILL),
        ([past(1.0, 0.30)], 1, Cause.STALL),
        ([past(1.0, 0.30, 100)], 1, Cause.STALL),
        ([], 1, Cause.STALL),
        ([past(0.7 + n / 50, 0.02) for n in range(15)], 1, Cause.PASSED_OVER),
        ([past(0.7 + n / 50, 0.02) for n in range(15)], 15, Cause.DELIVERY),
        ([past(1.0, 0.02)], 1, Cause.DELIVERY),
    ],
)
def test_what_the_steps_of_a_gap_tell(steps: list[PastStep], chunks: int, cause: Cause) -> None:
    assert blame(steps, 0.3, 0.1, chunks, MODEL).cause is cause


@pytest.mark.parametrize("preempted", [True, False])
def test_a_preemption_is_one_where_the_engine_says_so_and_the_stream_was_passed_over(preempted: bool) -> None:
    passed = [past(0.7 + n / 50, 0.02) for n in range(15)]
    told = blame(passed, 0.3, 0.1, 1, MODEL, preempted=preempted).cause
    assert told is (Cause.PREEMPTION if preempted else Cause.PASSED_OVER)
    assert blame(passed, 0.3, 0.1, 15, MODEL, preempted=preempted).cause is Cause.DELIVERY
    assert blame([past(1.0, 0.30, 2800)], 0.3, 0.1, 1, MODEL, preempted=preempted).cause is Cause.PREFILL


@pytest.mark.parametrize(("told_at", "cause"), [(0.3, Cause.PREEMPTION), (0.05, Cause.PASSED_OVER)])
def test_only_what_the_engine_tells_in_the_gap_counts(told_at: float, cause: Cause) -> None:
    engine = make_engine(token_budget=4000)
    for name in ("steady", "victim"):
        engine.release(name, 10, 0.0, 0.1)
        engine.on_tokens(name, 1, 0.04)
    engine.on_report(EngineReport(2, 0, 0.9, 3), 0.045)
    told = False
    for n in range(1, 25):
        now = 0.04 + 0.02 * n
        if not told and now >= told_at:
            engine.on_report(EngineReport(1, 1, 0.9, 4), now)
            told = True
        engine.on_tokens("steady", 1, now)
        if n < 2:
            engine.on_tokens("victim", 1, now)
    engine.on_tokens("victim", 1, now)
    assert engine.blame(now - 0.06 - 0.01, 0.1, 1, now).cause is cause


def test_a_deadline_that_the_decodes_alone_break_is_nobodys_prompt() -> None:
    slow = OnlineStepModel(StepCoefficients(0.15, 1e-4, 0.0, 0.0, 0.0, 0.0))
    assert blame([past(1.0, 0.15)], 0.15, 0.1, 1, slow).cause is Cause.STEP
    assert blame([past(1.0, 0.155, 50)], 0.155, 0.1, 1, slow).cause is Cause.STEP


def test_the_largest_prompt_of_the_longest_step_is_named() -> None:
    engine = make_engine(token_budget=4000)
    for name, tokens in (("stream", 10), ("short", 50)):
        engine.release(name, tokens, 0.0, 0.1)
        engine.on_tokens(name, 1, 0.03)
    engine.release("long", 2500, 0.031)
    engine.release("less", 700, 0.031)
    now = 0.05
    engine.on_tokens("stream", 1, now)
    now += 0.35
    for name in ("stream", "long", "less"):
        engine.on_tokens(name, 1, now)
    engine.model.observe(StepLoad(3200, 2, 60, 0.0, 2), 0.35)
    found = engine.blame(0.35, 0.1, 1, now)
    assert (found.request_id, found.request_tokens, found.prompt_tokens) == ("long", 2500, 3200)
    assert found.step_seconds == pytest.approx(0.35)


@pytest.mark.parametrize("seed", range(4))
def test_in_the_simulator_the_prompts_are_to_blame_that_were_in_the_step(seed: int) -> None:
    """Strict streams on an engine that takes long prompts whole; nobody tells the belief what a step held."""
    config = EngineConfig(PROFILES["rtx6000ada"], token_budget=8192)
    engine, belief, rng = SimulatedEngine(config), make_engine(token_budget=8192), random.Random(seed)
    now, number, late, right = 0.0, 0, 0, 0
    last: dict[str, float] = {}  # when each stream had its last token
    while late < 200:
        while rng.random() < 0.08 or not belief.outstanding:
            number += 1
            tokens = rng.choice((30, 60, 3000))
            belief.release(str(number), tokens, now - 0.02, 0.1)  # in time for the step that begins now
            engine.add(str(number), tokens, 200)
        seconds = engine.start_step()
        assert seconds is not None
        now += seconds
        held, produced = engine.step_load.prefill_tokens, engine.finish_step()
        gaps = {name: now - last[name] for name, _done in produced if name in last}
        for name, _ in produced:
            belief.on_tokens(name, 1, now)
            last[name] = now
        for gap in gaps.values():
            if gap > 0.1 and belief.model.trusted:
                late += 1
                told = belief.blame(gap, 0.1, 1, now)
                right += told.cause is Cause.PREFILL and abs(told.prompt_tokens - held) <= 0.1 * held
        for name, finished in produced:
            if finished:
                belief.end(name, now)
                last.pop(name, None)
    assert right >= 0.9 * late
