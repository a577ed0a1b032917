"""``proxy.core.engine``: the step clock and what it tells about prefills."""

import pytest
from builders import make_engine, make_limits
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import interpreted
from invariants import check_engine

from proxy.core.engine import EngineBelief
from proxy.core.feedback import FeedbackDelay
from proxy.core.tiles import TileConfig, room
from proxy.sim.engine import EngineConfig, SimulatedEngine


def engine_with_streams(*names: str, token_budget: int = 100) -> EngineBelief:
    """An engine on which the named streams, of 10 prompt tokens each, have had their first token at 0.03."""
    engine = make_engine(token_budget=token_budget)
    for name in names:
        engine.release(name, 10, 0.0)
    for name in names:
        assert engine.on_tokens(name, 1, 0.03)
    assert engine.backlog == 0
    return engine


def step(engine: EngineBelief, now: float, *names: str, chunks: int = 1) -> list[bool]:
    """The named streams get their tokens of one step in this order; which of them told that the step has ended."""
    told = [engine.on_tokens(name, chunks, now) for name in names]
    check_engine(engine)
    return told


def test_a_prompt_is_backlog_until_its_first_token() -> None:
    engine = make_engine(token_budget=100)
    engine.release("a", 250, 0.0)
    assert (engine.backlog, engine.outstanding, engine.decodes) == (250, 1, 0)
    assert engine.on_tokens("a", 1, 0.09)
    assert (engine.backlog, engine.outstanding, engine.decodes) == (0, 1, 1)


def test_each_step_of_the_leading_stream_works_off_what_the_decodes_leave_of_the_budget() -> None:
    engine = engine_with_streams("a", "b")
    engine.release("long", 1000, 0.03)
    step(engine, 0.06, "a", "b")
    before = engine.backlog
    for n in range(1, 6):
        assert step(engine, 0.06 + n * 0.03, "a", "b") == [True, False]
        assert engine.backlog == before - n * 98


def test_a_prompt_released_during_a_step_is_not_worked_on_in_it() -> None:
    engine = engine_with_streams("a")
    engine.release("long", 1000, 0.045)
    step(engine, 0.06, "a")
    assert engine.backlog == 1000
    step(engine, 0.09, "a")
    assert engine.backlog == 1000 - 99


def test_a_prompt_released_at_the_end_of_a_step_is_worked_on_in_the_next() -> None:
    engine = engine_with_streams("a")
    step(engine, 0.06, "a")
    engine.release("long", 1000, 0.06)
    step(engine, 0.09, "a")
    assert engine.backlog in (1000 - 99, 1000)  # it may have come just too late
    before = engine.backlog
    step(engine, 0.12, "a")
    assert engine.backlog == before - 99


def test_prompts_are_worked_off_in_the_order_of_release() -> None:
    engine = engine_with_streams("a")
    engine.release("first", 120, 0.04)
    engine.release("second", 200, 0.041)
    step(engine, 0.06, "a")
    step(engine, 0.09, "a")  # 99 of the first
    step(engine, 0.12, "a")  # 21 of the first, 78 of the second
    assert engine.backlog == 320 - 2 * 99
    assert engine.on_tokens("first", 1, 0.12)
    assert engine.backlog == 200 - 78


def test_a_short_prompt_takes_no_more_of_the_budget_than_it_has() -> None:
    engine = engine_with_streams("a")
    engine.release("short", 5, 0.04)
    for now in (0.06, 0.09):
        step(engine, now, "a")
    assert engine.backlog == 0
    assert engine.on_tokens("short", 1, 0.091)
    assert engine.backlog == 0


def test_a_first_token_settles_the_account_whatever_was_estimated() -> None:
    engine = engine_with_streams("a")
    engine.release("cached", 10_000, 0.04)  # a prefix cache hit: prefilled in no time
    engine.release("other", 500, 0.041)
    step(engine, 0.06, "a")
    engine.on_tokens("cached", 1, 0.06)
    assert engine.backlog == 500


def test_a_stream_behind_the_leader_does_not_advance_the_clock() -> None:
    engine = engine_with_streams("leader", "other")
    for n in range(1, 50):
        assert step(engine, 0.03 + n * 0.03, "leader", "other") == [True, False]


def test_one_step_is_one_step_in_whatever_order_its_tokens_are_read() -> None:
    engine = engine_with_streams("a", "b", "c")
    engine.release("long", 100_000, 0.04)
    step(engine, 0.06, "a", "b", "c")
    before = engine.backlog
    orders = ["abc", "cba", "bac", "cab", "acb"] * 4
    for n, order in enumerate(orders, 1):
        assert step(engine, 0.06 + n * 0.03, *order) == [True, False, False]
    assert engine.backlog == before - len(orders) * 97


def test_two_chunks_in_one_read_of_every_stream_are_two_steps() -> None:
    engine = engine_with_streams("a", "b", "c")
    engine.release("long", 10_000, 0.04)
    step(engine, 0.06, "a", "b", "c")
    before = engine.backlog
    assert step(engine, 0.12, "a", "b", "c", chunks=2) == [True, False, False]
    assert engine.backlog == before - 2 * 97


def test_a_read_of_two_chunks_by_one_and_twice_one_by_another_are_two_steps() -> None:
    engine = engine_with_streams("a", "b")
    engine.release("long", 10_000, 0.04)
    step(engine, 0.06, "a", "b")
    before = engine.backlog
    assert step(engine, 0.09, "b") == [True]
    assert step(engine, 0.12, "a", chunks=2) == [True]
    assert step(engine, 0.12, "b") == [False]
    assert engine.backlog == before - 2 * 98


def test_of_two_steps_in_one_read_a_prompt_that_came_during_the_first_had_one() -> None:
    engine = engine_with_streams("a")
    engine.release("long", 1000, 0.04)
    step(engine, 0.09, "a", chunks=2)
    assert engine.backlog in (1000 - 99, 1000)
    before = engine.backlog
    step(engine, 0.15, "a", chunks=2)
    assert engine.backlog == before - 2 * 99


def test_when_the_leader_ends_its_successors_token_of_the_same_step_is_no_new_step() -> None:
    engine = engine_with_streams("leader", "heir")
    engine.release("long", 1000, 0.04)
    step(engine, 0.06, "leader", "heir")
    before = engine.backlog
    assert step(engine, 0.09, "leader") == [True]
    engine.end("leader", 0.09)
    assert step(engine, 0.09, "heir") == [False]
    assert engine.backlog == before - 98
    assert step(engine, 0.12, "heir") == [True]
    assert engine.backlog == before - 98 - 99


def test_a_stream_that_joined_late_keeps_the_clock_when_the_leaders_are_gone() -> None:
    engine = engine_with_streams("old")
    engine.release("young", 10, 0.03)
    for n in range(1, 30):
        step(engine, 0.03 + n * 0.03, "old")
    engine.on_tokens("young", 1, 0.9)
    step(engine, 0.93, "young", "old")
    engine.end("old", 0.93)
    told = [step(engine, 0.93 + n * 0.03, "young")[0] for n in range(1, 11)]
    assert sum(told) >= 9, "at most one step is missed"


def test_a_preempted_stream_that_resumes_neither_advances_the_clock_nor_holds_it_back() -> None:
    engine = engine_with_streams("leader", "victim")
    for n in range(1, 21):
        step(engine, 0.03 + n * 0.03, "leader")  # the victim starts over meanwhile
    engine.release("long", 10_000, 0.63)
    step(engine, 0.66, "leader")
    before = engine.backlog
    for n in range(1, 6):
        assert step(engine, 0.66 + n * 0.03, "victim", "leader").count(True) == 1
    assert engine.backlog == before - 5 * 98
    engine.end("leader", 0.81)
    told = [step(engine, 0.81 + n * 0.03, "victim")[0] for n in range(1, 11)]
    assert sum(told) >= 8, "but for a step or two"


def test_ids_that_ended_count_for_nothing() -> None:
    engine = engine_with_streams("a", "b")
    engine.release("prefill", 500, 0.04)
    for name in ("a", "prefill", "b", "b", "unknown"):
        engine.end(name, 0.05)
    check_engine(engine)
    assert (engine.outstanding, engine.backlog, engine.kv_tokens, engine.decodes) == (0, 0, 0, 0)


def test_the_kv_account_is_prompts_and_tokens_of_all_that_is_not_over() -> None:
    engine = engine_with_streams("a", "b")
    assert engine.kv_tokens == 22
    engine.release("c", 500, 0.04)
    step(engine, 0.06, "a", "b", chunks=3)
    assert engine.kv_tokens == 22 + 6 + 500
    engine.end("a", 0.06)
    assert engine.kv_tokens == 14 + 500
    engine.on_tokens("c", 2, 0.09)
    assert engine.kv_tokens == 14 + 502


def test_the_step_time_follows_the_observed_steps() -> None:
    engine = engine_with_streams("a", "b")
    for n in range(1, 100):
        step(engine, 0.03 + n * 0.08, "a", "b")
    assert engine.step_seconds == pytest.approx(0.08, rel=0.01)


def test_the_step_time_of_coalesced_reads_is_that_of_one_step() -> None:
    engine = engine_with_streams("a", "b")
    for n in range(1, 100):
        step(engine, 0.03 + n * 0.16, "a", "b", chunks=2)
    assert engine.step_seconds == pytest.approx(0.08, rel=0.01)


def test_idle_time_is_no_step() -> None:
    engine = engine_with_streams("a")
    step(engine, 0.06, "a")
    engine.end("a", 0.06)
    usual = engine.step_seconds
    engine.release("b", 10, 3600.0)
    engine.on_tokens("b", 1, 3600.03)
    step(engine, 3600.06, "b")
    assert engine.step_seconds == pytest.approx(usual, abs=0.001)


def test_a_long_prefill_on_an_otherwise_idle_engine_is_no_step_time() -> None:
    engine = make_engine(token_budget=100)
    engine.release("long", 10_000, 0.0)
    engine.on_tokens("long", 1, 3.0)
    assert engine.step_seconds == pytest.approx(0.03)
    engine.on_tokens("long", 1, 3.03)
    assert engine.step_seconds == pytest.approx(0.03)


def test_steps_that_seem_to_take_no_time_do_not_break_the_estimates() -> None:
    engine = engine_with_streams("a")
    engine.release("long", 10**9, 0.03)
    for _ in range(3000):
        engine.on_tokens("a", 1, 0.03)
    assert engine.step_seconds > 0
    assert engine.lead_tokens() >= engine.prefill_budget
    assert 0 <= engine.estimated_wait_seconds(100) < float("inf")


def test_the_estimated_wait_is_the_backlog_and_the_prompt_in_steps() -> None:
    engine = engine_with_streams("a")
    engine.release("long", 890, 0.03)
    assert engine.estimated_wait_seconds(100) == pytest.approx((890 + 100) / 99 * engine.step_seconds)


def test_the_lead_is_one_step_or_as_many_as_the_feedback_takes() -> None:
    engine = engine_with_streams("a")
    assert engine.step_seconds == pytest.approx(0.03)
    leads = []
    for seconds in (0.0, 0.005, 0.0299, 0.031, 0.1):
        engine.delay = FeedbackDelay(seconds)
        leads.append(engine.lead_tokens())
    assert leads == [99, 99, 99, 2 * 99, 4 * 99]


def test_an_engine_full_of_decodes_still_has_a_token_for_prompts() -> None:
    engine = engine_with_streams(*map(str, range(8)), token_budget=4)
    assert engine.prefill_budget == 1
    engine.release("long", 100, 0.03)
    for n in range(1, 4):
        step(engine, 0.03 + n * 0.03, *map(str, range(8)))
    assert 97 <= engine.backlog <= 98


def test_an_engine_of_unknown_models_serves_any_and_a_request_without_model_is_served_by_any() -> None:
    assert make_engine(models=()).serves("a")
    assert make_engine(models=["a"]).serves("a")
    assert make_engine(models=["a"]).serves("")
    assert not make_engine(models=["a"]).serves("b")


@pytest.mark.parametrize("limits", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-5, 1, None)])
def test_limits_below_one_are_refused(limits: tuple[int, int, int | None]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_limits(*limits)


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 900), st.integers(1, 30)), max_size=30),
    st.sampled_from([64, 128, 512]),
)
def test_while_a_stream_keeps_the_clock_the_belief_is_the_truth(
    arrivals: list[tuple[int, int, int]], token_budget: int
) -> None:
    """Against the simulated engine, with each step's tokens told when it ends and prompts released within steps."""
    truth = SimulatedEngine(EngineConfig(token_budget=token_budget, max_num_seqs=64))
    belief = make_engine(token_budget=token_budget)

    def release(name: str, prompt_tokens: int, output_tokens: int, at: float) -> None:
        truth.add(name, prompt_tokens, output_tokens)
        belief.release(name, prompt_tokens, at)

    release("clock", 1, 10_000, 0.0)
    for number in range(120):
        assert truth.start_step() is not None
        for i, (when, prompt_tokens, output_tokens) in enumerate(arrivals):
            if when == number:
                release(str(i), prompt_tokens, output_tokens, number + 0.5)
        for name, finished in truth.finish_step():
            belief.on_tokens(name, 1, number + 1.0)
            if finished:
                belief.end(name, number + 1.0)
        check_engine(belief)
        sequences = truth._sequences.values()
        assert belief.backlog == sum(s.known - s.computed for s in sequences if not s.decoding)
        assert belief.decodes == sum(s.decoding for s in sequences)
        assert belief.kv_tokens == sum(s.known for s in sequences)


def test_a_stream_that_catches_up_in_several_reads_makes_no_steps() -> None:
    engine = engine_with_streams("leader", "stalled")
    engine.release("long", 10_000, 0.03)
    for n in range(1, 11):
        step(engine, 0.03 + n * 0.03, "leader")
    before = engine.backlog
    told = [engine.on_tokens("stalled", 1, 0.331) for _ in range(10)]
    assert (told.count(True), engine.backlog) == (0, before)


def test_when_the_leader_ends_a_preempted_heir_misses_at_most_one_step() -> None:
    engine = engine_with_streams("leader", "victim")
    for n in range(1, 21):
        step(engine, 0.03 + n * 0.03, "leader")
    for n in range(21, 26):
        step(engine, 0.03 + n * 0.03, "victim", "leader")
    engine.end("leader", 0.78)
    assert [step(engine, 0.78 + n * 0.03, "victim")[0] for n in range(1, 6)].count(True) >= 4


def test_the_time_in_which_a_preempted_stream_starts_over_is_no_step_time() -> None:
    engine = engine_with_streams("leader", "victim")
    for n in range(1, 11):
        step(engine, 0.03 + n * 0.03, "leader")
    engine.end("leader", 0.33)
    for n in range(4):
        step(engine, 5.0 + n * 0.03, "victim")
    assert engine.step_seconds < 0.06


# -- slices --


def test_a_slice_is_backlog_until_a_step_has_worked_on_it_and_a_sequence_until_it_ends() -> None:
    engine = engine_with_streams("a", token_budget=1000)
    engine.release_slice("long", "long/128", 128, 0.04)
    assert (engine.backlog, engine.untaken(), engine.outstanding, engine.sliced) == (128, 128, 2, 1)
    step(engine, 0.06, "a")
    assert (engine.backlog, engine.untaken()) == (128, 0), "it is in the step under way"
    step(engine, 0.09, "a")
    assert (engine.backlog, engine.outstanding) == (0, 2)
    assert not engine.on_slice_end("long/128", 0.091)
    assert (engine.outstanding, engine.held_tokens("long"), engine.decodes) == (1, 128, 1)


def test_what_a_step_leaves_of_a_whole_prompt_counts_for_the_next_as_a_slice_does() -> None:
    def with_300_tokens_left(*, whole: bool) -> int:
        engine = make_engine(token_budget=8192, caches_prefixes=True)
        engine.release("s", 16, 0.0, 0.1)
        engine.on_tokens("s", 1, 0.03)
        if whole:
            engine.release("long", 8191 + 300, 0.04)
        engine.on_tokens("s", 1, 0.06)
        if not whole:
            engine.release("short", 300, 0.065)
        assert engine.untaken() == 300
        return room(engine, 0, 0.066, TileConfig()).most

    # Less even, as the next step has the longer context to read.
    assert with_300_tokens_left(whole=True) <= with_300_tokens_left(whole=False)


def test_a_further_slice_and_the_rest_are_as_long_as_what_is_new_in_them() -> None:
    engine = engine_with_streams("a", token_budget=1000)
    used = engine.kv_tokens
    engine.release_slice("long", "long/128", 128, 0.04)
    engine.release_slice("long", "long/384", 384, 0.05)
    assert (engine.backlog, engine.kv_tokens, engine.held_tokens("long")) == (384, used + 384, 384)
    engine.release("long", 400, 0.055, 0.1)
    assert (engine.backlog, engine.kv_tokens, engine.held_tokens("long"), engine.sliced) == (400, used + 400, 0, 0)
    for tokens in (384, 128):  # in any order
        engine.on_slice_end(f"long/{tokens}", 0.06)
        check_engine(engine)
    assert engine.backlog == 16
    engine.end("long", 0.07)
    assert (engine.backlog, engine.kv_tokens) == (0, used)


def test_without_a_stream_the_end_of_a_slice_is_the_end_of_a_step() -> None:
    engine = make_engine(token_budget=1000)
    engine.release_slice("long", "long/128", 128, 0.0)
    engine.release("next", 500, 0.01)
    assert engine.on_slice_end("long/128", 0.03)
    assert engine.untaken() == 0
    assert not engine.on_slice_end("long/128", 0.04), "it is over already"


def test_dropped_slices_give_back_their_kv_cache_at_once_and_their_backlog_when_they_end() -> None:
    engine = engine_with_streams("a", token_budget=1000)
    used = engine.kv_tokens
    engine.release_slice("long", "long/128", 128, 0.04)
    engine.drop_slices("long")
    check_engine(engine)
    assert (engine.kv_tokens, engine.backlog, engine.sliced) == (used, 128, 0)
    engine.on_slice_end("long/128", 0.05)
    engine.drop_slices("long")
    assert (engine.kv_tokens, engine.backlog, engine.outstanding) == (used, 0, 1)


def test_a_cached_beginning_is_no_work_but_takes_room() -> None:
    engine = make_engine(token_budget=512)
    engine.release("a", 1000, 0.0, cached_tokens=640)
    assert (engine.backlog, engine.kv_tokens) == (360, 1000)
    assert engine.untaken() == 0, "one step will do"
    engine.on_tokens("a", 1, 0.1)
    assert (engine.backlog, engine.kv_tokens) == (0, 1001)
    engine.end("a", 0.2)
    assert engine.kv_tokens == 0


@pytest.mark.parametrize(("cached", "left"), [(0, 488), (320, 488), (512, 488), (800, 200)])
def test_slices_and_a_cached_beginning_do_not_add_up(cached: int, left: int) -> None:
    engine = make_engine(token_budget=512)
    engine.release_slice("a", "a/0", 512, 0.0)
    engine.on_slice_end("a/0", 0.1)
    engine.release("a", 1000, 0.1, cached_tokens=cached)
    assert (engine.backlog, engine.kv_tokens) == (left, 1000)
    engine.end("a", 0.2)
    assert (engine.backlog, engine.kv_tokens) == (0, 0)


@pytest.mark.parametrize("prompt_tokens", [8, 520, 1500, 5000])
@pytest.mark.parametrize("silence_seconds", [0.01, 0.05, 0.0785, 0.1, 0.3, 1.0, 100.0])
def test_after_steps_were_assumed_none_is_left_to_assume(prompt_tokens: int, silence_seconds: float) -> None:
    """Steps differ: the last one of a prompt may be over sooner than the one before it made expect."""
    engine = make_engine(token_budget=512)
    engine.release("a", prompt_tokens, 0.0)
    engine.assume_steps(silence_seconds)
    until = engine.silent_until()
    assert until is None or until > silence_seconds


# -- what tells of the delay of the loop --


def far_engine(*, steps: int = 40, kept_from: int = 0, kept_for: int = 0, stall: float = 0.0) -> EngineBelief:
    """A stream, steps of 30 ms and a short prompt at the end of each, taken in by the next: no delay at all.

    The engine keeps back what is released from step ``kept_from`` on, for so many steps (its cache is full, say), or
    is silent then for ``stall`` seconds.
    """
    engine = engine_with_streams("s")
    queue: list[str] = []
    now = 0.03
    for n in range(steps):
        kept = kept_from <= n < kept_from + kept_for
        name = f"p{n}"
        engine.release(name, 20, now)
        queue.append(name)
        if stall and n == kept_from:
            for _ in range(3):  # what the scheduler does when its deadline is due, and releases thereupon
                now += stall / 4
                engine.assume_steps(now)
                name = f"{name}'"
                engine.release(name, 20, now)
                queue.append(name)
            now += stall / 4
        now += 0.03
        step(engine, now, "s")
        for name in [] if kept else queue:
            engine.on_tokens(name, 1, now + 0.001)
            engine.end(name, now + 0.001)
        queue = queue if kept else []
        check_engine(engine)
    return engine


def test_prompts_taken_in_at_once_tell_of_no_delay() -> None:
    assert far_engine().delay.seconds <= 0.005


def test_prompts_released_into_a_silence_or_behind_those_kept_back_tell_of_no_delay() -> None:
    assert far_engine(kept_from=30, stall=0.4).delay.seconds <= 0.005
    assert far_engine(kept_from=30, kept_for=3, stall=0.16).delay.seconds <= 0.005


def test_a_prompt_that_another_may_have_overtaken_on_its_way_tells_of_no_delay() -> None:
    engine = engine_with_streams("s", token_budget=101)
    now = 0.03
    for number in range(30):
        engine.release(f"short {number}", 50, now + 0.001)
        engine.release(f"long {number}", 100, now + 0.0011)  # comes there first, and fills a step
        for tokens in ((), (f"long {number}",), (f"short {number}",)):
            now += 0.03
            step(engine, now, "s")
            for name in tokens:
                engine.on_tokens(name, 1, now + 0.0001)
                engine.end(name, now + 0.0001)
    assert (engine.delay.seconds, engine.delay.steps) == (0.005, 0)


# -- tokens of one step that come by several ways --


def test_a_stream_that_begins_just_before_the_step_is_seen_to_end_keeps_the_clock_when_it_is_alone() -> None:
    engine = engine_with_streams("a")
    engine.release("b", 10, 0.031)
    assert engine.on_tokens("b", 1, 0.0595)
    assert engine.on_tokens("a", 1, 0.0605)
    engine.end("a", 0.0606)
    before = engine.step
    assert step(engine, 0.09, "b") == [True]
    assert engine.step == before + 1


def test_a_stream_whose_first_token_comes_late_does_not_count_a_step_twice() -> None:
    engine = engine_with_streams("a")
    engine.release("b", 10, 0.001)
    assert engine.on_tokens("b", 1, 0.032)  # of the step that ended at 0.03
    before = engine.step
    for number in range(1, 10):
        assert step(engine, 0.03 + 0.03 * number, "a") == [True]
        assert step(engine, 0.032 + 0.03 * number, "b") == [False]
    assert engine.step == before + 9


# -- what another replica has released --


def test_a_request_that_runs_already_takes_its_slot_its_memory_and_its_deadline() -> None:
    engine = engine_with_streams("a")
    backlog = engine.backlog
    engine.adopt("b", 300, 0.04, 0.1, tokens=7)
    engine.adopt("c", 200, 0.04, 0.5, tokens=0)
    check_engine(engine)
    assert (engine.outstanding, engine.decodes, engine.backlog) == (3, 2, backlog + 200)
    assert engine.kv_tokens == 11 + 307 + 200
    assert engine.context_tokens("b") == 307
    assert engine.strictest_tbt_seconds == 0.1
    assert step(engine, 0.06, "a", "b") == [True, False]
    assert step(engine, 0.09, "b", "a") == [True, False]
    assert engine.on_tokens("c", 1, 0.0901)
    for name in "abc":
        engine.end(name, 0.1, whole=False)
    check_engine(engine)
    assert (engine.outstanding, engine.backlog, engine.kv_tokens) == (0, 0, 0)


def test_nothing_is_learnt_from_answers_that_go_on_elsewhere() -> None:
    engine = make_engine()
    for number in range(500):
        engine.release(f"{number}", 10, 0.0)
        engine.on_tokens(f"{number}", 3, 0.1)
        engine.end(f"{number}", 0.2, whole=False)
    assert not engine.outputs.learnt


# -- prompts of which nobody knows yet which step took them in --


class KnownDelay(FeedbackDelay):
    """A delay that lies between two bounds, of an engine that composes its steps a step ahead."""

    def __init__(self, least_seconds: float, most_seconds: float) -> None:
        super().__init__(most_seconds)
        self._hypotheses[1].least, self._hypotheses[1].most = least_seconds, most_seconds
        self._hypotheses[0].misses = 1.0
        self._choose()


@interpreted
def test_what_may_be_in_the_step_under_way_is_reckoned_with_until_its_output_tells() -> None:
    engine = engine_with_streams("s", token_budget=1000)
    seconds = engine.model.predict(engine.forecast(0.0).loads[0])
    engine.delay = KnownDelay(1.22 * seconds, 1.37 * seconds)
    assert (engine.delay.steps, engine.delay.seconds) == (1, 1.37 * seconds)
    began_at, under_way = engine._step_began_at, engine.step
    engine.release_slice("long", "long/0", 400, began_at + 0.64 * seconds)
    # It arrives just before or just after the start of the second step from here, when the third is composed.
    (prefill,) = engine._prefills.values()
    assert (prefill.may_join - under_way, prefill.joins - under_way) == (3, 4)
    for n in range(1, 4):
        now = began_at + n * seconds
        step(engine, now, "s")
    assert engine.forecast(now).loads[0].prefill_tokens == 0
    assert engine.forecast(now, soonest=True).loads[0].prefill_tokens == 400
    # If it is there, the step is a long one, and what is sent now reaches the engine before the next is composed.
    late, soon = (engine.forecast(now, soonest=soonest).ends_at[0] - now for soonest in (False, True))
    assert late < 1.22 * seconds < 1.37 * seconds < soon
    assert list(engine.intake(now, now)) == [2, 3]
