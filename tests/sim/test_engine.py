"""``proxy.sim.engine``: batches worked out by hand, and what must hold of any load.

The engine's profile takes one millisecond per token, so a step's duration tells how many tokens are in it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.sim.engine import EngineConfig, Produced, SimulatedEngine
from proxy.sim.profiles import Profile, StepModel

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


def make_engine(*, kv_tokens: int = 100_000, **config: Any) -> SimulatedEngine:
    profile = Profile("counting", MILLISECOND_PER_TOKEN, kv_tokens, source="made up")
    return SimulatedEngine(EngineConfig(profile, **config))


def begin(engine: SimulatedEngine) -> dict[str, int]:
    """Start a step and return how many tokens each sequence has in it."""
    seconds = engine.start_step()
    if seconds is None:
        return {}
    assert engine._batch is not None
    batch = {sequence.id: tokens for sequence, tokens in engine._batch}
    assert seconds == pytest.approx(sum(batch.values()) / 1000)
    return batch


def step(engine: SimulatedEngine) -> dict[str, int]:
    """Do a whole step; as ``begin``."""
    batch = begin(engine)
    if batch:
        engine.finish_step()
    return batch


def finish_all(engine: SimulatedEngine) -> Counter[str]:
    """Run until nothing is left and count the tokens of each sequence."""
    tokens: Counter[str] = Counter()
    while begin(engine):
        tokens.update(p.sequence_id for p in engine.finish_step())
    assert (engine.running, engine.waiting, engine.kv_tokens_used) == (0, 0, 0)
    return tokens


# -- batches --


def test_a_prompt_is_prefilled_in_chunks_and_its_last_chunk_makes_the_first_token() -> None:
    engine = make_engine(token_budget=512)
    engine.add("a", 1000, 2)
    assert begin(engine) == {"a": 512}
    assert engine.finish_step() == []
    assert begin(engine) == {"a": 488}
    assert engine.finish_step() == [Produced("a", finished=False)]
    assert begin(engine) == {"a": 1}
    assert engine.finish_step() == [Produced("a", finished=True)]
    assert begin(engine) == {}


def test_a_prompt_of_just_the_budget_needs_one_step() -> None:
    engine = make_engine(token_budget=512)
    engine.add("a", 512, 1)
    assert begin(engine) == {"a": 512}
    assert engine.finish_step() == [Produced("a", finished=True)]


def test_decodes_come_first_and_prompts_have_the_rest_of_the_budget() -> None:
    engine = make_engine(token_budget=512)
    for name in ("a", "b"):
        engine.add(name, 10, 100)
    step(engine)
    engine.add("long", 2000, 10)
    assert [step(engine) for _ in range(4)] == [{"a": 1, "b": 1, "long": 510}] * 3 + [{"a": 1, "b": 1, "long": 470}]
    assert step(engine) == {"a": 1, "b": 1, "long": 1}


def test_prompts_are_admitted_first_come_first_served_and_share_a_step() -> None:
    engine = make_engine(token_budget=512)
    engine.add("long", 600, 10)
    engine.add("short", 10, 10)
    engine.add("next", 1000, 10)
    assert step(engine) == {"long": 512}
    assert (engine.running, engine.waiting) == (1, 2)
    assert step(engine) == {"long": 88, "short": 10, "next": 414}
    assert step(engine) == {"long": 1, "short": 1, "next": 510}


def test_a_prompt_that_comes_during_a_step_joins_the_next() -> None:
    engine = make_engine()
    engine.add("a", 10, 10)
    assert begin(engine) == {"a": 10}
    engine.add("b", 20, 10)
    assert engine.finish_step() == [Produced("a", finished=False)]
    assert begin(engine) == {"a": 1, "b": 20}


def test_with_asynchronous_scheduling_it_joins_the_one_after_that() -> None:
    engine = make_engine(token_budget=512, async_scheduling=True)
    engine.add("a", 100, 9)
    assert begin(engine) == {"a": 100}
    engine.add("b", 50, 2)
    engine.finish_step()
    assert begin(engine) == {"a": 1}, "composed before b came"
    engine.add("c", 60, 2)
    engine.finish_step()
    assert begin(engine) == {"a": 1, "b": 50}
    engine.finish_step()
    assert begin(engine) == {"a": 1, "b": 1, "c": 60}


def test_nothing_is_composed_ahead_of_an_engine_that_has_nothing_to_run() -> None:
    engine = make_engine(async_scheduling=True)
    engine.add("a", 100, 1)
    assert begin(engine) == {"a": 100}
    engine.add("b", 50, 1)
    engine.finish_step()
    assert begin(engine) == {"b": 50}
    engine.finish_step()
    assert engine.start_step() is None


def test_who_came_too_late_for_the_next_step_may_be_aborted() -> None:
    engine = make_engine(async_scheduling=True)
    engine.add("a", 100, 9)
    begin(engine)
    engine.add("b", 50, 1)
    engine.add("c", 60, 1)
    assert engine.waiting == 2
    engine.abort("b")
    assert [name for name, _ in engine.finish_step()] == ["a"]
    assert finish_all(engine) == Counter(a=8, c=1)
    assert engine.kv_tokens_used == 0


def test_no_more_sequences_run_than_are_allowed() -> None:
    engine = make_engine(token_budget=16, max_num_seqs=2)
    for name in "abc":
        engine.add(name, 2, 3)
    assert step(engine) == {"a": 2, "b": 2}
    assert step(engine) == {"a": 1, "b": 1}
    assert step(engine) == {"a": 1, "b": 1}
    assert step(engine) == {"c": 2}


def test_the_tokens_of_a_step_are_told_in_the_order_of_admission() -> None:
    engine = make_engine()
    for name in "cab":
        engine.add(name, 5, 5)
    for _ in range(3):
        begin(engine)
        assert [p.sequence_id for p in engine.finish_step()] == ["c", "a", "b"]


def test_an_engine_without_work_has_no_step_and_takes_up_work_again() -> None:
    engine = make_engine()
    assert engine.start_step() is None
    assert engine.start_step() is None
    engine.add("a", 5, 1)
    assert step(engine) == {"a": 5}
    assert engine.start_step() is None
    engine.add("a", 5, 1)
    assert step(engine) == {"a": 5}


def test_the_step_model_is_told_of_decodes_their_context_and_the_attention_of_chunks() -> None:
    weights = StepModel(
        host=0.0,
        host_per_sequence=1e9,
        floor=0.0,
        per_token=0.0,
        p=1.0,
        per_decode=1e6,
        per_kv_token=1e3,
        per_attention=1e-3,
    )

    def expected(sequences: int, decodes: int, kv_tokens: int, attention: float) -> float:
        return 1e-3 * (1e9 * sequences + 1e6 * decodes + 1e3 * kv_tokens + 1e-3 * attention)

    engine = SimulatedEngine(EngineConfig(Profile("weights", weights, 10_000, ""), token_budget=512))
    engine.add("a", 10, 20)
    engine.add("b", 20, 20)
    assert engine.start_step() == pytest.approx(expected(2, 0, 0, 10 * 5 + 20 * 10), rel=1e-12)
    engine.finish_step()
    engine.add("long", 700, 2)
    assert engine.start_step() == pytest.approx(expected(3, 2, 10 + 20, 510 * 255), rel=1e-12)
    engine.finish_step()
    assert engine.start_step() == pytest.approx(expected(3, 2, 11 + 21, 190 * (510 + 95)), rel=1e-12)
    engine.finish_step()
    assert engine.start_step() == pytest.approx(expected(3, 3, 12 + 22 + 700, 0), rel=1e-12)


# -- KV cache --


def test_the_whole_prompt_must_fit_before_its_first_chunk_is_taken_in() -> None:
    engine = make_engine(kv_tokens=160, token_budget=32, max_num_seqs=8)
    engine.add("a", 96, 5)
    engine.add("b", 80, 5)
    assert [step(engine) for _ in range(3)] == [{"a": 32}] * 3
    assert engine.kv_tokens_used == 96
    # 4 of 10 blocks are free and "a" needs one of them now; "b" needs 5, although its first chunk needs only 2.
    assert step(engine) == {"a": 1}


def test_a_prompt_that_does_not_fit_holds_back_those_behind_it() -> None:
    engine = make_engine(kv_tokens=160)
    engine.add("a", 100, 3)
    assert step(engine) == {"a": 100}
    engine.add("b", 64, 3)
    engine.add("c", 1, 3)
    assert step(engine) == {"a": 1}
    assert step(engine) == {"a": 1}
    assert step(engine) == {"b": 64, "c": 1}


def test_admission_keeps_the_watermark_free() -> None:
    def admitted(prompt_tokens: int) -> bool:
        engine = make_engine(kv_tokens=160, watermark=0.3)
        engine.add("a", 32, 3)
        step(engine)
        engine.add("b", prompt_tokens, 3)
        return "b" in step(engine)

    # "a" grows into its third of 10 blocks in the step that looks at "b": 7 are free, of which 3 stay so.
    assert admitted(4 * 16)
    assert not admitted(4 * 16 + 1)


def test_the_watermark_is_not_kept_from_a_sequence_that_is_alone() -> None:
    engine = make_engine(kv_tokens=160, watermark=0.3)
    engine.add("a", 150, 10)
    assert step(engine) == {"a": 150}
    assert finish_all(engine) == {"a": 9}


def test_used_blocks_count_whole() -> None:
    engine = make_engine(kv_tokens=160)
    engine.add("a", 16, 3)
    step(engine)
    assert engine.kv_tokens_used == 16
    step(engine)
    assert engine.kv_tokens_used == 32
    step(engine)
    assert engine.kv_tokens_used == 0


def test_a_block_that_is_not_whole_is_no_block() -> None:
    assert EngineConfig(Profile("p", MILLISECOND_PER_TOKEN, 47, "")).blocks == 2


# -- preemption --


def engine_about_to_preempt() -> SimulatedEngine:
    """Four blocks in use by ``old`` and ``young``, either with 32 tokens computed: the next step needs a fifth."""
    engine = make_engine(kv_tokens=64)
    engine.add("old", 16, 40)
    engine.add("young", 16, 20)
    for _ in range(17):
        step(engine)
    assert engine.kv_tokens_used == 64
    assert engine.preemptions == 0
    return engine


def test_when_blocks_run_out_the_youngest_starts_over_and_the_oldest_goes_on() -> None:
    engine = engine_about_to_preempt()
    assert step(engine) == {"old": 1}
    assert (engine.preemptions, engine.running, engine.waiting) == (1, 1, 1)
    for _ in range(22):
        assert step(engine) == {"old": 1}  # 33 tokens of "young" need three blocks; one or none is free
    # "old" has made its 40 tokens. "young" computes its prompt and its 17 tokens again and goes on with the 18th.
    assert step(engine) == {"young": 33}
    assert step(engine) == {"young": 1}
    assert begin(engine) == {"young": 1}
    assert engine.finish_step() == [Produced("young", finished=True)]
    assert engine.kv_tokens_used == 0
    assert engine.generation_tokens == 60
    assert engine.prompt_tokens == 16 + 16 + 33


def test_nothing_is_admitted_in_the_step_of_a_preemption() -> None:
    engine = make_engine(kv_tokens=80)  # five blocks
    engine.add("old", 32, 40)
    engine.add("young", 48, 20)
    assert step(engine) == {"old": 32, "young": 48}
    engine.add("tiny", 1, 1)
    assert step(engine) == {"old": 1}, "two blocks came free, but the youngest has just been thrown out"
    assert engine.preemptions == 1


def test_a_preempted_sequence_is_admitted_before_those_that_never_ran() -> None:
    engine = engine_about_to_preempt()
    engine.add("newcomer", 1, 1)
    while "young" not in (batch := step(engine)):
        assert "newcomer" not in batch
    assert list(batch) == ["young", "newcomer"]


def test_a_sequence_may_preempt_several_and_they_come_back_oldest_first() -> None:
    engine = make_engine(kv_tokens=96)  # six blocks
    engine.add("a", 48, 48)
    for name in "bcd":
        engine.add(name, 16, 8)
    assert list(step(engine)) == ["a", "b", "c", "d"]
    # All four need a further block and none is free: "a" takes that of "d", "b" that of "c".
    assert list(step(engine)) == ["a", "b"]
    assert engine.preemptions == 2
    tokens: Counter[str] = Counter()
    order: list[str] = []
    while begin(engine):
        for p in engine.finish_step():
            tokens[p.sequence_id] += 1
            order.append(p.sequence_id)
    assert order.index("c") <= order.index("d")
    assert tokens == {"a": 46, "b": 6, "c": 7, "d": 7}
    assert engine.generation_tokens == 48 + 3 * 8


def test_a_sequence_that_is_alone_is_never_preempted() -> None:
    engine = make_engine(kv_tokens=64)
    engine.add("a", 1, 63)
    assert finish_all(engine) == {"a": 63}
    assert engine.preemptions == 0


# -- abort --


def test_a_waiting_sequence_that_is_aborted_is_never_run() -> None:
    engine = make_engine(token_budget=16, max_num_seqs=1)
    for name in "abc":
        engine.add(name, 5, 2)
    step(engine)
    engine.abort("b")
    assert engine.waiting == 1
    assert finish_all(engine) == {"a": 1, "c": 2}


def test_a_running_sequence_that_is_aborted_frees_its_blocks_at_once() -> None:
    engine = make_engine()
    engine.add("a", 160, 10)
    engine.add("b", 16, 2)
    step(engine)
    engine.abort("a")
    assert engine.kv_tokens_used == 16
    assert engine.running == 1
    assert finish_all(engine) == {"b": 1}


def test_an_abort_within_a_step_loses_that_sequences_share_of_it_and_no_other() -> None:
    engine = make_engine()
    for name in "abc":
        engine.add(name, 16, 1)
    begin(engine)
    engine.abort("b")
    assert engine.finish_step() == [Produced("a", finished=True), Produced("c", finished=True)]
    assert (engine.kv_tokens_used, engine.running, engine.generation_tokens) == (0, 0, 2)


def test_a_prefill_may_be_aborted_between_and_within_its_chunks() -> None:
    engine = make_engine(token_budget=128)
    for name in ("between", "within"):
        engine.add(name, 300, 1)
    step(engine)
    engine.abort("between")
    begin(engine)
    engine.abort("within")
    assert engine.finish_step() == []
    assert engine.kv_tokens_used == 0
    assert engine.start_step() is None


def test_an_id_may_be_used_again_at_once_and_the_step_under_way_does_not_count_for_it() -> None:
    engine = make_engine()
    engine.add("a", 16, 1)
    begin(engine)
    engine.abort("a")
    engine.add("a", 20, 1)
    assert engine.finish_step() == []
    assert begin(engine) == {"a": 20}
    assert engine.finish_step() == [Produced("a", finished=True)]


def test_a_preempted_sequence_can_be_aborted() -> None:
    engine = engine_about_to_preempt()
    step(engine)
    engine.abort("young")
    assert engine.waiting == 0
    assert finish_all(engine) == {"old": 22}


def test_an_abort_of_what_is_unknown_or_over_is_ignored() -> None:
    engine = make_engine()
    engine.abort("nobody")
    engine.add("a", 5, 1)
    step(engine)
    engine.abort("a")
    assert engine.kv_tokens_used == 0
    assert (engine.running, engine.waiting) == (0, 0)


# -- misuse --


def test_an_id_in_use_is_refused() -> None:
    engine = make_engine()
    engine.add("a", 5, 5)
    with pytest.raises(ValueError, match="exists"):
        engine.add("a", 5, 5)
    step(engine)
    with pytest.raises(ValueError, match="exists"):
        engine.add("a", 5, 5)


@pytest.mark.parametrize("lengths", [(0, 1), (1, 0), (-1, 5)])
def test_empty_prompts_and_outputs_are_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        make_engine().add("a", *lengths)


def test_a_sequence_that_never_fits_is_refused_and_one_that_just_fits_is_not() -> None:
    engine = make_engine(kv_tokens=64)
    with pytest.raises(ValueError, match="never fit"):
        engine.add("a", 60, 5)
    engine.add("a", 60, 4)
    assert finish_all(engine) == {"a": 4}


def test_steps_are_started_and_finished_in_turn() -> None:
    engine = make_engine()
    with pytest.raises(RuntimeError):
        engine.finish_step()
    engine.add("a", 5, 5)
    engine.start_step()
    with pytest.raises(RuntimeError):
        engine.start_step()


@pytest.mark.parametrize(
    "fields",
    [
        {"token_budget": 0},
        {"max_num_seqs": 0},
        {"block_size": 0},
        {"watermark": 1.0},
        {"watermark": -0.1},
        {"token_budget": 64, "max_num_seqs": 65},
    ],
)
def test_an_engine_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        EngineConfig(**fields)


def test_an_engine_shows_what_it_does() -> None:
    engine = make_engine(kv_tokens=160)
    engine.add("a", 20, 2)
    step(engine)
    engine.add("b", 20, 2)
    assert repr(engine) == "<SimulatedEngine running=1 waiting=1 kv=32>"


# -- prefix cache --


def run_alone(engine: SimulatedEngine, name: str, prompt: int, output: int = 1, content: str | None = None) -> int:
    """Run one sequence to its end and return how many prompt tokens it took to compute it."""
    engine.add(name, prompt, output, content)
    before = engine.prompt_tokens
    finish_all(engine)
    return engine.prompt_tokens - before


def cached(engine: SimulatedEngine) -> dict[str, int]:
    """Cached blocks by content, least recently used first; their sum is what the engine thinks."""
    kv = engine._kv
    assert sum(kv.contents().values()) == kv.cached <= kv.free
    assert 0 not in kv.contents().values()
    return kv.contents()


def test_a_longer_prompt_of_the_same_content_finds_the_whole_blocks_of_the_shorter_one() -> None:
    engine = make_engine(block_size=16)
    assert run_alone(engine, "p1", 100, content="c") == 100
    assert run_alone(engine, "p2", 200, content="c") == 200 - 96
    assert run_alone(engine, "p3", 200, content="c") == 200 - 192
    assert cached(engine) == {"c": 12}


def test_other_contents_and_prompts_without_any_find_nothing() -> None:
    engine = make_engine()
    run_alone(engine, "a", 100, content="c")
    assert run_alone(engine, "b", 100, content="d") == 100
    assert run_alone(engine, "c", 100) == 100
    assert run_alone(engine, "d", 100) == 100
    assert cached(engine) == {"c": 6, "d": 6}


@pytest.mark.parametrize(("prompt", "computed"), [(96, 16), (97, 1), (64, 16), (1, 1), (16, 16), (17, 1)])
def test_the_last_token_is_always_computed(prompt: int, computed: int) -> None:
    engine = make_engine(block_size=16)
    run_alone(engine, "first", 96, content="c")
    assert run_alone(engine, "second", prompt, content="c") == computed


def test_generated_tokens_are_not_cached() -> None:
    engine = make_engine(block_size=16)
    run_alone(engine, "a", 20, 100, content="c")
    assert cached(engine) == {"c": 1}


def test_a_shorter_prompt_of_the_same_content_loses_the_engine_no_block() -> None:
    engine = make_engine(block_size=16, kv_tokens=1600)
    run_alone(engine, "long", 160, content="c")
    run_alone(engine, "short", 33, content="c")
    assert engine._kv.free == 100
    assert cached(engine) == {"c": 10}


def test_slices_of_a_prompt_cost_as_many_tokens_as_the_prompt() -> None:
    engine = make_engine(block_size=16)
    ends = [128, 256, 400, 512, 600]
    assert sum(run_alone(engine, str(end), end, content="c") for end in ends) == 600


def test_a_prompt_finds_the_blocks_of_one_that_the_same_step_works_on() -> None:
    engine = make_engine(token_budget=8192)
    engine.add("x/3680", 3680, 1, "x")
    engine.add("x", 3693, 5, "x")
    assert begin(engine) == {"x/3680": 3680, "x": 13}
    assert engine.step_load.prefill_tokens == 3693
    engine.finish_step()
    assert finish_all(engine) == {"x": 4}


def test_an_aborted_prompt_leaves_what_it_has_computed() -> None:
    engine = make_engine(token_budget=128, max_num_seqs=8)
    engine.add("a", 1000, 1, "c")
    step(engine)
    begin(engine)
    engine.abort("a")
    engine.finish_step()
    assert cached(engine) == {"c": 8}, "its share of the step under way is lost"
    assert engine.kv_tokens_used == 0


def test_cached_blocks_are_free_for_others() -> None:
    engine = make_engine(kv_tokens=160)
    run_alone(engine, "a", 150, content="c")
    assert engine.kv_tokens_used == 0
    assert run_alone(engine, "b", 150, content="d") == 150
    assert cached(engine) == {"d": 9}


def test_under_pressure_the_least_recently_used_prompt_loses_its_end_first() -> None:
    engine = make_engine(kv_tokens=320)  # 20 blocks
    for name in ("old", "young"):
        run_alone(engine, name, 96, content=name)  # 6 blocks each
    run_alone(engine, "again", 97, content="old")
    assert [*cached(engine)] == ["young", "old"]
    run_alone(engine, "other", 12 * 16)  # 8 blocks are empty, so it overwrites 4
    assert cached(engine) == {"young": 2, "old": 6}
    assert run_alone(engine, "young 2", 96, content="young") == 96 - 32
    run_alone(engine, "large", 20 * 16 - 1)
    assert cached(engine) == {}


def test_a_preempted_sequence_finds_its_own_prompt_again_if_nobody_has_overwritten_it() -> None:
    engine = make_engine(kv_tokens=160, token_budget=64, max_num_seqs=4)
    engine.add("old", 60, 40, "c")
    engine.add("young", 48, 30, "d")
    tokens = finish_all(engine)
    assert engine.preemptions > 0
    assert tokens == {"old": 40, "young": 30}
    assert cached(engine) == {"c": 3, "d": 3}


# -- any load --

Load = Sequence[tuple[int, int, int, int | None, str | None]]
loads = st.lists(
    st.tuples(
        st.integers(0, 30),  # the step before which it comes
        st.integers(1, 150),  # prompt tokens
        st.integers(1, 40),  # output tokens
        st.one_of(st.none(), st.none(), st.integers(0, 40)),  # how many steps later it is aborted, within a step
        st.sampled_from([None, "c", "d"]),  # content
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(
    loads,
    st.sampled_from([8, 40, 128]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([1, 16]),
    st.sampled_from([0, 0.1]),
)
def test_every_sequence_makes_its_tokens_and_every_block_comes_back(
    load: Load, token_budget: int, max_num_seqs: int, block_size: int, watermark: float
) -> None:
    engine = make_engine(
        kv_tokens=208, token_budget=token_budget, max_num_seqs=max_num_seqs, block_size=block_size, watermark=watermark
    )
    total = engine.config.blocks * block_size
    made: Counter[str] = Counter()
    ended: set[str] = set()
    aborted: set[str] = set()
    for number in range(10_000):
        for i, (when, prompt, output, _, content) in enumerate(load):
            if when == number:
                engine.add(str(i), prompt, output, content)
        batch = begin(engine)
        assert sum(batch.values()) <= token_budget
        assert len(batch) <= engine.running <= max_num_seqs
        assert all(tokens >= 1 for tokens in batch.values())
        held = sum(s.blocks for s in engine._scheduler.running.values())
        assert held + engine._kv.free == engine.config.blocks, "each block is in use or free"
        cached(engine)  # of the free ones, some are cached
        assert engine.kv_tokens_used == held * block_size <= total
        for sequence in engine._scheduler.running.values():
            needed = sequence.computed + batch.get(sequence.id, 0)
            assert needed <= sequence.blocks * block_size < needed + block_size
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
    assert engine.generation_tokens == made.total()
    assert ended | aborted == {str(i) for i in range(len(load))}
    for i, (_, _, output, _, _) in enumerate(load):
        assert made[str(i)] == output if str(i) in ended else made[str(i)] < output
    if not engine.preemptions and not aborted and not any(content for *_, content in load):
        assert engine.prompt_tokens == sum(prompt for _, prompt, *_ in load)
