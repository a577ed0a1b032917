"""Prompts in tiles: what is sent when, how large it is, and what becomes of it.

The engine has 8192 tokens per step, so it is the deadline of a strict stream that bounds a tile, not the engine.
"""

import random
from itertools import pairwise
from math import ceil, sqrt
from typing import Any

import pytest
from builders import make_engine, make_request
from invariants import check_engine
from playbook import Play

from proxy.core.admission import GateConfig
from proxy.core.engine import EngineBelief
from proxy.core.ordering import first_come_first_served
from proxy.core.request import RELAXED, STRICT, RequestClass
from proxy.core.stepmodel import OnlineStepModel, StepCoefficients, StepLoad
from proxy.core.tiles import TileConfig, budget_advice, next_piece, room

GATE = GateConfig()
SMALLEST = TileConfig(margin=0.999)
"""Every tile is just ``smallest_tokens``, 128: nothing more may be added to a step."""


def trained() -> OnlineStepModel:
    """What an engine's steps take, learnt from a thousand of them without noise."""
    rng = random.Random(3)
    model = OnlineStepModel()
    for _ in range(1000):
        prefills = rng.randrange(4)
        tokens = rng.randrange(64, 2000) if prefills else 0
        decodes = rng.randrange(1, 128)
        load = StepLoad(tokens, decodes, decodes * rng.randrange(100, 3000), tokens * rng.randrange(4000), prefills)
        seconds = 0.018 + 8e-5 * load.prefill_tokens + 5e-5 * load.decodes + 1.5e-7 * load.kv_tokens
        model.observe(load, seconds + 3e-9 * load.attention + 5e-4 * load.prefills)
    return model


def stage(tiles: TileConfig | None = None, *, streaming: RequestClass = STRICT, **fields: Any) -> Play:
    """An engine that caches prefixes, with one stream, ``s``, whose first token came at 0.03."""
    tiles = tiles or TileConfig()
    play = Play(**{"tiles": tiles, "token_budget": 8192, "caches_prefixes": True, "gate": GATE, **fields})
    assert play.arrive("s", 16, request_class=streaming) == ["dispatch s e0"]
    assert play.tokens("s", at=0.03) == []
    play.engine().model = trained()
    return play


def cut(answers: list[str]) -> tuple[str, int]:
    """The request and the end of the one slice that was sent."""
    (answer,) = answers
    kind, request_id, _, tokens = answer.split()
    assert kind == "slice"
    return request_id, int(tokens)


def run_out(play: Play, name: str, sent: int, *, steps: int = 200) -> list[int]:
    """Let step after step end until the prompt ``name`` has been sent whole; the ends of its slices."""
    ends = [sent]
    for n in range(1, steps):
        at = max(0.05 + n * 0.08, play.engine().forecast(play.now).ends_at[0])
        if n > 1:  # it was taken in by the step that ends now
            assert play.slice_ended(name, ends[n - 2], at=at) == []
        answers = play.tokens("s", at=at)
        if answers == [f"dispatch {name} e0"]:
            return ends
        ends.append(cut(answers)[1])
    raise AssertionError("it never ends")


# -- one tile per step --


def test_the_next_tile_is_not_sent_before_the_step_has_ended() -> None:
    play = stage()
    _, first = cut(play.arrive("long", 5000, sliceable=True, at=0.04))
    assert play.tick(at=0.045) == []
    assert play.arrive("other", 9000, sliceable=True, at=0.05) == []
    name, second = cut(play.tokens("s", at=0.06))
    assert name == "long"
    assert second > first
    assert play.slice_ended("long", first) == []


def test_two_tokens_of_one_step_send_one_tile() -> None:
    play = stage()
    play.arrive("t", 16, request_class=STRICT, at=0.031)
    play.tokens("s", at=0.06)
    play.tokens("t", at=0.06)
    sent = [cut(play.arrive("long", 9000, sliceable=True, at=0.07))]
    for n in range(1, 6):
        now = 0.07 + n * 0.1
        sent.append(cut(play.tokens("s", at=now) + play.tokens("t")))
        if n > 1:
            assert play.slice_ended(*sent[n - 2]) == []


def test_a_tile_holds_the_ends_of_short_prompts_and_the_beginning_of_a_longer_one() -> None:
    play = stage()
    cut(play.arrive("first", 50_000, sliceable=True, at=0.041))
    for name, tokens in (("a", 60), ("b", 70), ("c", 4000)):
        assert play.arrive(name, tokens, sliceable=True) == []
    answers = play.tokens("s", at=0.08)
    assert answers[:2] == ["dispatch a e0", "dispatch b e0"]
    assert answers[2].startswith("slice c e0 ")
    assert len(answers) == 3


def test_who_comes_within_a_step_gets_what_is_left_of_the_tile() -> None:
    play = stage()
    engine = play.engine()
    assert play.arrive("a", 200, sliceable=True, at=0.04) == ["dispatch a e0"]
    left = room(engine, 0, 0.041, TileConfig(), line_seconds=1.0).most
    assert 128 < left < 8192
    name, tokens = cut(play.arrive("long", 16 * left, sliceable=True, at=0.041))
    assert (name, tokens) == ("long", left // 16 * 16)
    assert play.arrive("late", 3000, sliceable=True) == []


def test_what_is_left_may_be_too_little_for_a_slice() -> None:
    play = stage(SMALLEST)
    assert play.arrive("a", 100, sliceable=True, at=0.04) == ["dispatch a e0"]
    assert play.arrive("long", 5000, sliceable=True, at=0.045) == []


def test_a_step_without_prompt_tokens_gets_the_smallest_tile_even_if_that_breaks_a_deadline() -> None:
    play = stage(streaming=RequestClass("hasty", tbt_seconds=0.001))
    assert cut(play.arrive("long", 5000, sliceable=True, at=0.04)) == ("long", 128)
    assert cut(play.tokens("s", at=0.06)) == ("long", 256)


def test_a_step_gets_one_piece_of_a_prompt_even_if_there_is_room_for_more_of_it() -> None:
    play = stage()
    assert play.arrive("r", 16, request_class=RELAXED, at=0.031) == ["dispatch r e0"]
    play.tokens("s", at=0.06)
    play.tokens("r", at=0.06)
    _, end = cut(play.arrive("long", 3000, sliceable=True, at=0.07))
    assert play.end("s") == [], "the engine would not find the piece before in its cache yet"
    assert room(play.engine(), end, play.now, TileConfig()).most >= 3000 - end
    assert play.tick(at=play.now + 0.005) == []
    assert play.arrive("short", 50) == ["dispatch short e0"], "others may have the room"
    assert play.tokens("r", at=0.16) == ["dispatch long e0"]


def test_a_prompt_released_just_before_a_steps_end_counts_for_the_step_after() -> None:
    late, early = stage(), stage()
    for play, at in ((late, 0.0580), (early, 0.0500)):
        cut(play.arrive("long", 5000, sliceable=True, at=at))
    assert late.tokens("s", at=0.06) == [], "the tile was still on its way when the step began"
    assert early.tokens("s", at=0.06) != []
    assert late.tokens("s", at=0.12) != []


# -- at the last moment --


def patient_stage(**fields: Any) -> tuple[Play, float]:
    """A stage on which time does not jump to when a held slice goes, and when that is for one that comes at 0.032."""
    play = stage(**fields)
    play.is_hasty = False
    last_call = play.engine().last_call()
    assert 0.032 < last_call < 0.048, "the step of 18 ms began at 0.03, and some time is needed on the way"
    return play, last_call


def test_a_slice_goes_at_the_last_moment_at_which_it_reaches_the_next_step() -> None:
    play, last_call = patient_stage()
    assert play.arrive("long", 5000, sliceable=True, at=0.032) == []
    assert play.scheduler.next_deadline() == last_call
    assert play.tick(at=last_call - 1e-6) == []
    sent = play.tick(at=last_call)
    assert cut(sent)[0] == "long"
    assert play.engine().intake(last_call, last_call) == play.engine().intake(0.032, 0.032), (
        "no step later than at once"
    )
    assert (play.scheduler.next_deadline() or 0.0) > last_call


def test_a_held_slice_that_has_missed_its_step_goes_at_once() -> None:
    """Or steps that keep ending sooner than the model says would go without prompts for ever."""
    play, last_call = patient_stage()
    assert play.arrive("long", 5000, sliceable=True, at=0.032) == []
    too_early = last_call - 0.004
    assert cut(play.tokens("s", at=too_early))[0] == "long"


def test_who_comes_while_a_slice_is_held_and_is_shorter_goes_first() -> None:
    play, last_call = patient_stage()
    assert play.arrive("long", 50_000, sliceable=True, at=0.032) == []
    assert play.arrive("short", 300, at=0.033) == ["dispatch short e0"]
    assert play.arrive("medium", 20_000, sliceable=True, at=0.034) == []
    assert cut(play.tick(at=last_call))[0] == "medium"


def test_what_goes_whole_is_not_held() -> None:
    play, _ = patient_stage()
    assert play.arrive("short", 300, sliceable=True, at=0.032) == ["dispatch short e0"]
    play, _ = patient_stage(caches_prefixes=False)
    assert play.arrive("long", 5000, sliceable=True, at=0.032) == ["dispatch long e0"]


def test_a_step_that_lasts_for_less_than_the_way_there_holds_nothing_back() -> None:
    play = stage(gate=GateConfig(feedback_seconds=0.02))
    play.is_hasty = False
    assert cut(play.arrive("long", 5000, sliceable=True, at=0.031 + 0.018))[0] == "long"


@pytest.mark.parametrize("fields", [{"may_wait": False}, {"max_queue_requests": 0}])
def test_who_may_not_be_in_the_queue_is_not_held_in_it(fields: dict[str, Any]) -> None:
    play, _ = patient_stage(**{k: v for k, v in fields.items() if k != "may_wait"})
    of_request = {k: v for k, v in fields.items() if k == "may_wait"}
    assert cut(play.arrive("long", 5000, sliceable=True, at=0.032, **of_request))[0] == "long"


def test_nothing_is_due_for_a_held_slice_whose_client_has_left() -> None:
    play, last_call = patient_stage()
    assert play.arrive("long", 5000, sliceable=True, at=0.032) == []
    assert play.end("long", at=0.034) == []
    assert play.scheduler.next_deadline() is None
    play.engine().closed_until = 10.0
    assert play.arrive("next", 5000, sliceable=True, at=last_call) == []
    assert play.tick() == []
    assert (play.scheduler.next_deadline() or 0.0) > last_call, "an engine that takes nothing now is not asked again"


def test_a_token_that_ends_a_step_tells_when_the_next_slice_is_due() -> None:
    """It comes by a way of its own, once per token, after which a shell looks for deadlines only if it is told to."""
    play, last_call = patient_stage()
    play.arrive("long", 5000, sliceable=True, at=0.032)
    play.tick(at=last_call)
    scheduler = play.scheduler
    assert scheduler.on_tokens("s", 1, 0.05) == []
    assert (scheduler.next_deadline() or 0.0) == play.engine().slice_at
    assert scheduler.on_tokens("nobody", 1, 0.05) is None


# -- how large it is --


def step_with(engine: EngineBelief, tokens: int, offset: int) -> float:
    """How long the next step is predicted to take if ``tokens`` of one more prompt are in it."""
    load = engine.forecast(0.05).loads[1]
    load = load._replace(
        prefill_tokens=load.prefill_tokens + tokens,
        attention=load.attention + tokens * (offset + tokens / 2),
        prefills=load.prefills + 1,
        decodes=engine.decodes,
        kv_tokens=engine._stream_context,
    )
    return engine.model.predict(load)


@pytest.mark.parametrize("tbt_seconds", [0.05, 0.08, 0.1, 0.3])
@pytest.mark.parametrize("offset", [0, 512, 16_000])
def test_a_tile_keeps_the_deadline_of_a_stream_by_the_step_model(tbt_seconds: float, offset: int) -> None:
    engine = make_engine(token_budget=8192, caches_prefixes=True)
    engine.model = trained()
    engine.release("s", 1000, 0.0, tbt_seconds)
    engine.release("relaxed", 1000, 0.0, 5.0)
    for name in ("s", "relaxed"):
        engine.on_tokens(name, 1, 0.05)
    tokens = room(engine, offset, 0.051, TileConfig()).most
    assert tokens > 128
    assert step_with(engine, tokens, offset) <= tbt_seconds
    assert step_with(engine, tokens + 200, offset) > tbt_seconds * 0.95


def test_a_tile_keeps_the_deadline_in_99_of_100_steps() -> None:
    """Three steps in a hundred take a fifth longer: a stream that lives for hundreds of steps meets many of those."""
    engine = make_engine(token_budget=8192, caches_prefixes=True)
    engine.model, rng = trained(), random.Random(5)
    for n in range(800):
        tokens = rng.randrange(100, 1000)
        load = StepLoad(tokens, 10, 10_000, tokens * tokens / 2, 1)
        engine.model.observe(load, engine.model.predict(load) * (1.2 if n % 33 == 0 else 1.0))
    assert engine.model.prompt_errors.p95 < 0.02
    assert engine.model.prompt_errors.p99 == pytest.approx(0.2, abs=0.02)
    engine.release("s", 1000, 0.0, 0.1)
    engine.on_tokens("s", 1, 0.05)
    tokens = room(engine, 0, 0.051, TileConfig()).most
    assert step_with(engine, tokens, 0) * 1.18 <= 0.1
    assert step_with(engine, tokens + 50, 0) * 1.22 > 0.095


def test_a_tile_keeps_the_deadline_of_a_prompt_that_is_about_to_stream() -> None:
    engine = make_engine(token_budget=8192, caches_prefixes=True)
    engine.model = trained()
    engine.release("s", 1000, 0.0, 0.5)
    engine.on_tokens("s", 1, 0.03)
    without = room(engine, 0, 0.031, TileConfig()).most
    engine.release("t", 50, 0.03, 0.1)
    engine.on_tokens("s", 1, 0.06)
    assert engine.untaken() == 0
    assert engine.strictest_tbt_seconds == 0.1
    tokens = room(engine, 0, 0.061, TileConfig()).most
    assert tokens < without
    assert step_with(engine, tokens, 0) <= 0.1
    engine.end("t", 0.07)
    assert engine.strictest_tbt_seconds == 0.5


def test_the_more_a_step_holds_the_less_is_added() -> None:
    engine = make_engine(token_budget=8192, caches_prefixes=True)
    engine.model = trained()
    engine.release("s", 1000, 0.0, 0.1)
    engine.on_tokens("s", 1, 0.03)
    rooms = []
    for n in range(6):
        rooms.append(room(engine, 0, 0.031, TileConfig()).most)
        engine.release(f"p{n}", 100, 0.03)
    assert all(a - b >= 100 for a, b in pairwise(rooms)), rooms


def predicted_cost(engine: EngineBelief, tile_seconds: float, line: float, per_second: float) -> float:
    """What a tile of that length costs those in line and those who come during it, for each second of work in it."""
    fixed = engine.model.predict(StepLoad(0, 1, 1001, prefills=1))
    return (line * fixed + per_second * tile_seconds**2 / 2) / (tile_seconds - fixed)


@pytest.mark.parametrize("line", [1, 3, 10])
@pytest.mark.parametrize("per_second", [0.5, 2, 10])
def test_a_tile_is_as_long_as_costs_all_others_least(line: float, per_second: float) -> None:
    engine = make_engine(token_budget=100_000, caches_prefixes=True)
    engine.model = trained()
    engine.release("s", 1000, 0.0, 100.0)
    engine.on_tokens("s", 1, 0.03)
    tokens = room(engine, 0, 0.031, TileConfig(), line_seconds=line / per_second).paying
    shorter, best, longer = (
        predicted_cost(engine, step_with(engine, int(share * tokens), 0), line, per_second) for share in (0.9, 1, 1.1)
    )
    assert best < min(shorter, longer)


@pytest.mark.parametrize("lots", [0.3, 1.0, 1.35, 1.5, 2.0, 2.4, 2.5, 3.4, 3.6, 7.3])
def test_a_prompt_is_cut_into_as_many_even_pieces_as_cost_all_least(lots: float) -> None:
    engine = make_engine(token_budget=100_000, caches_prefixes=True)
    engine.model = OnlineStepModel(StepCoefficients(0.02, 1e-4, 0.0, 0.0, 0.0, 0.0))
    engine.release("s", 1000, 0.0, 100.0)
    engine.on_tokens("s", 1, 0.03)
    fixed = 0.02
    pays = sqrt(fixed * fixed + 2 * fixed * 1.0)

    def cost(pieces: int) -> float:
        return pieces * (fixed + (fixed + lots * pays / pieces) ** 2 / 2)

    request = make_request("long", round(lots * pays / 1e-4))
    piece = next_piece(engine, request, 0.031, TileConfig(), GATE, sliceable=True, line_seconds=1.0)
    assert ceil(request.prompt_tokens / piece) == min(range(1, 20), key=cost)


def test_the_engines_own_budget_bounds_a_tile() -> None:
    play = stage(token_budget=256, streaming=RequestClass("easy", tbt_seconds=5.0))
    assert cut(play.arrive("long", 5000, sliceable=True, at=0.04)) == ("long", 255 // 16 * 16)


@pytest.mark.parametrize("block_tokens", [1, 16, 32, 64, 128])
def test_prefixes_end_on_block_boundaries_and_grow_by_the_smallest_tile_or_more(block_tokens: int) -> None:
    play = stage(block_tokens=block_tokens)
    ends = run_out(play, "long", cut(play.arrive("long", 20_001, sliceable=True, at=0.04))[1])
    assert len(ends) > 5
    assert all(end % block_tokens == 0 for end in ends)
    assert all(b - a >= 128 for a, b in pairwise([0, *ends]))
    assert ends[-1] < 20_001


@pytest.mark.parametrize("prompt_tokens", [300, 5_000, 20_000, 131_072])
def test_the_slices_of_a_prompt_are_together_at_most_half_as_many_times_as_long_as_it_as_they_may_be_many(
    prompt_tokens: int,
) -> None:
    """However little the deadline has room for: here it has none for anything."""
    play = stage(streaming=RequestClass("hasty", tbt_seconds=0.001))
    ends = run_out(play, "long", cut(play.arrive("long", prompt_tokens, sliceable=True, at=0.04))[1])
    assert len(ends) <= TileConfig().most_slices
    assert sum(ends) <= TileConfig().most_slices / 2 * prompt_tokens


@pytest.mark.parametrize("block_tokens", [48, 100, 528])
def test_blocks_that_the_smallest_tile_is_no_multiple_of_do_not_stop_the_work(block_tokens: int) -> None:
    smallest = -(-128 // block_tokens) * block_tokens
    play = stage(SMALLEST, block_tokens=block_tokens)
    ends = run_out(play, "long", cut(play.arrive("long", 5000, sliceable=True, at=0.04))[1])
    assert ends == [*range(smallest, 5000 - smallest, smallest)] or ends == [*range(smallest, 5000, smallest)]


def test_slices_shrink_as_the_tokens_before_them_become_more() -> None:
    play = stage()
    ends = run_out(play, "long", cut(play.arrive("long", 12_000, sliceable=True, at=0.04))[1])
    sizes = [b - a for a, b in pairwise([0, *ends])]
    assert sizes[0] > sizes[len(sizes) // 2] > sizes[-1]


# -- whole prompts --


def test_an_idle_engine_gets_a_prompt_whole() -> None:
    play = Play(tiles=TileConfig(), token_budget=512, caches_prefixes=True)
    assert play.arrive("long", 50_000, sliceable=True, request_class=STRICT) == ["dispatch long e0"]


def test_without_a_deadline_in_flight_a_prompt_goes_whole() -> None:
    play = stage(streaming=RequestClass("any"))
    assert play.arrive("long", 50_000, sliceable=True, at=0.04) == ["dispatch long e0"]
    assert play.arrive("next", 50_000, sliceable=True, at=0.041) == [], "the next step is full already"


def test_a_prompt_that_fits_the_tile_goes_whole() -> None:
    assert stage().arrive("short", 130, sliceable=True, at=0.04) == ["dispatch short e0"]


@pytest.mark.parametrize(("sliceable", "caches_prefixes"), [(False, True), (True, False), (False, False)])
def test_what_cannot_be_sliced_goes_whole_into_a_step_without_other_prompts(
    sliceable: bool, caches_prefixes: bool
) -> None:
    play = stage(caches_prefixes=caches_prefixes)
    assert play.arrive("short", 50, at=0.04) == ["dispatch short e0"]
    assert play.arrive("long", 5000, sliceable=sliceable, at=0.041) == []
    assert play.tokens("s", at=0.08) == ["dispatch long e0"]


def test_without_tiles_nothing_is_ever_sliced() -> None:
    play = stage(tiles=None)
    play.scheduler.config = type(play.scheduler.config)(gate=GATE)
    assert play.arrive("long", 50_000, sliceable=True, at=0.04) == ["dispatch long e0"]


# -- the order --


def test_a_short_prompt_overtakes_a_long_one_half_way() -> None:
    play = stage()
    cut(play.arrive("long", 5000, sliceable=True, at=0.04))
    play.arrive("short", 300, sliceable=True, at=0.05)
    assert play.tokens("s", at=0.08)[0] == "dispatch short e0"


def test_what_counts_is_what_is_left_of_a_prompt() -> None:
    play = stage(SMALLEST)
    assert cut(play.arrive("nearly", 640, sliceable=True, at=0.04)) == ("nearly", 128)
    for n in range(1, 4):
        assert cut(play.tokens("s", at=0.04 + n * 0.04)) == ("nearly", 128 + n * 128)
        if n > 1:
            play.slice_ended("nearly", (n - 1) * 128)
    assert play.arrive("shorter", 500, sliceable=True) == []
    assert play.tokens("s", at=0.2)[0] == "dispatch nearly e0", "128 tokens of it are left"


def test_a_long_prompt_half_way_ages_until_no_short_one_overtakes_it() -> None:
    play = stage(SMALLEST, max_wait_seconds=5.0)
    cut(play.arrive("long", 3000, sliceable=True, at=0.04))
    play.arrive("n0", 129, at=0.05)
    taken: list[str] = []
    for n in range(1, 200):
        now = 0.04 + n * 0.08
        sent = play.tokens("s", at=now)
        play.answer_slices(before=now - 0.08)
        for name in taken:
            play.tokens(name)
            play.end(name)
        taken = [answer.split()[1] for answer in sent]
        if "long" in taken:
            break
        assert taken == [f"n{n - 1}"]
        play.arrive(f"n{n}", 129, at=now + 0.03)
    assert 5.0 < now < 5.2


def test_in_order_of_arrival_the_long_prompt_is_finished_first() -> None:
    play = stage(SMALLEST, ordering=first_come_first_served())
    cut(play.arrive("long", 300, sliceable=True, at=0.04))
    play.arrive("short", 100, sliceable=True, at=0.05)
    assert cut(play.tokens("s", at=0.08)) == ("long", 256)


def test_no_more_prompts_are_half_way_than_allowed() -> None:
    play = stage(TileConfig(margin=0.999, max_sliced=2))
    tokens = 6400
    for n in range(6):  # each newcomer is the shortest
        play.arrive(f"p{n}", tokens, sliceable=True, at=0.04 + n * 0.08)
        play.tokens("s", at=0.06 + n * 0.08)
        tokens //= 2
        play.answer_slices(before=0.06 + (n - 1) * 0.08)
    engine = play.engine()
    assert engine.sliced == 2
    assert {*engine._held} == {"p0", "p1"}
    for _ in range(3):
        play.tokens("s", at=play.now + 0.08)
        play.answer_slices(before=play.now - 0.08)
        assert engine.sliced == 2
    play.end("p1")
    assert engine.sliced == 1
    assert cut(play.tokens("s", at=play.now + 0.08))[0] == "p5"


def test_a_prompt_goes_on_where_its_slices_are() -> None:
    play = Play(tiles=SMALLEST, token_budget=8192, caches_prefixes=True, engines=("x", "y"), gate=GATE)
    play.arrive("s", 16, request_class=STRICT)
    play.arrive("t", 16, request_class=STRICT)
    play.tokens("s", at=0.03)
    play.tokens("t", at=0.03)
    assert play.arrive("long", 600, sliceable=True, at=0.04) == ["slice long x 128"]
    assert play.tokens("t", at=0.06) == []
    assert play.tokens("s", at=0.06) == ["slice long x 256"]


# -- the account --


def account(play: Play) -> tuple[int, int, int, int]:
    engine = play.engine()
    return engine.outstanding, engine.backlog, engine.kv_tokens, engine.sliced


def test_cached_tokens_are_counted_once() -> None:
    play = stage(SMALLEST)
    used = play.engine().kv_tokens
    cut(play.arrive("long", 400, sliceable=True, at=0.04))
    assert play.engine().kv_tokens == used + 128
    cut(play.tokens("s", at=0.08))
    assert play.engine().kv_tokens == used + 1 + 256
    play.slice_ended("long", 128)
    assert play.engine().kv_tokens == used + 1 + 256
    cut(play.tokens("s", at=0.16))
    assert play.tokens("s", at=0.24) == ["dispatch long e0"]
    assert play.engine().kv_tokens == used + 3 + 400
    play.slice_ended("long", 256)
    play.slice_ended("long", 384)
    play.tokens("long", at=0.32)
    assert play.engine().kv_tokens == used + 3 + 401
    play.end("long")
    play.end("s")
    assert account(play) == (0, 0, 0, 0)


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("ended", [0, 1, 2])
def test_a_client_that_leaves_between_slices_leaves_nothing_behind(slices: int, ended: int) -> None:
    play = stage(SMALLEST)
    ends = [cut(play.arrive("long", 600, sliceable=True, at=0.04))[1]]
    ends += [cut(play.tokens("s", at=0.04 + n * 0.08))[1] for n in range(1, slices)]
    for end in ends[:ended]:
        ends.remove(end)
        ends += [cut([answer])[1] for answer in play.slice_ended("long", end)]  # its step has ended: the next one
    play.end("long")
    assert account(play)[3] == 0
    for end in ends:  # the aborts are told of later
        play.slice_ended("long", end, cached=False)
    play.end("s")
    assert account(play) == (0, 0, 0, 0)
    assert not play.scheduler._ledger.entries


def test_an_engine_that_goes_down_half_way_gives_the_prompt_to_another() -> None:
    play = Play(tiles=SMALLEST, token_budget=8192, caches_prefixes=True, engines=("x", "y"), gate=GATE)
    play.arrive("s", 16, request_class=STRICT)
    play.arrive("t", 16, request_class=STRICT)
    play.tokens("s", at=0.03)
    play.tokens("t", at=0.03)
    assert play.arrive("long", 600, sliceable=True, at=0.04) == ["slice long x 128"]
    assert play.tokens("s", at=0.08) == ["slice long x 256"]
    assert play.down("x") == ["slice long y 128"]
    assert [e.sliced for e in play.scheduler.engines] == [0, 1]
    play.slice_ended("long", 256, cached=True)
    for name in ("long", "s", "t"):
        play.end(name)
    play.slice_ended("long", 128)
    play.slice_ended("long", 128)
    assert all((e.outstanding, e.backlog, e.kv_tokens) == (0, 0, 0) for e in play.scheduler.engines)


def test_a_prompt_half_way_goes_on_when_its_slice_ends_before_the_step_is_seen_to() -> None:
    play = stage(SMALLEST)
    cut(play.arrive("long", 600, sliceable=True, at=0.04))
    assert play.slice_ended("long", 128, at=0.06) == ["slice long e0 256"], "its answer came before the stream's token"
    play.end("s", at=0.061)
    assert play.slice_ended("long", 256, at=0.08) == ["dispatch long e0"], "no stream is left, so nothing to be kept"


def two_streams() -> Play:
    """Two engines with a strict stream each, ``s`` on ``x`` and ``t`` on ``y``."""
    play = Play(tiles=SMALLEST, token_budget=8192, caches_prefixes=True, engines=("x", "y"), gate=GATE)
    assert play.arrive("s", 16, request_class=STRICT) == ["dispatch s x"]
    assert play.arrive("t", 16, request_class=STRICT) == ["dispatch t y"]
    play.tokens("s", at=0.03)
    play.tokens("t", at=0.03)
    return play


def test_slices_may_end_after_their_engine_has_been_down_and_the_prompt_begun_anew_there() -> None:
    play = two_streams()
    assert play.arrive("busy", 100_000, at=0.04) == ["dispatch busy x"]
    assert play.arrive("long", 5000, sliceable=True, at=0.04) == ["slice long y 128"]
    assert play.tokens("t", at=0.06) == ["slice long y 256"]
    assert play.down("y") == []
    assert play.up("y", token_budget=8192, caches_prefixes=True) == []
    assert play.tokens("t", at=0.09) == ["slice long y 128"]
    assert play.slice_ended("long", 128) == play.slice_ended("long", 256) == [], "those of the first attempt"
    play.end("long")
    play.slice_ended("long", 128)
    for name in ("s", "t", "busy"):
        play.end(name)
    assert all((e.outstanding, e.backlog, e.kv_tokens) == (0, 0, 0) for e in play.scheduler.engines)


def test_the_late_end_of_a_slice_says_nothing_of_one_at_another_engine() -> None:
    play = two_streams()
    assert play.arrive("long", 5000, sliceable=True, at=0.04) == ["slice long x 128"]
    assert play.down("x") == ["slice long y 128"]
    assert play.slice_ended("long", 128, cached=False) == [], "that is the one at x"
    x, y = play.scheduler.engines
    assert (x.backlog, x.sliced) == (0, 0)
    assert (y.backlog, y.sliced) == (128, 1)
    assert play.tokens("t", at=0.08) == ["slice long y 256"]


def test_the_only_engine_going_down_half_way_refuses_the_request() -> None:
    play = stage(SMALLEST)
    cut(play.arrive("long", 600, sliceable=True, at=0.04))
    assert play.down() == ["reject long no_engine"]
    play.slice_ended("long", 128, cached=False)
    play.end("s")
    assert account(play) == (0, 0, 0, 0)


def test_a_request_that_was_not_started_after_its_slices_begins_anew() -> None:
    play = stage(SMALLEST)
    cut(play.arrive("long", 200, sliceable=True, at=0.04))
    assert play.tokens("s", at=0.08) == ["dispatch long e0"]
    play.slice_ended("long", 128)
    assert play.not_started("long", 1.0, at=0.09) == []
    assert play.scheduler.waiting == 1
    assert account(play)[3] == 0
    play.tokens("s", at=0.16)
    assert cut(play.tick(at=1.09)) == ("long", 128)
    play.end("long")
    play.slice_ended("long", 128)
    play.end("s")
    assert account(play) == (0, 0, 0, 0)


def test_an_engine_that_turns_another_away_half_way_gives_the_prompt_to_another() -> None:
    play = two_streams()
    assert play.arrive("long", 600, sliceable=True, at=0.04) == ["slice long x 128"]
    assert play.not_started("s", 30.0, at=0.05)[0] == "dispatch s y"
    assert play.tokens("t", at=0.09) == ["slice long y 128"], "x takes nothing for half a minute"
    assert [e.sliced for e in play.scheduler.engines] == [0, 1]
    for name in ("long", "s", "t"):
        play.end(name)
    play.slice_ended("long", 128)
    play.slice_ended("long", 128)
    assert all((e.outstanding, e.backlog, e.kv_tokens) == (0, 0, 0) for e in play.scheduler.engines)


def test_who_is_half_way_at_an_engine_that_takes_nothing_waits_no_longer_than_others() -> None:
    play = stage(SMALLEST, queue_timeout_seconds=3.0)
    cut(play.arrive("long", 600, sliceable=True, at=0.04))
    assert play.not_started("s", 30.0, at=0.05) == []
    assert play.tick(at=3.1) == ["reject s queue_timeout", "reject long queue_timeout"]
    play.slice_ended("long", 128, cached=False)
    assert account(play) == (0, 0, 0, 0)


def test_who_has_waited_too_long_half_way_goes_whole() -> None:
    play = stage(SMALLEST, queue_timeout_seconds=0.05)
    cut(play.arrive("long", 600, sliceable=True, at=0.04))
    assert play.tick(at=0.089) == []
    assert play.scheduler.next_deadline() == 0.09
    assert play.tick(at=0.09) == ["dispatch long e0"]
    assert account(play)[3] == 0
    play.slice_ended("long", 128)
    play.end("long")
    play.end("s")
    assert account(play) == (0, 0, 0, 0)


def test_a_limit_of_its_own_ends_a_wait_half_way_as_well() -> None:
    play = stage(SMALLEST)
    hasty = RequestClass("hasty", ttft_limit_seconds=0.05)
    cut(play.arrive("long", 600, sliceable=True, request_class=hasty, at=0.04))
    assert play.tick(at=0.089) == []
    assert play.tick(at=0.09) == ["dispatch long e0"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"queue_timeout_seconds": 3.0}, "queue_timeout"),
        ({"request_class": RequestClass("hasty", ttft_limit_seconds=3.0)}, "too_late"),
    ],
)
def test_who_has_waited_too_long_half_way_is_refused_where_the_engine_has_no_place(
    fields: dict[str, Any], reason: str
) -> None:
    request_class = fields.pop("request_class", RequestClass("any"))
    play = stage(SMALLEST, max_num_seqs=2, **fields)
    cut(play.arrive("long", 600, sliceable=True, request_class=request_class, at=0.04))
    play.engine().passing = 1  # it gets something else to do than ours
    assert play.slice_ended("long", 128, at=0.05) == []
    assert play.tick(at=3.03) == []
    assert play.tick(at=3.04) == [f"reject long {reason}"]
    assert account(play)[3] == 0
    assert play.scheduler.next_deadline() is None
    play.end("s")
    assert account(play) == (0, 0, 0, 0)


def test_slices_that_are_not_cached_are_given_up_for_the_whole_prompt() -> None:
    play = stage(SMALLEST)
    cut(play.arrive("long", 600, sliceable=True, at=0.04))
    cut(play.tokens("s", at=0.08))
    assert play.slice_ended("long", 128, cached=False) == []
    assert (play.scheduler.waiting, play.engine().sliced) == (1, 0)
    assert play.tokens("s", at=0.16) == ["dispatch long e0"]
    assert play.slice_ended("long", 256, cached=False) == [], "it is dispatched: too late to matter"
    play.end("long")
    play.end("s")
    assert account(play) == (0, 0, 0, 0)


def test_a_request_half_way_is_refused_when_the_proxy_shuts_down() -> None:
    play = stage(SMALLEST)
    cut(play.arrive("long", 5000, sliceable=True, at=0.04))
    cut(play.tokens("s", at=0.06))
    assert play.drain() == ["reject long draining"]
    assert play.scheduler.waiting == 0
    assert play.slice_ended("long", 128, cached=False) == []
    assert play.slice_ended("long", 256) == []
    assert play.tokens("s", at=0.1) == []
    play.end("s")
    assert account(play) == (0, 0, 0, 0)
    assert play.scheduler.next_deadline() is None


def test_a_full_queue_refuses_what_could_not_begin_in_this_tile() -> None:
    play = stage(max_queue_requests=0)
    cut(play.arrive("a", 3000, sliceable=True, at=0.04))
    assert play.arrive("b", 50_000, at=0.04) == ["reject b queue_full"]
    assert play.arrive("c", 50_000, sliceable=True, at=0.04) == ["reject c queue_full"]
    assert play.scheduler.waiting == 0


def test_a_full_queue_does_not_matter_to_what_begins_now() -> None:
    assert stage(max_queue_requests=0).arrive("a", 100, at=0.04) == ["dispatch a e0"]
    assert stage(max_queue_requests=0).arrive("b", 50_000, at=0.04) == ["dispatch b e0"], "alone in its step"


def test_the_kv_cache_must_hold_all_that_is_left_of_a_prompt_before_a_slice_is_sent() -> None:
    play = stage(SMALLEST, kv_tokens=2000)
    assert play.arrive("long", 1990, sliceable=True, at=0.04) == []
    assert play.end("s", at=0.05) == ["dispatch long e0"]


def test_an_unknown_slice_is_ignored() -> None:
    play = stage()
    before = account(play)
    assert play.slice_ended("nobody", 128) == []
    assert play.slice_ended("s", 128, cached=False) == []
    assert account(play) == before


# -- exact lengths --


def test_an_exact_length_orders_a_waiting_request_anew() -> None:
    play = Play(tiles=TileConfig(), max_num_seqs=1, caches_prefixes=True)
    play.arrive("busy", 10)
    play.arrive("a", 1000)
    play.arrive("b", 2000)
    assert play.tokenized("b", 500) == []
    assert play.scheduler.waiting_tokens == 1500
    assert play.end("busy") == ["dispatch b e0"]
    assert play.engine().kv_tokens == 500


def test_a_request_may_be_sliced_once_its_tokens_are_known() -> None:
    play = stage(SMALLEST)
    assert play.arrive("short", 100, at=0.04) == ["dispatch short e0"]
    assert play.arrive("long", 5000, at=0.041) == []
    assert play.tokenized("long", 4000, at=0.05) == []
    assert cut(play.tokens("s", at=0.08)) == ("long", 128)


def test_an_exact_length_comes_too_late_for_what_was_dispatched() -> None:
    play = stage(streaming=RELAXED)
    assert play.arrive("a", 200, at=0.04) == ["dispatch a e0"]
    before = account(play)
    assert play.tokenized("a", 50) == []
    assert play.tokenized("nobody", 50) == []
    assert account(play) == before


# -- pieces --


def test_a_piece_is_nothing_where_there_is_no_slot_left() -> None:
    engine = make_engine(token_budget=8192, max_num_seqs=1, caches_prefixes=True)
    assert next_piece(engine, make_request("long", 5000), 0.05, TileConfig(), GATE, sliceable=True) == 5000
    engine.release("s", 16, 0.0, 0.1)
    assert next_piece(engine, make_request("long", 5000), 0.05, TileConfig(), GATE, sliceable=True) == 0
    check_engine(engine)


@pytest.mark.parametrize(
    "fields",
    [{"smallest_tokens": 0}, {"margin": 1.0}, {"margin": -0.1}, {"max_sliced": 0}, {"most_slices": 0}],
)
def test_tiles_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        TileConfig(**fields)


def test_a_budget_with_which_the_engine_itself_cuts_prompts_is_told() -> None:
    text = "--tiles needs a token budget of 2048 or more: with 2047 the engine itself cuts prompts"
    assert budget_advice(2047) == text
    assert budget_advice(2048) is None
