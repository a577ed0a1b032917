"""``proxy.core.rad``: how many sequences an engine should have, and that nobody waits for nothing."""

from collections.abc import Callable
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.actions import Action, Dispatch
from proxy.core.config import SchedulerConfig
from proxy.core.engine import EngineBelief
from proxy.core.events import Arrived, Ended, EngineUp, TokensProduced
from proxy.core.limits import EngineLimits
from proxy.core.policies import PolicyName, configure
from proxy.core.rad import ModeSwitch, RadConfig, most_sequences, sequences_for, tile_advice
from proxy.core.request import Request
from proxy.core.scheduler import Scheduler
from proxy.core.stepmodel import StepLoad

FIXED, PER_TOKEN, PER_DECODE, PER_KV_TOKEN = 0.01, 7e-5, 7e-5, 1.4e-7
LIMITS = EngineLimits(token_budget=512, max_num_seqs=128, kv_tokens=200_000)


def make_engine(limits: EngineLimits = LIMITS) -> EngineBelief:
    return EngineBelief("e", limits, frozenset(), 0)


def teach(engine: EngineBelief, *, fixed: float = FIXED, steps: int = 4000) -> None:
    """Let it see steps with 5 prompt tokens and 2,500 tokens of context for each decode, at varying loads."""
    for n in range(steps):
        decodes = 10 + n * 7 % 60
        # Prompts come in full steps and not in others; the mean is five tokens a decode all the same.
        prefill = 10 * decodes if n // 3 % 2 else 0
        kv = decodes * (2000 + n * 13 % 1000)
        load = StepLoad(prefill, decodes, kv, 0.0, 1 if prefill else 0)
        engine.model.observe(load, fixed + PER_TOKEN * prefill + PER_DECODE * decodes + PER_KV_TOKEN * kv)


# -- how many --


def test_an_unknown_engine_is_given_all_that_it_can_have() -> None:
    assert sequences_for(make_engine(), 0.97) == 128
    assert most_sequences(make_engine(EngineLimits(max_num_seqs=7))) == 7


def test_what_steps_had_in_them_tells_which_limit_binds_first() -> None:
    engine = make_engine()
    teach(engine)
    assert most_sequences(engine) == pytest.approx(200_000 / 2500, rel=0.02), "KV cache over mean context"
    engine.limits = EngineLimits(token_budget=256, max_num_seqs=128, kv_tokens=None)
    assert most_sequences(engine) == pytest.approx(256 / 6, rel=0.05), "budget over a decode and its five prompt tokens"
    engine.limits = EngineLimits(token_budget=4096, max_num_seqs=16, kv_tokens=None)
    assert most_sequences(engine) == 16


def test_no_more_than_it_takes_and_no_fewer() -> None:
    engine = make_engine()
    teach(engine)
    most = most_sequences(engine)
    per_sequence = 5 * PER_TOKEN + PER_DECODE + 2500 * PER_KV_TOKEN

    def rate(sequences: float) -> float:
        return sequences / (FIXED + per_sequence * sequences)

    enough = sequences_for(engine, 0.97)
    assert enough < 0.95 * most
    assert rate(enough) >= 0.97 * rate(most)
    # The model's error counts on the side of more, but not by much.
    assert rate(enough - 4) < 0.97 * rate(most)
    assert sequences_for(engine, 0.95) < enough


def test_the_more_a_step_costs_by_itself_the_more_sequences_have_to_share_it() -> None:
    counts = []
    for fixed in (0.002, 0.02, 0.2):
        engine = make_engine()
        teach(engine, fixed=fixed)
        counts.append(sequences_for(engine, 0.97))
    assert counts == sorted(set(counts))


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 8192), st.integers(0, 256), st.integers(0, 10**6), st.floats(0, 10)),
        min_size=200,
        max_size=220,
    ),
    st.integers(1, 256),
    st.one_of(st.none(), st.integers(1, 10**6)),
)
def test_whatever_was_seen_there_is_an_answer_within_the_slots(
    steps: list[tuple[int, int, int, float]], slots: int, kv_tokens: int | None
) -> None:
    engine = make_engine(EngineLimits(512, slots, kv_tokens))
    for prefill, decodes, kv, seconds in steps:
        engine.model.observe(StepLoad(prefill, decodes, kv, 0.0, 1), seconds)
    room, full = sequences_for(engine, 0.95), sequences_for(engine, 0.97)
    assert 1 <= room <= full <= ceil(most_sequences(engine)) <= slots


# -- modes --

SLOTS = 10
CONFIG = RadConfig(max_hold_seconds=5.0)


def fill(engine: EngineBelief, count: int) -> None:
    for i in range(engine.outstanding, count):
        engine.release(str(i), 1, 0.0)


def test_a_full_engine_has_no_room_until_enough_have_ended() -> None:
    # Nothing is known of its steps, so it is full with all of its slots, and has room with one fewer.
    engine, modes = make_engine(EngineLimits(max_num_seqs=SLOTS)), ModeSwitch(CONFIG)
    fill(engine, SLOTS - 1)
    assert modes.open([engine], 0.0, 0.0) == [engine]
    fill(engine, SLOTS)
    assert modes.open([engine], 0.0, 0.0) == []
    engine.end("0", 0.0)
    assert modes.open([engine], 0.0, 0.0) == [engine]


def test_room_begins_below_what_is_full() -> None:
    engine, modes = make_engine(), ModeSwitch(CONFIG)
    teach(engine)
    full, room = sequences_for(engine, CONFIG.full_share), sequences_for(engine, CONFIG.room_share)
    assert room < full - 1
    fill(engine, full)
    assert modes.open([engine], 0.0, 0.0) == []
    for i in range(full - room - 1):
        engine.end(str(i), 0.0)
        assert modes.open([engine], 0.0, 0.0) == [], "one below full is not room yet"
    engine.end(str(full - 1), 0.0)
    assert engine.outstanding == room
    assert modes.open([engine], 0.0, 0.0) == [engine]
    fill(engine, full - 1)
    assert modes.open([engine], 0.0, 0.0) == [engine], "and then it is filled up again"


def test_who_has_waited_for_long_does_not_wait_for_room() -> None:
    engine, modes = make_engine(EngineLimits(max_num_seqs=1)), ModeSwitch(CONFIG)
    fill(engine, 1)
    assert modes.open([engine], 1.0, 5.9) == []
    assert modes.due_at(1.0) == 6.0
    assert modes.open([engine], 1.0, 6.0) == [engine]
    assert modes.due_at(1.0) is None, "nothing is due again"


def test_no_engine_is_full_no_time_is_due() -> None:
    modes = ModeSwitch(CONFIG)
    assert modes.open([make_engine()], 0.0, 0.0)
    assert modes.due_at(0.0) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: RadConfig(full_share=1.0),
        lambda: RadConfig(room_share=0.98),
        lambda: RadConfig(room_share=0.0),
        lambda: RadConfig(max_hold_seconds=0.0),
    ],
)
def test_rules_that_make_no_sense_are_refused(make: Callable[[], RadConfig]) -> None:
    with pytest.raises(ValueError, match="shares"):
        make()


# -- in the scheduler --


def rad_scheduler(limits: EngineLimits, max_queue_requests: int = 1000) -> Scheduler:
    base = SchedulerConfig(max_queue_requests=max_queue_requests)
    scheduler = Scheduler(configure(PolicyName.RAD, base, 10.0))
    scheduler.handle(EngineUp("e", limits), 0.0)
    return scheduler


def dispatched(actions: list[Action]) -> list[str]:
    assert all(isinstance(action, Dispatch) for action in actions)
    return [action.request_id for action in actions]


def test_an_idle_engine_takes_the_first_request_at_once() -> None:
    scheduler = rad_scheduler(EngineLimits(token_budget=64, max_num_seqs=1, kv_tokens=100))
    teach(scheduler.engines[0])
    assert dispatched(scheduler.handle(Arrived(Request("long", 5000)), 1.0)) == ["long"]


def test_a_learnt_engine_is_filled_to_what_it_takes_and_in_order_of_arrival() -> None:
    scheduler = rad_scheduler(LIMITS)
    engine = scheduler.engines[0]
    teach(engine)
    sent: list[str] = []
    for n in range(100):  # each of them is a stream before the next comes, so that the gate is open
        for request_id in dispatched(scheduler.handle(Arrived(Request(f"{n:03}", 1 + 100 - n)), 0.0)):
            sent.append(request_id)
            scheduler.handle(TokensProduced(request_id), 0.0)
    assert sent == [f"{n:03}" for n in range(sequences_for(engine, 0.97))]
    assert scheduler.waiting == 100 - len(sent)


def test_nobody_waits_longer_for_room_than_the_bound() -> None:
    scheduler = rad_scheduler(EngineLimits(max_num_seqs=10, kv_tokens=20_000))
    engine = scheduler.engines[0]
    teach(engine)  # contexts of 2,500 tokens: 8 sequences at most
    assert sequences_for(engine, 0.97) < 9
    sent = 0
    for n in range(9):
        for request_id in dispatched(scheduler.handle(Arrived(Request(str(n), 10)), float(n))):
            scheduler.handle(TokensProduced(request_id), float(n))
            sent += 1
    assert sent == sequences_for(engine, 0.97)
    due = scheduler.next_deadline()
    assert due == sent + 10.0
    assert dispatched(scheduler.tick(due)) == [str(sent)]
    later = scheduler.next_deadline()
    assert later is None or later > due


def test_a_full_queue_takes_nobody_whom_a_full_engine_would_leave_there() -> None:
    scheduler = rad_scheduler(EngineLimits(max_num_seqs=10, kv_tokens=20_000), max_queue_requests=0)
    teach(scheduler.engines[0])
    taken = []
    for n in range(10):
        actions = scheduler.handle(Arrived(Request(str(n), 10)), 0.0)
        taken.append(isinstance(actions[0], Dispatch))
        if taken[-1]:
            scheduler.handle(TokensProduced(str(n)), 0.0)
    full = sequences_for(scheduler.engines[0], 0.97)
    assert taken == [True] * full + [False] * (10 - full)
    assert scheduler.waiting == 0


def test_the_end_of_enough_sequences_lets_others_in() -> None:
    scheduler = rad_scheduler(LIMITS)
    engine = scheduler.engines[0]
    teach(engine)
    for n in range(100):
        for request_id in dispatched(scheduler.handle(Arrived(Request(str(n), 1)), 0.0)):
            scheduler.handle(TokensProduced(request_id), 0.0)
    full, room = sequences_for(engine, 0.97), sequences_for(engine, 0.95)
    released: list[str] = []
    for ended in range(full - room):
        assert released == []
        released = dispatched(scheduler.handle(Ended(str(ended)), 1.0))
    assert released == [str(full + n) for n in range(full - room)]


# -- tiles of the GPU --


@pytest.mark.parametrize("budget", [128, 512, 2048, 8192])
def test_no_advice_on_a_multiple_of_the_tile(budget: int) -> None:
    assert tile_advice(budget) is None


def test_advice_names_the_multiples_beside_it() -> None:
    said = tile_advice(2000)
    assert said is not None
    assert said.startswith("token budget 2000 is not a multiple of 128")
    assert "1920 or 2048" in said
    assert "; 128 would waste nothing" in (tile_advice(100) or "")
