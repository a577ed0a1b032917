"""``proxy.sim.schedulers``: batches worked out by hand, and what must hold of every scheduler under any load.

vLLM's in order of arrival is covered by ``test_engine``. A step takes a millisecond per token: it tells its content.
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.sim.engine import EngineConfig, SimulatedEngine
from proxy.sim.profiles import Profile, StepModel
from proxy.sim.schedulers import EngineSchedulerName
from proxy.sim.schedulers.rad import RadScheduler

MILLISECOND_PER_TOKEN = StepModel(
    host=0.0,
    host_per_sequence=0.0,
    floor=0.0,
    per_token=1.0,
    p=1.0,
    per_decode=0.0,
    per_kv_token=0.0,
    per_attention=0.0,
)


def make_engine(
    *, kv_tokens: int = 100_000, scheduler: EngineSchedulerName = EngineSchedulerName.SLAI, **config: Any
) -> SimulatedEngine:
    profile = Profile("counting", MILLISECOND_PER_TOKEN, kv_tokens, source="made up")
    return SimulatedEngine(EngineConfig(profile, scheduler=scheduler, **config))


def begin(engine: SimulatedEngine) -> dict[str, int]:
    """Start a step and return how many tokens each sequence has in it."""
    engine.start_step()
    return {sequence.id: tokens for sequence, tokens in engine._batch or ()}


def step(engine: SimulatedEngine) -> dict[str, int]:
    """Do a whole step; as ``begin``."""
    batch = begin(engine)
    if batch:
        engine.finish_step()
    return batch


# -- SLAI --


def test_prompts_go_before_decodes_that_have_time() -> None:
    engine = make_engine(token_budget=10, max_num_seqs=10)
    engine.add("stream", 5, 100, tbt_seconds=1.0)
    assert step(engine) == {"stream": 5}
    engine.add("prompt", 25, 100, tbt_seconds=1.0)
    assert [step(engine) for _ in range(3)] == [{"prompt": 10}, {"prompt": 10}, {"prompt": 5, "stream": 1}]


def test_a_decode_is_critical_from_its_last_schedulable_time_on() -> None:
    engine = make_engine(token_budget=10, max_num_seqs=10)
    engine.add("stream", 10, 100, tbt_seconds=0.065)
    step(engine)  # it ends at 10 ms, the mean step too: it may wait until 10 + 65 - 5 * 10 = 25 ms
    engine.add("prompt", 1000, 100, tbt_seconds=10.0)
    assert [step(engine) for _ in range(3)] == [{"prompt": 10}, {"prompt": 10}, {"stream": 1, "prompt": 9}]


def test_an_idle_budget_runs_decodes_whenever_it_can() -> None:
    engine = make_engine()
    engine.add("stream", 5, 4, tbt_seconds=100.0)
    assert [step(engine) for _ in range(5)] == [{"stream": 5}, {"stream": 1}, {"stream": 1}, {"stream": 1}, {}]


def test_the_tighter_deadline_is_served_first() -> None:
    engine = make_engine(token_budget=4, max_num_seqs=4)
    for name, tbt in (("loose", 5.0), ("tight", 1.0), ("tighter", 0.5)):
        engine.add(name, 1, 100, tbt_seconds=tbt)
    assert step(engine) == {"loose": 1, "tight": 1, "tighter": 1}
    engine.add("prompt", 3, 1, tbt_seconds=1.0)
    assert step(engine) == {"prompt": 3, "tighter": 1}


def test_new_prompts_come_shortest_first_but_wait_for_the_one_half_way() -> None:
    engine = make_engine(token_budget=10, max_num_seqs=10)
    for name, tokens in (("a", 8), ("b", 30), ("c", 4)):
        engine.add(name, tokens, 1)
    assert step(engine) == {"c": 4, "a": 6}
    engine.add("d", 1, 1)
    assert step(engine) == {"a": 2, "d": 1, "b": 7}


def test_the_offset_is_set_by_how_full_the_cache_is_when_the_step_ends() -> None:
    early: list[float] = []
    for kv_tokens in (1600, 176):  # 100 or 11 blocks, of which 10 are used and one more is for the first token
        engine = make_engine(token_budget=160, max_num_seqs=8, kv_tokens=kv_tokens)
        engine.add("stream", 161, 5, tbt_seconds=10.0)
        step(engine)
        step(engine)
        (time,) = (stream.due for stream in engine._scheduler._streams.values())  # type: ignore[attr-defined]
        early.append(0.161 + 10.0 - time)
    mean = 0.161 / 2
    assert early == [pytest.approx(5 * mean), pytest.approx(10 * mean)]


def test_a_critical_decode_without_room_preempts_the_last_prompt_half_way() -> None:
    engine = make_engine(token_budget=16, max_num_seqs=8, kv_tokens=96)  # six blocks
    engine.add("stream", 16, 40, tbt_seconds=0.001)
    step(engine)
    engine.add("prompt", 80, 10, tbt_seconds=10.0)
    assert step(engine) == {"stream": 1}, "the prompt needs five blocks, and one of the six became the stream's"
    assert engine.preemptions == 0

    engine = make_engine(token_budget=16, max_num_seqs=8, kv_tokens=96)
    engine.add("stream", 15, 40, tbt_seconds=0.001)
    step(engine)
    engine.add("prompt", 80, 10, tbt_seconds=10.0)
    assert step(engine) == {"stream": 1, "prompt": 15}
    assert step(engine) == {"stream": 1}
    assert engine.preemptions == 1
    assert engine.waiting == 1


@pytest.mark.parametrize("tbt_seconds", [0.001, 100.0])  # critical at once, or with time that nobody can use
def test_a_decode_alone_in_a_full_cache_starts_over(tbt_seconds: float) -> None:
    engine = make_engine(token_budget=16, max_num_seqs=8, kv_tokens=64)  # four blocks
    for name in ("a", "b"):
        engine.add(name, 31, 30, tbt_seconds=tbt_seconds)
    made: Counter[str] = Counter()
    for _ in range(200):
        if not begin(engine):
            break
        made.update(produced.sequence_id for produced in engine.finish_step())
    assert made == {"a": 30, "b": 30}
    assert engine.preemptions


def test_with_late_deadlines_a_stream_sits_out_the_step_after_its_prompt() -> None:
    engine = make_engine(scheduler=EngineSchedulerName.SLAI_AS_PUBLISHED, token_budget=10, max_num_seqs=10)
    engine.add("stream", 5, 100, tbt_seconds=0.0)
    assert step(engine) == {"stream": 5}
    engine.add("prompt", 30, 100, tbt_seconds=1.0)
    assert [step(engine) for _ in range(2)] == [{"prompt": 10}, {"stream": 1, "prompt": 9}]


def test_alone_it_does_not_sit_out() -> None:
    engine = make_engine(scheduler=EngineSchedulerName.SLAI_AS_PUBLISHED)
    engine.add("stream", 5, 3, tbt_seconds=1.0)
    assert [step(engine) for _ in range(4)] == [{"stream": 5}, {"stream": 1}, {"stream": 1}, {}]


def test_slai_mended_holds_nobody_back_for_a_prompt_that_does_not_fit() -> None:
    for scheduler, tokens in ((EngineSchedulerName.SLAI, 9), (EngineSchedulerName.SLAI_MENDED, 10)):
        engine = make_engine(scheduler=scheduler, token_budget=10, max_num_seqs=10, kv_tokens=96)
        engine.add("stream", 5, 20, tbt_seconds=10.0)
        step(engine)
        engine.add("fits", 30, 10, tbt_seconds=10.0)
        step(engine)
        engine.add("does not", 70, 10, tbt_seconds=10.0)
        expected = {"fits": 10} if scheduler is EngineSchedulerName.SLAI else {"stream": 1, "fits": 9}
        assert step(engine) == expected, tokens


# -- orders of prompts --


@pytest.mark.parametrize(
    ("scheduler", "order"),
    [
        (EngineSchedulerName.SARATHI, "long mid short paying"),
        (EngineSchedulerName.SARATHI_SPF, "short paying mid long"),
        (EngineSchedulerName.SARATHI_PRIORITY, "paying short mid long"),
        (EngineSchedulerName.SLAI_FCFS, "long mid short paying"),
        (EngineSchedulerName.SLAI_FIXED, "short paying mid long"),
        (EngineSchedulerName.SLAI_PRIORITY, "paying short mid long"),
        (EngineSchedulerName.VLLM_PRIORITY, "paying long mid short"),
        (EngineSchedulerName.RAD, "long mid short paying"),
        (EngineSchedulerName.DEADLINE, "short paying mid long"),
    ],
)
def test_prompts_begin_in_the_schedulers_order(scheduler: EngineSchedulerName, order: str) -> None:
    engine = make_engine(scheduler=scheduler, token_budget=8, max_num_seqs=8)
    for name, tokens in (("long", 40), ("mid", 24), ("short", 9), ("paying", 16)):
        engine.add(name, tokens, 1, tbt_seconds=0.1 if name == "paying" else 0.5)
    assert list(dict.fromkeys(name for _ in range(30) for name in step(engine))) == order.split()


def test_sarathi_finishes_what_it_has_begun_and_srpf_lets_a_short_prompt_overtake() -> None:
    for scheduler, expected in (
        (EngineSchedulerName.SARATHI_SPF, [{"long": 10}, {"long": 10}, {"long": 4, "short": 5}]),
        (EngineSchedulerName.SRPF, [{"long": 10}, {"short": 5, "long": 5}, {"long": 9}]),
    ):
        engine = make_engine(scheduler=scheduler, token_budget=10, max_num_seqs=10)
        engine.add("long", 24, 1)
        first = step(engine)
        engine.add("short", 5, 1)
        assert [first, step(engine), step(engine)] == expected


def test_vllm_with_priorities_preempts_whoever_comes_last_even_if_it_is_in_the_step() -> None:
    engine = make_engine(scheduler=EngineSchedulerName.VLLM_PRIORITY, token_budget=64, max_num_seqs=8, kv_tokens=64)
    engine.add("free", 30, 30, tbt_seconds=0.5)
    step(engine)
    engine.add("paying", 31, 30, tbt_seconds=0.1)
    step(engine)
    assert step(engine) == {"free": 1, "paying": 1}  # 32 tokens each: two blocks of four are full
    assert step(engine) == {"paying": 1}
    assert engine.preemptions == 1
    assert (engine.running, engine.waiting) == (1, 1)


# -- RAD, Orca --


def test_rad_decodes_only_with_a_tile_of_streams_or_without_prompts() -> None:
    engine = make_engine(scheduler=EngineSchedulerName.RAD, token_budget=4, max_num_seqs=2)
    for name in "abc":
        engine.add(name, 8, 3)
    prompts = [{"a": 4}, {"a": 4}, {"b": 4}, {"b": 4}]
    assert [step(engine) for _ in range(6)] == [*prompts, {"a": 1, "b": 1}, {"a": 1, "b": 1}]
    assert [step(engine) for _ in range(5)] == [{"c": 4}, {"c": 4}, {"c": 1}, {"c": 1}, {}]


def test_rad_with_a_cycle_lets_the_streams_drain_before_the_next_prompts() -> None:
    class OneAtATime(RadScheduler):
        CYCLE = 1

    engine = SimulatedEngine(EngineConfig(token_budget=4, max_num_seqs=4, scheduler=OneAtATime))
    for name in "ab":
        engine.add(name, 4, 3)
    assert [step(engine) for _ in range(4)] == [{"a": 4}, {"a": 1}, {"a": 1}, {"b": 4}]


def test_orca_takes_prompts_whole_and_sets_their_outputs_aside() -> None:
    engine = make_engine(scheduler=EngineSchedulerName.ORCA, token_budget=16, max_num_seqs=4, kv_tokens=160)
    engine.add("a", 100, 20)
    engine.add("b", 20, 20)
    engine.add("c", 1, 1)
    assert step(engine) == {"a": 100}, "b would fit, but not with its output"
    assert [step(engine) for _ in range(20)] == [{"a": 1}] * 19 + [{"b": 20, "c": 1}]
    assert engine.preemptions == 0


# -- deadlines --


def test_the_step_is_as_long_as_the_tightest_stream_allows() -> None:
    engine = make_engine(scheduler=EngineSchedulerName.DEADLINE, token_budget=500, max_num_seqs=10)
    engine.add("tight", 10, 100, tbt_seconds=0.0535)
    step(engine)
    engine.add("prompt", 120, 100, tbt_seconds=10.0)
    assert [step(engine) for _ in range(3)] == [{"tight": 1, "prompt": n} for n in (49, 49, 22)]


def test_streams_with_time_wait_while_there_are_prompts_and_never_too_long() -> None:
    engine = make_engine(scheduler=EngineSchedulerName.DEADLINE, token_budget=50, max_num_seqs=10)
    engine.add("loose", 10, 100, tbt_seconds=0.3035)
    step(engine)
    engine.add("prompt", 1000, 100, tbt_seconds=10.0)
    assert [step(engine) for _ in range(8)] == ([{"prompt": 50}] * 3 + [{"loose": 1, "prompt": 49}]) * 2


def test_nobody_waits_for_a_prompt_that_the_cache_has_no_room_for() -> None:
    engine = make_engine(scheduler=EngineSchedulerName.DEADLINE, token_budget=64, max_num_seqs=8, kv_tokens=96)
    engine.add("stream", 40, 30, tbt_seconds=10.0)
    step(engine)
    engine.add("prompt", 60, 10, tbt_seconds=10.0)
    assert step(engine) == {"stream": 1}


# -- any load --


@pytest.mark.parametrize("scheduler", list(EngineSchedulerName))
@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),  # the step before which it comes
            st.integers(1, 150),  # prompt tokens
            st.integers(1, 40),  # output tokens
            st.one_of(st.none(), st.none(), st.integers(0, 40)),  # how many steps later it is aborted, within a step
            st.sampled_from([None, 0.01, 0.5]),  # TBT deadline
        ),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([8, 40, 128]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([0, 0.1]),
)
def test_every_sequence_makes_its_tokens_and_every_block_comes_back(
    scheduler: EngineSchedulerName,
    load: list[tuple[int, int, int, int | None, float | None]],
    token_budget: int,
    max_num_seqs: int,
    watermark: float,
) -> None:
    engine = make_engine(
        scheduler=scheduler,
        kv_tokens=208,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        watermark=watermark,
    )
    made: Counter[str] = Counter()
    ended: set[str] = set()
    aborted: set[str] = set()
    for number in range(10_000):
        for i, (when, prompt, output, _, tbt) in enumerate(load):
            if when == number:
                engine.add(str(i), prompt, output, tbt_seconds=tbt)
        batch = begin(engine)
        assert sum(batch.values()) <= token_budget or scheduler is EngineSchedulerName.ORCA
        assert len(batch) <= engine.running <= max_num_seqs
        running = engine._scheduler.running
        held = sum(sequence.blocks for sequence in running.values())
        assert held + engine._kv.free == engine.config.blocks, "each block is in use or free"
        assert all(s.computed + batch.get(s.id, 0) <= s.blocks * 16 for s in running.values())
        assert batch or not running, "it never stops while it has something to run"
        for i, (when, _, _, later, _) in enumerate(load):
            if later is not None and when + later == number and str(i) not in ended:
                engine.abort(str(i))
                aborted.add(str(i))
        if batch:
            for sequence_id, finished in engine.finish_step():
                assert sequence_id not in ended | aborted
                made[sequence_id] += 1
                if finished:
                    ended.add(sequence_id)
        elif number > 70:
            break
    else:
        raise AssertionError("it never comes to rest")
    assert (engine.running, engine.waiting, engine.kv_tokens_used) == (0, 0, 0)
    assert ended | aborted == {str(i) for i in range(len(load))}
    for i, (_, _, output, _, _) in enumerate(load):
        assert made[str(i)] == output if str(i) in ended else made[str(i)] < output
