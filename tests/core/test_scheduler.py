"""The scheduler's decisions, one situation each. The engine has 512 tokens per step unless the test says otherwise."""

from dataclasses import replace
from typing import Any

import pytest
from builders import ONE_STEP, make_scheduler
from hypothesis import example, given, settings
from hypothesis import strategies as st
from playbook import Play

from proxy.core.actions import Reject
from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
from proxy.core.events import Ended
from proxy.core.ordering import first_come_first_served, shortest_prompt_first
from proxy.core.scheduler import Scheduler

quick = settings(max_examples=100, derandomize=True, database=None, deadline=None)


def one_slot(**fields: Any) -> Play:
    """An engine with a single slot, taken by the stream ``busy``: whatever comes must wait until ``busy`` ends."""
    play = Play(max_num_seqs=1, **fields)
    assert play.arrive("busy", 10) == ["dispatch busy e0"]
    assert play.tokens("busy", at=0.03) == []
    return play


def retry_after(play: Play) -> list[float | None]:
    return [a.retry_after_seconds for a in play.actions if isinstance(a, Reject)]


# -- release --


@pytest.mark.parametrize("prompt_tokens", [0, 1, 512, 100_000])
def test_an_idle_engine_gets_any_request_at_once(prompt_tokens: int) -> None:
    assert Play(kv_tokens=1000).arrive("a", prompt_tokens) == ["dispatch a e0"]


def test_nothing_is_released_beyond_one_step_of_backlog() -> None:
    play = Play()
    assert play.arrive("a", 600) == ["dispatch a e0"]
    assert play.arrive("b", 10) == []
    assert play.tokens("a", at=0.06) == ["dispatch b e0"]


def test_short_prompts_are_released_together_as_long_as_they_fit_into_the_step() -> None:
    play = Play()
    answers = [play.arrive(name, 200) for name in "abcd"]
    assert answers == [["dispatch a e0"], ["dispatch b e0"], ["dispatch c e0"], []]


def test_the_end_of_a_step_releases_what_its_work_made_room_for() -> None:
    play = Play()
    play.arrive("stream", 10)
    play.tokens("stream", at=0.03)
    assert play.arrive("long", 1100, at=0.04) == ["dispatch long e0"]
    assert play.arrive("next", 10, at=0.04) == []
    assert play.tokens("stream", at=0.06) == []  # the long prompt came during this step
    assert play.tokens("stream", at=0.09) == []  # 589 left
    assert play.tokens("stream", at=0.12) == ["dispatch next e0"]  # 78 left


def test_a_token_that_ends_no_step_releases_nothing() -> None:
    play = Play()
    for name in ("x", "y"):
        play.arrive(name, 10)
    for name in ("x", "y"):
        play.tokens(name, at=0.03)
    play.arrive("long", 1500, at=0.04)
    play.arrive("next", 10, at=0.04)
    for now in (0.06, 0.09):
        assert play.tokens("x", at=now) == []
        assert play.tokens("y", at=now) == []
    assert play.tokens("x", at=0.12) == ["dispatch next e0"]
    assert play.tokens("y", at=0.12) == []


def test_an_engine_whose_answers_are_silent_is_not_left_to_run_dry() -> None:
    """An answer that is not streamed tells of no step; the clock has to be assumed."""
    play = Play()
    assert play.arrive("whole", 600) == ["dispatch whole e0"]
    assert play.arrive("next", 600) == []
    answers: list[str] = []
    while not answers:
        deadline = play.scheduler.next_deadline()
        assert deadline is not None
        assert deadline < 0.5
        answers = play.tick(at=deadline)
    assert answers == ["dispatch next e0"]


def test_no_more_requests_are_released_than_the_engine_has_slots() -> None:
    play = Play(max_num_seqs=2)
    assert play.arrive("a", 10) == ["dispatch a e0"]
    assert play.arrive("b", 10) == ["dispatch b e0"]
    assert play.arrive("c", 10) == []
    assert play.end("a", at=0.5) == ["dispatch c e0"]


def test_what_would_not_fit_the_kv_cache_waits_until_something_ends() -> None:
    play = Play(kv_tokens=1000, gate=replace(ONE_STEP, kv_watermark=0.1, kv_growth_tokens=0))
    assert play.arrive("a", 500) == ["dispatch a e0"]
    play.tokens("a", at=0.03)
    assert play.arrive("b", 400, at=0.04) == []
    assert play.arrive("c", 500, at=0.04) == []
    assert play.end("a", at=0.05) == ["dispatch b e0", "dispatch c e0"]


def test_a_head_that_does_not_fit_the_kv_cache_is_not_overtaken_by_what_would() -> None:
    """Otherwise short prompts could starve a long one for ever."""
    play = Play(kv_tokens=1000, ordering=first_come_first_served())
    play.arrive("a", 500)
    play.tokens("a", at=0.03)
    assert play.arrive("long", 500, at=0.04) == []
    assert play.arrive("short", 1, at=0.05) == []
    assert play.end("a", at=0.06) == ["dispatch long e0", "dispatch short e0"]


# -- order --


def test_the_shortest_prompt_is_released_first() -> None:
    play = one_slot()
    for name, prompt_tokens in (("long", 3000), ("short", 10), ("middle", 300)):
        assert play.arrive(name, prompt_tokens, at=0.04) == []
    assert play.end("busy", at=1.0) == ["dispatch short e0"]
    assert play.end("short") == ["dispatch middle e0"]
    assert play.end("middle") == ["dispatch long e0"]


@pytest.mark.parametrize(("wait", "first"), [(29.9, "short"), (30.1, "long")])
def test_a_prompt_is_overtaken_by_a_fresh_one_an_eighth_as_long_for_three_halving_times(
    wait: float, first: str
) -> None:
    play = one_slot(ordering=shortest_prompt_first(10.0))
    play.arrive("long", 800, at=1.0)
    play.arrive("short", 100, at=1.0 + wait)
    assert play.end("busy", at=1.0 + wait) == [f"dispatch {first} e0"]


def test_first_come_first_served_is_just_that() -> None:
    play = one_slot(ordering=first_come_first_served())
    play.arrive("long", 3000, at=0.1)
    play.arrive("short", 1, at=0.2)
    assert play.end("busy", at=1.0) == ["dispatch long e0"]


def test_who_has_waited_for_max_wait_goes_first() -> None:
    play = one_slot(max_wait_seconds=5.0)
    play.arrive("long", 100_000, at=1.0)
    play.arrive("short", 1, at=5.9)
    assert play.end("busy", at=5.99) == ["dispatch short e0"]
    play.arrive("shorter", 1, at=5.995)
    assert play.end("short", at=6.0) == ["dispatch long e0"]


def test_the_wait_counts_from_the_first_byte_of_a_request() -> None:
    play = one_slot()
    play.arrive("prompt", 100, at=10.0)
    play.arrive("slow upload", 100, at=10.1, since=0.1)
    assert play.end("busy", at=11.0) == ["dispatch slow upload e0"]


def test_a_prompt_of_unknown_length_zero_is_ordered_like_one_token() -> None:
    play = one_slot()
    play.arrive("one", 1, at=1.0)
    play.arrive("none", 0, at=1.0)
    assert play.end("busy", at=2.0) == ["dispatch one e0"]


# -- placement --


def test_requests_are_spread_over_idle_engines_in_the_order_of_joining() -> None:
    play = Play(engines=("x", "y"))
    assert play.arrive("a") == ["dispatch a x"]
    assert play.arrive("b") == ["dispatch b y"]


def test_a_request_goes_where_its_estimated_wait_is_least() -> None:
    play = Play(engines=("x", "y"))
    play.arrive("a", 500)
    play.arrive("b", 400)
    assert play.arrive("c", 10) == ["dispatch c y"]


def test_a_request_goes_to_the_engine_that_steps_faster() -> None:
    play = Play(engines=("slow", "fast"))
    play.arrive("a", 10)
    play.arrive("b", 10)
    for n in range(1, 40):
        if n % 5 == 0:
            play.tokens("a", at=n * 0.02)
        play.tokens("b", at=n * 0.02)
    assert play.engine("slow").step_seconds > play.engine("fast").step_seconds
    assert play.arrive("c", 10) == ["dispatch c fast"]


def test_of_equal_engines_the_one_with_fewer_requests_is_taken() -> None:
    play = Play(engines=("x", "y"))
    for name in "abc":
        play.arrive(name, 0)
    assert [play.engine(e).outstanding for e in "xy"] == [2, 1]
    assert play.arrive("d", 0) == ["dispatch d y"]


def test_a_waiting_request_is_bound_to_an_engine_only_when_one_can_begin_it() -> None:
    play = Play(engines=("x", "y"))
    play.arrive("a", 600)
    play.arrive("b", 700)
    assert play.arrive("c", 10) == []
    assert play.tokens("b", at=0.06) == ["dispatch c y"]


def test_a_request_that_is_not_scheduled_goes_to_the_engine_with_the_least_to_do_even_when_all_gates_are_shut() -> None:
    play = Play(engines={"x": ["a"], "y": ["a"], "z": ["b"]}, max_num_seqs=2)
    for name in "123":
        play.arrive(name, 2000, model="a")
    assert [play.engine(e).outstanding for e in "xyz"] == [1, 1, 0]
    assert play.scheduler.place_unscheduled("a") == "x"
    play.end("2")
    assert play.scheduler.place_unscheduled("a") == "x", "the third has taken the place of the second"
    play.down("x")
    assert play.scheduler.place_unscheduled("a") == "y"
    assert play.scheduler.place_unscheduled("") == "z"
    assert play.scheduler.place_unscheduled("c") is None


# -- models --


def test_a_head_without_a_place_does_not_block_another_model() -> None:
    play = Play(engines={"x": ["a"], "y": ["b"]}, max_num_seqs=1)
    assert play.arrive("a1", 10, model="a") == ["dispatch a1 x"]
    assert play.arrive("a2", 1, model="a") == []
    assert play.arrive("b1", 500, model="b") == ["dispatch b1 y"]
    assert play.arrive("b2", 500, model="b") == []
    assert play.end("b1", at=1.0) == ["dispatch b2 y"]
    assert play.end("a1", at=2.0) == ["dispatch a2 x"]


def test_two_models_of_one_engine_are_released_by_one_order() -> None:
    play = Play(engines={"e0": ["a", "b"]}, max_num_seqs=1)
    play.arrive("busy", 10, model="a")
    for name, tokens, model in (("3", 300, "a"), ("1", 100, "b"), ("4", 400, "b"), ("2", 200, "a")):
        play.arrive(name, tokens, model=model)
    order = []
    running = "busy"
    for _ in range(4):
        (line,) = play.end(running)
        running = line.split()[1]
        order.append(running)
    assert order == ["1", "2", "3", "4"]


def test_a_request_without_a_model_is_served_by_any_engine() -> None:
    play = Play(engines={"x": ["a"], "y": ["b"]})
    assert play.arrive("1") == ["dispatch 1 x"]
    assert play.arrive("2") == ["dispatch 2 y"]


def test_a_model_that_no_engine_serves_is_unknown() -> None:
    play = Play(engines={"x": ["a"]})
    assert play.arrive("1", model="b") == ["reject 1 unknown_model"]
    assert retry_after(play) == [None], "a retry does not help"


def test_a_model_whose_engine_is_down_is_not_unknown() -> None:
    play = Play(engines={"x": ["a"], "y": ["b"]})
    play.down("y")
    assert play.arrive("1", model="b") == ["reject 1 no_engine"]
    assert play.arrive("2", model="c") == ["reject 2 unknown_model"]


def test_without_any_engine_there_is_no_engine() -> None:
    play = Play(engines=(), no_engine_retry_seconds=7.0)
    assert play.arrive("1", model="a") == ["reject 1 no_engine"]
    assert retry_after(play) == [7.0]


def test_an_engine_of_unknown_models_gets_requests_for_any() -> None:
    assert Play(engines=("x",)).arrive("1", model="whatever") == ["dispatch 1 x"]


# -- not started --


def test_a_request_that_was_not_started_is_released_again_when_its_engine_reopens() -> None:
    play = Play()
    play.arrive("a")
    assert play.not_started("a", 2.0, at=1.0) == []
    assert play.scheduler.next_deadline() == 3.0
    assert play.tick(at=2.999999) == []
    assert play.tick(at=3.0) == ["dispatch a e0"]


@quick
@given(st.integers(0, 10**9), st.integers(1, 10**7))
def test_the_tick_at_just_the_deadline_reopens_the_engine(now_us: int, back_off_us: int) -> None:
    play = Play(queue_timeout_seconds=1e9)
    play.arrive("a", at=now_us / 1e6)
    play.not_started("a", back_off_us / 1e6)
    deadline = play.scheduler.next_deadline()
    assert deadline is not None
    assert play.tick(at=deadline) == ["dispatch a e0"]


def test_a_request_that_was_not_started_goes_to_another_engine_at_once() -> None:
    play = Play(engines=("x", "y"))
    play.arrive("a")
    assert play.not_started("a", at=0.01) == ["dispatch a y"]


def test_a_request_that_was_not_started_keeps_its_place_in_the_order() -> None:
    play = Play(max_num_seqs=1)
    play.arrive("first", 100)
    play.arrive("second", 100, at=0.1)
    assert play.not_started("first", 1.0, at=0.2) == []
    play.arrive("third", 100, at=0.3)
    assert play.tick(at=1.2) == ["dispatch first e0"]


def test_a_closed_engine_gets_no_new_arrivals_either() -> None:
    play = Play()
    play.arrive("a")
    play.not_started("a", 1.0)
    assert play.arrive("b", 1, at=0.5) == []
    assert play.tick(at=1.0) == ["dispatch b e0", "dispatch a e0"]


def test_of_two_back_offs_the_longer_one_holds() -> None:
    play = Play()
    play.arrive("a")
    play.arrive("b")
    play.not_started("a", 5.0, at=1.0)
    play.not_started("b", 1.0, at=1.5)
    assert play.tick(at=5.999) == []
    assert play.tick(at=6.0) == ["dispatch a e0", "dispatch b e0"]


def test_not_started_leaves_no_trace_on_the_engine() -> None:
    play = Play()
    play.arrive("a", 700)
    play.not_started("a")
    engine = play.engine()
    assert (engine.outstanding, engine.backlog, engine.kv_tokens) == (0, 0, 0)


def test_a_request_that_was_not_started_is_refused_when_no_other_engine_is_up() -> None:
    play = Play()
    play.arrive("a")
    play.down()
    assert play.not_started("a") == ["reject a no_engine"]


# -- limits of the queue --


def test_a_request_that_waited_too_long_is_refused_at_just_its_deadline() -> None:
    play = one_slot(queue_timeout_seconds=20.0)
    play.arrive("a", at=1.0)
    play.arrive("b", at=2.0)
    assert play.scheduler.next_deadline() == 21.0
    assert play.tick(at=20.999) == []
    assert play.tick(at=21.0) == ["reject a queue_timeout"]
    assert play.scheduler.next_deadline() == 22.0


@quick
@given(st.integers(0, 10**9), st.floats(1e-6, 1e4))
@example(now_us=906_104_050, timeout=300.0)
@example(now_us=14_331, timeout=2.62)
def test_the_tick_at_just_the_deadline_always_does_what_is_due(now_us: int, timeout: float) -> None:
    play = one_slot(queue_timeout_seconds=timeout)
    play.arrive("a", at=0.03 + now_us / 1e6)
    deadline = play.scheduler.next_deadline()
    assert deadline is not None
    assert deadline == round(deadline * 1e6) / 1e6, "a clock of whole microseconds can meet it"
    assert play.tick(at=deadline) == ["reject a queue_timeout"]


def test_a_late_timer_refuses_all_that_is_late_oldest_first() -> None:
    play = one_slot(queue_timeout_seconds=20.0)
    for n in range(1, 6):
        play.arrive(str(n), 1000 - n, at=float(n))
    assert play.tick(at=23.5) == [f"reject {n} queue_timeout" for n in (1, 2, 3)]


def test_a_full_queue_refuses_the_newcomer() -> None:
    play = one_slot(max_queue_requests=2)
    play.arrive("a", 1000)
    play.arrive("b", 1000)
    assert play.arrive("c", 1) == ["reject c queue_full"]
    assert play.end("busy") == ["dispatch a e0"]
    assert play.arrive("c", 1) == []


def test_a_queue_full_of_bytes_refuses_the_newcomer() -> None:
    play = one_slot(max_queue_bytes=100)
    assert play.arrive("a", size_bytes=60) == []
    assert play.arrive("b", size_bytes=41) == ["reject b queue_full"]
    assert play.arrive("c", size_bytes=40) == []


def test_a_full_queue_does_not_matter_to_a_request_that_starts_at_once() -> None:
    play = Play(max_queue_requests=0, max_queue_bytes=0)
    assert play.arrive("a", 600, size_bytes=10**9) == ["dispatch a e0"]
    assert play.arrive("b", 1) == ["reject b queue_full"]
    play.tokens("a", at=0.06)
    assert play.arrive("c", 1, size_bytes=10**9, at=0.07) == ["dispatch c e0"]
    assert play.scheduler.waiting_bytes == 0


def test_a_full_queue_refuses_even_what_would_fit_where_its_head_does_not() -> None:
    """It would have to wait behind that head, so the queue would grow."""
    play = Play(kv_tokens=1000, max_queue_requests=1, ordering=first_come_first_served())
    play.arrive("a", 500)
    play.tokens("a", at=0.03)
    assert play.arrive("long", 500, at=0.04) == []
    assert play.arrive("short", 1, at=0.05) == ["reject short queue_full"]


def test_a_request_that_was_not_started_comes_back_even_to_a_full_queue() -> None:
    play = Play(max_queue_requests=0)
    play.arrive("a")
    assert play.not_started("a", 1.0) == []
    assert play.tick(at=1.0) == ["dispatch a e0"]


def test_the_retry_hint_is_at_least_the_time_in_which_the_queue_is_prefilled() -> None:
    play = one_slot(max_queue_requests=1)
    play.arrive("long", 100_000)
    play.arrive("more", 1)
    engine = play.engine()
    seconds = 100_000 / engine.prefill_budget * engine.step_seconds
    (hint,) = retry_after(play)
    assert hint is not None
    assert seconds <= hint <= 2 * seconds, "at least that, and spread"


@quick
@given(st.integers(0, 10**10), st.integers(1, 10**5), st.booleans())
def test_the_retry_hint_of_a_full_queue_lies_between_a_second_and_two_minutes(
    waiting: int, budget: int, timeout: bool
) -> None:
    play = one_slot(max_queue_requests=1, token_budget=budget)
    play.arrive("a", waiting)
    if timeout:
        play.tick(at=400.0)
    else:
        play.arrive("b")
    (hint,) = retry_after(play)
    assert hint is not None
    assert 1 <= hint <= 120


# -- endings --


def test_a_request_that_leaves_the_queue_makes_room_and_is_never_released() -> None:
    play = one_slot(max_queue_requests=1)
    play.arrive("a", size_bytes=50)
    assert play.end("a") == []
    assert (play.scheduler.waiting, play.scheduler.waiting_bytes, play.scheduler.waiting_tokens) == (0, 0, 0)
    assert play.scheduler.next_deadline() is None
    assert play.arrive("b") == []
    assert play.end("busy") == ["dispatch b e0"]


def test_a_request_that_ends_during_its_prefill_frees_its_backlog() -> None:
    play = Play()
    play.arrive("a", 5000)
    play.arrive("b", 600)
    assert play.end("a", at=0.01) == ["dispatch b e0"]
    assert play.engine().backlog == 600


def test_what_is_told_of_unknown_requests_is_ignored() -> None:
    play = one_slot()
    play.arrive("waits")
    for name in ("nobody", "waits"):
        assert play.tokens(name) == []
        assert play.not_started(name) == []
    assert play.end("nobody") == []
    assert play.down("nowhere") == []
    assert (play.scheduler.waiting, play.scheduler.dispatched) == (1, 1)
    assert play.engine().closed_until is None


def test_events_after_the_end_are_ignored() -> None:
    play = Play()
    play.arrive("a")
    play.end("a")
    assert play.tokens("a") == []
    assert play.not_started("a") == []
    assert play.end("a") == []
    assert play.engine().outstanding == 0


def test_an_id_in_use_cannot_arrive_again_but_one_that_is_over_can() -> None:
    play = one_slot()
    play.arrive("a")
    for name in ("a", "busy"):
        with pytest.raises(ValueError, match="in use"):
            play.arrive(name)
    assert (play.scheduler.waiting, play.scheduler.dispatched) == (1, 1)
    play.end("a")
    assert play.arrive("a") == []


def test_a_refused_request_is_forgotten() -> None:
    play = one_slot(max_queue_requests=0)
    assert play.arrive("a") == ["reject a queue_full"]
    assert play.end("a") == []
    assert play.arrive("a") == ["reject a queue_full"]


# -- engines come and go --


def test_when_the_last_engine_goes_down_whatever_waits_is_refused() -> None:
    play = one_slot(no_engine_retry_seconds=3.0)
    play.arrive("b", 20)
    play.arrive("a", 30, at=1.0)
    assert play.down() == ["reject b no_engine", "reject a no_engine"]
    assert retry_after(play) == [3.0, 3.0]
    assert play.arrive("c") == ["reject c no_engine"]


def test_streams_of_an_engine_that_went_down_end_by_their_own_events() -> None:
    play = one_slot()
    play.down()
    assert play.tokens("busy", at=1.0) == []
    assert play.scheduler.dispatched == 1
    assert play.end("busy") == []
    assert play.scheduler.dispatched == 0


def test_while_another_engine_is_up_requests_wait_for_it() -> None:
    play = Play(engines=("x", "y"), max_num_seqs=1)
    play.arrive("a")
    play.arrive("b")
    play.arrive("c")
    assert play.down("x") == []
    assert play.end("a", at=1.0) == [], "the engine that is down gets nothing new"
    assert play.end("b", at=2.0) == ["dispatch c y"]


def test_only_the_models_that_lost_their_last_engine_are_refused() -> None:
    play = Play(engines={"x": ["a"], "y": ["b"]}, max_num_seqs=1)
    for name, model in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
        play.arrive(name, model=model)
    assert play.down("x") == ["reject a2 no_engine"]
    assert play.end("b1") == ["dispatch b2 y"]


def test_an_engine_that_comes_back_still_has_its_streams() -> None:
    play = one_slot()
    play.down()
    assert play.up(max_num_seqs=1) == []
    assert play.arrive("a") == []
    assert play.end("busy") == ["dispatch a e0"]


def test_a_new_engine_gets_what_waits() -> None:
    play = one_slot()
    play.arrive("a")
    assert play.up("e1") == ["dispatch a e1"]


def test_raised_limits_release_what_waits() -> None:
    play = one_slot()
    play.arrive("a")
    assert play.up("e0", max_num_seqs=2) == ["dispatch a e0"]


def test_limits_that_shrink_take_nothing_back() -> None:
    play = Play()
    for name in "abc":
        play.arrive(name, 10)
    assert play.up("e0", max_num_seqs=1) == []
    assert play.arrive("d", 10) == []
    assert play.end("a") == []
    assert play.end("b") == []
    assert play.end("c") == ["dispatch d e0"]


# -- drain --


def test_a_drain_refuses_what_waits_and_what_comes_and_lets_the_rest_end() -> None:
    play = one_slot(no_engine_retry_seconds=4.0)
    play.arrive("a")
    assert play.drain() == ["reject a draining"]
    assert retry_after(play) == [4.0]
    assert play.arrive("b") == ["reject b draining"]
    assert play.tokens("busy", at=1.0) == []
    assert play.end("busy") == []
    assert play.arrive("c") == ["reject c draining"], "even though the engine is idle"


def test_a_drain_refuses_the_waiting_of_every_model() -> None:
    play = Play(engines={"x": ["a"], "y": ["b"]}, max_num_seqs=1)
    for name, model in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
        play.arrive(name, model=model)
    assert sorted(play.drain()) == ["reject a2 draining", "reject b2 draining"]
    assert play.drain() == []


def test_a_request_that_was_not_started_is_refused_during_a_drain() -> None:
    play = Play()
    play.arrive("a")
    play.drain()
    assert play.not_started("a") == ["reject a draining"]


# -- the scheduler itself --


def test_without_anything_waiting_there_is_no_deadline() -> None:
    play = Play()
    assert play.scheduler.next_deadline() is None
    play.arrive("a", 10_000)
    assert play.scheduler.next_deadline() is None
    assert play.tick(at=1000.0) == []


def test_a_scheduler_is_usable_without_a_config_and_shows_itself() -> None:
    scheduler = Scheduler()
    assert scheduler.config == SchedulerConfig() or scheduler.config.max_wait_seconds == 60.0
    assert repr(scheduler) == "<Scheduler 0 waiting, 0 dispatched, 0 engines>"
    assert "e0" in repr(make_scheduler().engines[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"max_wait_seconds": 0.0},
        {"queue_timeout_seconds": -1.0},
        {"no_engine_retry_seconds": 0.0},
        {"max_queue_requests": -1},
        {"max_queue_bytes": -1},
    ],
)
def test_rules_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        SchedulerConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["queue_timeout_seconds", "max_wait_seconds", "no_engine_retry_seconds"])
def test_durations_are_finite_numbers(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        SchedulerConfig(**{name: seconds})  # type: ignore[arg-type]


# -- time that nobody tells of --


def test_a_tick_at_the_deadline_is_not_too_early() -> None:
    play = one_slot(queue_timeout_seconds=300.0)
    play.arrive("a", at=906.13405)  # the sum with the timeout is no number of whole microseconds
    deadline = play.scheduler.next_deadline()
    assert deadline == pytest.approx(1206.13405)
    assert play.tick(at=deadline) == ["reject a queue_timeout"]


def test_a_prompt_released_after_a_silence_is_not_taken_for_done_at_once() -> None:
    play = Play()
    play.arrive("whole", 500)  # its answer is not streamed: no token ever
    play.tick(at=0.03)
    play.tick(at=10.0)
    assert play.arrive("long", 8000, at=10.0) == ["dispatch long e0"]
    assert play.arrive("next", 8000, at=10.0) == []
    deadline = play.scheduler.next_deadline()
    assert deadline is not None
    assert deadline > 10.0
    assert play.tick(at=10.001) == []


def test_a_queue_of_nothing_does_not_refuse_what_starts_at_once_after_a_silence() -> None:
    play = Play(max_queue_requests=0)
    play.arrive("whole", 600)
    assert play.arrive("next", 600, at=10.0) == ["dispatch next e0"]


# -- queues are by the engines that serve a request --


def test_a_head_without_a_place_does_not_block_a_request_without_model() -> None:
    play = Play(engines={"x": ["a"], "y": []}, max_num_seqs=1)
    play.arrive("b1", 10, model="b")
    play.arrive("b2", 10, model="b")
    assert play.arrive("any", 100) == ["dispatch any x"]


def test_waiting_for_an_unlisted_model_is_refused_when_its_only_engine_goes_down() -> None:
    play = Play(engines={"x": ["a"], "y": []}, max_num_seqs=1)
    play.arrive("b1", 10, model="b")
    play.arrive("b2", 10, model="b")
    assert play.down("y") == ["reject b2 no_engine"]


def test_models_learnt_after_the_arrival_leave_no_engine_idle() -> None:
    play = Play(engines=["x", "y"], max_num_seqs=1)
    for name in "123":
        play.arrive(name, 10, model="a")
    play.arrive("4", 100, model="b")
    play.up("x", models=("a",), max_num_seqs=1)
    play.up("y", models=("b",), max_num_seqs=1)
    assert play.end("2") == ["dispatch 4 y"]


def test_what_nobody_serves_any_more_is_refused() -> None:
    play = Play(engines=["x"], max_num_seqs=1)
    play.arrive("1", 10, model="a")
    play.arrive("2", 10, model="b")
    play.arrive("3", 1000, model="a")
    assert play.up("x", models=("a",), max_num_seqs=1) == ["reject 2 unknown_model"]
    assert play.end("1") == ["dispatch 3 x"]


def test_a_queue_full_of_one_model_does_not_refuse_what_another_models_idle_engine_starts() -> None:
    play = Play(engines={"x": ["a"], "y": ["b"]}, max_num_seqs=1, max_queue_requests=1)
    play.arrive("a1", model="a")
    play.arrive("a2", model="a")
    assert play.arrive("b1", model="b") == ["dispatch b1 y"]


def test_the_longest_allowed_wait_holds_between_queues() -> None:
    play = Play(engines={"e0": ["a", "b"], "e1": ["a"]}, max_num_seqs=1, max_wait_seconds=5.0)
    for name in ("busy", "other"):
        play.arrive(name, 10, model="a")
    play.arrive("old", 100_000, model="a", at=1.0)
    play.arrive("fresh", 1, model="b", at=9.0)
    assert play.end("busy", at=9.0) == ["dispatch old e0"]


def test_a_long_prompt_is_not_starved_of_kv_cache_by_another_queues_short_ones() -> None:
    gate = GateConfig(kv_growth_tokens=0, kv_watermark=0.0)
    play = Play(engines={"e0": ["a", "b"], "e1": ["a"]}, kv_tokens=1000, max_wait_seconds=5.0, gate=gate)
    play.arrive("s0", 300, model="b")
    assert play.arrive("other", 900, model="a") == ["dispatch other e1"]
    play.tokens("s0", at=0.03)
    assert play.arrive("long", 800, model="a", at=0.1) == []
    released: list[str] = []
    for n in range(1, 12):
        play.arrive(f"s{n}", 300, model="b", at=0.1 + n)
        play.tokens(f"s{n}", at=0.1 + n)
        released += play.end(f"s{n - 1}", at=0.1 + n)
    assert "dispatch long e0" in released


@pytest.mark.parametrize(("kv_tokens", "most"), [(5000, 5000), (None, 1 << 20)])
def test_an_answer_longer_than_an_engine_can_hold_is_not_believed(kv_tokens: int | None, most: int) -> None:
    """Else one wrong figure would take a tenant's share away for hours."""
    play = Play(kv_tokens=kv_tokens)
    play.arrive("a", 100, tenant="t")
    play.handle(Ended("a", 2**31 - 1), 1.0)
    ((_, shares),) = play.scheduler.ledger.backlog.shares()
    (account,) = shares.accounts(1.0)
    assert account.expected_output_tokens == most
