"""Engines that come and go while the scheduler works."""

from typing import Any

import pytest
from builders import make_blocks, make_limits
from interpreted import interpreted
from playbook import Play

from proxy.core.events import EngineUp, HandedOver, InFlight, Passed
from proxy.core.feedback import DelaySnapshot
from proxy.core.request import Request

TWO = ("e0", "e1")


def ids(play: Play) -> list[str]:
    return [engine.id for engine in play.scheduler.engines]


def test_an_idle_engine_is_gone_as_soon_as_it_is_removed() -> None:
    play = Play(engines=TWO)
    assert play.remove("e0", at=1.0) == []
    assert ids(play) == ["e1"]
    assert [play.arrive(name)[0] for name in "ab"] == ["dispatch a e1", "dispatch b e1"]


def test_a_removed_engine_gets_nothing_new_and_leaves_when_its_last_stream_ends() -> None:
    play = Play(engines=TWO)
    assert play.arrive("a") == ["dispatch a e0"]
    assert play.tokens("a", at=0.1) == []
    assert play.remove("e0", at=0.2) == []
    assert play.arrive("b") == ["dispatch b e1"]
    assert play.engine("e0").leaving
    assert play.tokens("a", at=0.3) == []
    assert play.end("a", at=0.4) == []
    assert ids(play) == ["e1"]


def test_what_is_still_there_at_the_limit_is_cut_once() -> None:
    play = Play(engines=TWO)
    play.arrive("a")
    play.remove("e0", 30.0, at=1.0)
    assert play.scheduler.next_deadline() == 31.0
    assert play.tick(at=30.9) == []
    assert play.tick(at=31.0) == ["cut a e0"]
    assert play.tick(at=32.0) == []
    assert play.scheduler.next_deadline() is None
    play.end("a")
    assert ids(play) == ["e1"]


def test_what_is_handed_over_on_an_engine_whose_time_is_over_is_cut_and_what_was_cut_is_not_cut_again() -> None:
    play = Play(engines=TWO)
    play.arrive("a")
    play.remove("e0", 30.0, at=1.0)
    assert play.tick(at=31.0) == ["cut a e0"]
    running = InFlight(Request("b", prompt_tokens=10), "e0", arrived_at=1.0)
    play.scheduler.handle(HandedOver(in_flight=(running,)), 32.0)
    assert play.scheduler.next_deadline() == 32.0
    assert play.tick(at=32.0) == ["cut b e0"]
    assert play.tick(at=33.0) == []
    assert play.scheduler.next_deadline() is None


def test_who_waits_goes_to_the_engines_that_are_left() -> None:
    play = Play(engines=TWO, max_num_seqs=1)
    play.arrive("a")
    play.arrive("b")
    assert play.arrive("c") == []
    assert play.remove("e0", at=0.1) == []
    assert play.end("a", at=0.2) == [], "its place is gone with the engine"
    assert play.end("b", at=0.3) == ["dispatch c e1"]


def test_who_is_served_by_the_same_engines_as_before_is_left_alone() -> None:
    """Sorting thousands anew for an engine that is not for them would hold up every stream."""
    play = Play(engines={"e0": ["m"], "e1": ["n"]}, max_num_seqs=1)
    play.arrive("a", model="m")
    play.arrive("b", model="m")
    play.arrive("c", model="n")
    play.arrive("d", model="n")
    (_, of_m), (_, of_n) = play.scheduler.ledger.backlog.queues()
    play.scheduler.handle(EngineUp("e2", make_limits(max_num_seqs=1), frozenset({"n"})), 1.0)
    play.arrive("e", model="n", at=1.0)
    queues = [queue for _, queue in play.scheduler.ledger.backlog.queues()]
    assert queues[0] is of_m
    assert of_n not in queues


def test_with_the_last_engine_those_who_wait_are_told_that_there_is_none() -> None:
    play = Play(max_num_seqs=1)
    play.arrive("a")
    play.arrive("b")
    assert play.remove("e0", at=0.1) == ["reject b no_engine"]
    assert play.arrive("c") == ["reject c no_engine"], "a model is not unknown because its engine leaves"
    play.end("a")
    assert play.arrive("d") == ["reject d no_engine"]


def test_only_the_model_that_nobody_serves_any_more_is_refused() -> None:
    play = Play(engines={"e0": ["x"], "e1": ["y"]}, max_num_seqs=1)
    for name, model in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")):
        play.arrive(name, model=model)
    assert play.remove("e0", at=0.1) == ["reject c no_engine"]
    assert play.arrive("e", model="x") == ["reject e unknown_model"]
    assert play.end("b") == ["dispatch d e1"]


@pytest.mark.parametrize("up", [True, False])
def test_an_engine_that_comes_back_while_it_leaves_is_the_same_one(up: Any) -> None:
    play = Play(engines=TWO)
    play.arrive("a")
    engine = play.engine("e0")
    play.remove("e0", 30.0, at=1.0)
    (play.up if up else play.down)("e0", at=2.0)
    assert play.engine("e0") is engine
    assert (engine.leaving, engine.up) == (False, up)
    assert play.tick(at=40.0) == [], "the limit holds no more"
    play.end("a")
    assert ids(play) == ["e0", "e1"]


def test_an_engine_that_comes_back_later_is_a_new_one() -> None:
    play = Play(caches_prefixes=True)
    blocks = make_blocks("aaa")
    play.arrive("a", 400, blocks=blocks)
    play.tokens("a", at=0.1)
    play.end("a", at=0.2)
    before = play.engine()
    play.remove(at=0.3)
    play.up(caches_prefixes=True, at=0.4)
    after = play.engine()
    assert after is not before
    assert after.number == before.number + 1, "a generation of its own"
    assert not play.scheduler.prefixes.index("e0").tokens, "its cache is empty"


def test_nothing_is_kept_of_many_engines_that_came_and_went() -> None:
    play = Play(engines=())
    for number in range(300):  # bounds the test's time; growth would show as well
        play.up(f"e{number}")
        play.arrive(f"r{number}")
        play.remove(f"e{number}")
        play.end(f"r{number}")
    ledger = play.scheduler._ledger
    assert not ledger.engines
    assert not ledger.prefixes._indexes
    assert not ledger.backlog._queues
    assert len(ledger.backlog._shares) <= 64
    assert len(ledger.overload._outflows) <= 1


def test_an_unknown_engine_s_removal_and_a_second_one_change_nothing() -> None:
    play = Play()
    assert play.remove("nobody") == []
    play.arrive("a")
    play.remove(drain_seconds=5.0, at=1.0)
    play.remove(drain_seconds=50.0, at=2.0)
    assert play.tick(at=6.0) == ["cut a e0"], "the first limit holds"


class TestLoad:
    """What an engine has beside the requests that are counted one by one."""

    def test_each_answer_of_a_request_takes_a_slot(self) -> None:
        play = Play(max_num_seqs=4)
        assert play.arrive("a", 10, sequences=4) == ["dispatch a e0"]
        assert play.arrive("b", 10) == []
        assert play.end("a") == ["dispatch b e0"]

    def test_an_idle_engine_takes_more_answers_than_it_has_slots(self) -> None:
        assert Play(max_num_seqs=2).arrive("a", 10, sequences=64) == ["dispatch a e0"]

    def test_what_passes_the_queue_takes_a_slot_and_makes_an_engine_busier(self) -> None:
        play = Play(engines=TWO, max_num_seqs=2)
        play.handle(Passed("e0", begins=True))
        assert play.scheduler.place_unscheduled("") == "e1"
        play.arrive("a", 10)
        assert play.engine("e0").is_full == (play.engine("e0").outstanding == 1)
        play.handle(Passed("e0", begins=False))
        play.handle(Passed("e0", begins=False))
        play.handle(Passed("nobody", begins=True))
        assert [e.passing for e in play.scheduler.engines] == [0, 0]


def test_an_engine_begins_with_the_delay_that_an_earlier_run_has_learnt() -> None:
    play = Play()
    far = DelaySnapshot((0.1, 0.04), (0.2, 0.05), (0.5, 0.1))
    play.handle(EngineUp("e0", make_limits(), delay=far))
    assert (play.engine().delay.steps, play.engine().delay.seconds) == (1, 0.05)
    assert play.engine().delay.snapshot() == far
    play.up()
    assert play.engine().delay.snapshot() == far, "what it tells of itself later changes nothing"


@interpreted
def test_who_waits_for_an_engine_that_joins_keeps_its_place_and_nothing_is_done_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With tens of thousands in the queue, every stream would be held up meanwhile."""
    play = Play(max_num_seqs=1, tenant_weights={"b": 2.0})
    play.arrive("running")
    for number in range(6):
        play.arrive(f"{'ab'[number % 2]}{number}", 100 + number, tenant="ab"[number % 2])
    ledger = play.scheduler.ledger
    ((_, queue),) = ledger.backlog.queues()
    with monkeypatch.context() as patch:
        for method in ("drop", "wait"):
            patch.setattr(ledger, method, lambda *_: pytest.fail("of each"))
        assert play.up("e1", max_num_seqs=1, at=1.0) == ["dispatch a0 e1"]
    assert ledger.backlog.queues() == [(frozenset({"e0", "e1"}), queue)]
    assert play.end("running", at=2.0) == ["dispatch b1 e0"]
    assert play.end("a0", at=3.0) == ["dispatch b3 e1"], "it was served less for its weight"


def test_queues_that_wait_for_the_same_engines_now_become_one() -> None:
    play = Play(engines={"e0": ["m"], "e1": ["n"]}, max_num_seqs=1)
    for name, model in (("a", "m"), ("b", "n"), ("c", "m"), ("d", "n"), ("e", "m")):
        play.arrive(name, model=model)
    assert play.scheduler.waiting == 3
    play.up("e0", models=("m", "n"), max_num_seqs=1, at=1.0)
    play.up("e1", models=("m", "n"), max_num_seqs=1, at=1.0)
    ((servers, queue),) = play.scheduler.ledger.backlog.queues()
    assert (servers, len(queue), dict(queue.models)) == (frozenset({"e0", "e1"}), 3, {"m": 2, "n": 1})
    assert [play.end("a", at=2.0), play.end("b", at=2.0)] == [["dispatch c e0"], ["dispatch d e1"]]
