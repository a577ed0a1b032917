"""The overload contract of the scheduler: who is refused and when, and what a refused client is told."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from builders import make_request
from playbook import Play

from proxy.core.actions import Reject
from proxy.core.admission import GateConfig
from proxy.core.events import Arrived, HandedOver
from proxy.core.ordering import first_come_first_served
from proxy.core.overload import MAX_SENT_AWAY
from proxy.core.request import RELAXED, RejectReason, RequestClass

LIMITED = replace(RELAXED, ttft_limit_seconds=5.0)


def refusal(play: Play) -> Reject:
    (action,) = play.actions
    assert isinstance(action, Reject)
    return action


def told(play: Play) -> float:
    found = refusal(play).retry_after_seconds
    assert found is not None
    return found


def one_slot(**fields: Any) -> Play:
    """An engine that works on one request at a time, and has one."""
    play = Play(max_num_seqs=1, **fields)
    play.arrive("busy")
    play.tokens("busy", at=0.03)
    return play


def seasoned(**fields: Any) -> Play:
    """As ``one_slot``, seen to release a prompt of 1000 tokens a second while others waited."""
    play = one_slot(**fields)
    play.end("busy")
    play.arrive("w0", 1000)
    for n in range(1, 60):
        play.arrive(f"w{n}", 1000)
        play.tokens(f"w{n - 1}", at=n - 0.5)
        assert play.end(f"w{n - 1}", at=float(n)) == [f"dispatch w{n} e0"]
    play.tokens("w59", at=59.5)
    return play


class TestLimit:
    def test_nobody_is_refused_by_an_estimate_that_was_never_checked(self) -> None:
        play = one_slot()
        for n in range(100):
            assert play.arrive(f"r{n}", 100_000, request_class=LIMITED) == []

    def test_who_would_be_late_is_refused_at_once(self) -> None:
        play = seasoned()
        for n in range(3):
            assert play.arrive(f"r{n}", 1000) == []
        assert play.arrive("in time", 1000, request_class=LIMITED) == []
        assert play.arrive("r3", 1000) == []
        assert play.arrive("r4", 1000) == []
        assert play.arrive("late", 1000, request_class=LIMITED) == ["reject late too_late"]
        assert refusal(play).estimated_wait_seconds == pytest.approx(7.0, rel=0.15)
        assert told(play) >= 6
        assert play.arrive("short", 10, request_class=LIMITED) == [], "it would not have to wait for the others"
        assert play.arrive("patient", 1000) == []

    def test_time_that_has_passed_since_the_arrival_counts(self) -> None:
        play = seasoned(ordering=first_come_first_served())
        for n in range(3):
            play.arrive(f"r{n}", 1000, since=50.0)
        assert play.arrive("quick", 1000, request_class=LIMITED) == []
        assert play.arrive("slow", 1000, request_class=LIMITED, since=play.now - 3.0) == ["reject slow too_late"]

    def test_who_can_start_now_is_never_late(self) -> None:
        play = seasoned()
        play.end("w59")
        assert play.arrive("a", 10**6, request_class=replace(RELAXED, ttft_limit_seconds=1e-6)) == ["dispatch a e0"]

    def test_who_waits_beyond_its_limit_is_refused_just_then(self) -> None:
        play = one_slot()
        play.arrive("a", 1000, request_class=LIMITED, since=-1.0)
        play.arrive("b", 1000)
        assert play.scheduler.next_deadline() == pytest.approx(4.0)
        assert play.tick(at=4.0) == ["reject a too_late"]
        assert play.end("busy", at=4.1) == ["dispatch b e0"]

    def test_without_a_limit_it_is_the_time_out_of_the_queue(self) -> None:
        play = seasoned(queue_timeout_seconds=10.0)
        answers = [play.arrive(f"r{n}", 1000) for n in range(20)]
        accepted = [a for a in answers if a == []]
        assert 8 <= len(accepted) <= 12
        assert answers[len(accepted) :] == [[f"reject r{n} too_late"] for n in range(len(accepted), 20)]

    def test_a_time_in_which_the_engine_took_nothing_does_not_count(self) -> None:
        play = seasoned()
        play.arrive("x", 1000)
        play.end("w59")
        rate = play.scheduler.outflow_tokens_per_second
        play.arrive("y", 1000)
        play.not_started("x", 30.0)
        assert play.tick(at=play.now + 30.0) == ["dispatch x e0"]
        assert play.scheduler.outflow_tokens_per_second >= 0.9 * rate

    def test_those_who_change_hands_say_nothing_of_who_comes_next(self) -> None:
        play = seasoned(queue_timeout_seconds=100.0)
        waited = tuple(Arrived(make_request(f"h{n}", 1000), play.now - 30.0) for n in range(60))
        play.handle(HandedOver(waiting=waited))
        assert play.arrive("new", 1000) == []
        assert play.arrive("hasty", 1000, request_class=LIMITED) == ["reject hasty too_late"]
        assert refusal(play).estimated_wait_seconds == pytest.approx(62.0, rel=0.25)

    def test_a_queue_of_another_model_says_nothing(self) -> None:
        play = Play(engines={"a": ["a"], "b": ["b"]}, max_num_seqs=1)
        play.arrive("w0", 1000, model="a")
        for n in range(1, 60):
            play.arrive(f"w{n}", 1000, model="a")
            play.end(f"w{n - 1}", at=float(n))
        for n in range(20):
            play.arrive(f"r{n}", 1000, model="a")
        assert play.arrive("x", 1000, model="a", request_class=LIMITED) == ["reject x too_late"]
        assert play.arrive("y", 1000, model="b", request_class=LIMITED) == ["dispatch y b"]
        assert play.arrive("z", 1000, model="b", request_class=LIMITED) == []


class TestNoQueue:
    def test_it_starts_at_once_or_is_refused(self) -> None:
        play = Play(max_num_seqs=1)
        assert play.arrive("a", may_wait=False) == ["dispatch a e0"]
        assert play.arrive("b", may_wait=False) == ["reject b no_queue"]
        assert told(play) >= 1
        play.arrive("c", 1000)
        play.end("a")
        assert play.scheduler.dispatched == 1

    @pytest.mark.parametrize("kind", [RELAXED, LIMITED])
    def test_it_does_not_wait_after_its_engine_has_refused_it_either(self, kind: RequestClass) -> None:
        play = Play(engines=("e0", "e1"), max_num_seqs=1)
        assert play.arrive("a", may_wait=False, request_class=kind) == ["dispatch a e0"]
        assert play.not_started("a", 1.0) == ["dispatch a e1"]
        assert play.not_started("a", 1.0) == ["reject a no_queue"]

    def test_it_is_no_sign_of_an_overload(self) -> None:
        play = one_slot(max_queue_requests=0)
        for n in range(100):
            play.arrive(f"n{n}", may_wait=False, at=0.1 + n / 10)
        play.arrive("a", 1, at=10.1)
        assert refusal(play).reason is RejectReason.QUEUE_FULL
        assert told(play) < 2


class TestBounds:
    def test_tokens_in_the_queue_are_limited(self) -> None:
        play = one_slot(max_queue_tokens=1000)
        assert play.arrive("a", 600) == []
        assert play.arrive("b", 500) == ["reject b queue_full"]
        assert play.arrive("c", 400) == []
        assert play.end("busy") == ["dispatch c e0"]
        assert play.arrive("d", 400) == []

    def test_they_hold_over_all_queues_where_an_engine_is_kept_for_who_is_overdue_in_another(self) -> None:
        gate = GateConfig(kv_growth_tokens=0, kv_watermark=0.0)
        engines = {"e0": ["a", "b", "c"], "e1": ["a", "b"], "e2": ["a"]}
        play = Play(engines=engines, kv_tokens=1000, max_wait_seconds=5.0, gate=gate, max_queue_requests=1)
        for n in range(3):
            play.arrive(f"s{n}", 300, model="a", tenant="a")
            play.tokens(f"s{n}", at=0.1 + n)
        assert play.arrive("long", 800, model="a", tenant="a", at=4.0) == []
        assert play.arrive("b", 1, model="b", tenant="a", at=8.0) == ["dispatch b e0"], "nothing is kept yet"
        assert play.arrive("b1", 1, model="b", tenant="a", at=10.0) == ["reject b1 queue_full"]
        assert play.arrive("c1", 1, model="c", tenant="a", at=10.1) == ["reject c1 queue_full"]
        assert play.scheduler.waiting == 1
        assert play.arrive("c2", 1, model="c", tenant="calm", at=10.2) == ["reject c2 queue_full"], "half of it is none"

    def test_they_do_not_matter_to_who_need_not_wait(self) -> None:
        assert Play(max_queue_tokens=0).arrive("a", 5000) == ["dispatch a e0"]

    def test_a_negative_limit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="limits"):
            Play(max_queue_tokens=-1)


class TestRetryAfter:
    def test_an_overload_that_lasts_sends_clients_away_for_longer(self) -> None:
        play = one_slot(max_queue_requests=0)
        for n in range(600):
            play.arrive(f"r{n}", 1, at=0.1 + n / 10)
            age = n / 10
            assert max(1.0, min(age, 60.0)) <= told(play) + 1e-9 <= 2 * max(1.0, age) + 1e-9

    def test_those_refused_at_one_instant_are_spread(self) -> None:
        play = one_slot(max_queue_requests=0)
        play.arrive("first", 1, at=1.0)
        for n in range(99):
            play.arrive(f"again{n}", 1, at=1.0 + n / 9.9)
        waits = []
        for n in range(100):
            play.arrive(f"r{n}", 1, at=11.0)
            waits.append(told(play))
        waits.sort()
        assert waits[0] == pytest.approx(10.0, abs=0.5)
        assert waits[-1] == pytest.approx(20.0, abs=0.5)
        assert max(b - a for a, b in pairwise(waits)) < 0.5

    def test_an_overload_is_over_when_nobody_was_refused_for_half_of_its_age(self) -> None:
        play = one_slot(max_queue_requests=0)
        for n in range(41):
            play.arrive(f"r{n}", 1, at=1.0 + n)
        play.arrive("still", 1, at=60.0)
        assert told(play) > 50
        play.arrive("new", 1, at=100.0)
        assert told(play) < 2


class TestReturn:
    """A refused request keeps its place in the order until it comes back."""

    @pytest.mark.parametrize(
        ("early", "known", "first"), [(0.0, b"x", "x2"), (0.5, b"x", "fresh"), (0.0, b"y", "fresh")]
    )
    def test_only_if_it_is_the_same_and_not_too_early(self, early: float, known: bytes, first: str) -> None:
        play = one_slot(ordering=first_come_first_served(), queue_timeout_seconds=2.0)
        play.arrive("x", at=0.1, fingerprint=b"x")
        assert play.tick(at=2.1) == ["reject x queue_timeout"]
        back_at = 2.1 + told(play)
        play.arrive("fresh", at=back_at - early - 0.01)
        play.arrive("x2", at=back_at - early, fingerprint=known)
        assert play.end("busy") == [f"dispatch {first} e0"]

    def test_a_place_is_good_for_one_return(self) -> None:
        play = one_slot(ordering=first_come_first_served(), queue_timeout_seconds=2.0)
        play.arrive("x", at=0.1, fingerprint=b"x")
        play.tick(at=2.1)
        play.arrive("x2", at=10.0, fingerprint=b"x")
        play.arrive("fresh")
        play.arrive("x3", fingerprint=b"x")
        assert play.end("busy") == ["dispatch x2 e0"]
        assert play.end("x2") == ["dispatch fresh e0"]

    def test_who_is_refused_again_keeps_its_first_place(self) -> None:
        play = one_slot(ordering=first_come_first_served(), queue_timeout_seconds=2.0)
        play.arrive("x", at=0.1, fingerprint=b"x")
        play.tick(at=2.1)
        play.arrive("y", at=3.0, fingerprint=b"y")
        play.arrive("x2", at=6.0, fingerprint=b"x")
        play.tick(at=8.5)
        play.arrive("y2", at=30.0, fingerprint=b"y")
        play.arrive("x3", at=30.0, fingerprint=b"x")
        assert play.end("busy") == ["dispatch x3 e0"]

    def test_its_own_limits_count_from_its_return(self) -> None:
        play = one_slot(queue_timeout_seconds=2.0)
        play.arrive("x", at=0.1, fingerprint=b"x")
        play.tick(at=2.1)
        assert play.arrive("x2", at=10.0, fingerprint=b"x") == []
        assert play.tick(at=11.9) == []
        assert play.tick(at=12.0) == ["reject x2 queue_timeout"]

    def test_only_so_many_are_remembered(self) -> None:
        play = one_slot(max_queue_requests=0)
        scheduler = play.scheduler
        for n in range(MAX_SENT_AWAY + 10):
            scheduler.handle(Arrived(make_request(f"r{n}", fingerprint=b"%d" % n)), 1.0)
        assert len(scheduler._ledger.overload._sent_away) == MAX_SENT_AWAY


class TestTenants:
    """A tenant that floods the queue is refused, and not the others with it."""

    def test_the_flood_is_late_and_nobody_else(self) -> None:
        play = seasoned()
        answers = [play.arrive(f"f{n}", 1000, tenant="flood", request_class=LIMITED) for n in range(12)]
        let_in = answers.count([])
        assert 4 <= let_in <= 7
        assert answers[let_in:] == [[f"reject f{n} too_late"] for n in range(let_in, 12)]
        for n in range(2):
            assert play.arrive(f"c{n}", 1000, tenant="calm", request_class=LIMITED) == []
        assert play.arrive("f12", 1000, tenant="flood", request_class=LIMITED) == ["reject f12 too_late"]
        for n in range(2, 12):
            last = play.arrive(f"c{n}", 1000, tenant="calm", request_class=LIMITED)
        assert last == ["reject c11 too_late"], "its own work counts"

    def test_who_was_let_in_beside_a_flood_is_in_time(self) -> None:
        play = seasoned()
        for n in range(40):
            play.arrive(f"f{n}", 1000, tenant="flood")
        assert play.arrive("c", 1000, tenant="calm", request_class=LIMITED) == []
        play.end("w59", at=60.0)
        released = play.scheduler._ledger.entries
        busy = next(i for i, e in released.items() if e.engine is not None)
        if busy != "c":
            assert play.end(busy, at=61.0) == ["dispatch c e0"]

    def test_a_heavy_class_is_not_late_behind_a_light_one(self) -> None:
        heavy = replace(LIMITED, weight=9.0)
        play = seasoned()
        for n in range(20):
            play.arrive(f"l{n}", 1000)
        assert play.arrive("light", 1000, request_class=LIMITED) == ["reject light too_late"]
        for n in range(4):
            assert play.arrive(f"h{n}", 1000, request_class=heavy) == []
        assert play.arrive("light again", 1000, request_class=LIMITED) == ["reject light again too_late"]

    def test_a_full_queue_makes_room_for_who_holds_little(self) -> None:
        play = one_slot(max_queue_requests=4)
        for n in range(4):
            assert play.arrive(f"f{n}", tenant="flood") == []
        assert play.arrive("f4", tenant="flood") == ["reject f4 queue_full"]
        assert play.arrive("c0", tenant="calm") == ["reject f3 queue_full"]
        assert told(play) >= 1
        assert play.arrive("c1", tenant="calm") == ["reject f2 queue_full"]
        assert play.arrive("c2", tenant="calm") == ["reject c2 queue_full"], "both hold half of it"

    def test_nobody_makes_room_for_who_need_not_wait_or_is_refused(self) -> None:
        play = Play(engines={"a": ["a"], "b": ["b"]}, max_num_seqs=1, max_queue_requests=2, max_queue_bytes=100)
        for n in range(3):
            play.arrive(f"f{n}", 1000, model="a", tenant="flood")
        assert play.arrive("large", model="a", tenant="calm", size_bytes=101) == ["reject large queue_full"]
        assert play.arrive("hasty", model="a", tenant="calm", may_wait=False) == ["reject hasty no_queue"]
        assert play.arrive("elsewhere", model="b", tenant="calm") == ["dispatch elsewhere b"]
        assert play.scheduler.waiting == 2
