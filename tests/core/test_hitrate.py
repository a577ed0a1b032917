"""Engines that do not keep in their cache what slices bring get prompts whole."""

import pytest
from builders import make_engine, make_request
from playbook import Play
from test_tiles import GATE, cut, stage, trained

from proxy.core.actions import Slice
from proxy.core.events import SliceEnded
from proxy.core.hitrate import HitRate
from proxy.core.tiles import TileConfig, next_piece


def judged(shares: list[float], *, start: float = 0.0) -> HitRate:
    found = HitRate()
    for n, share in enumerate(shares):
        found.note(1000, int(1000 * share), start + n)
    return found


@pytest.mark.parametrize("share", [0.96, 1.0, 1.5])
def test_an_engine_that_finds_what_was_sent_gets_slices(share: float) -> None:
    assert judged([share] * 500).pays(500.0)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.85])
def test_one_that_does_not_is_left_alone_after_ten_slices(share: float) -> None:
    assert judged([share] * 9).pays(9.0)
    found = judged([share] * 10)
    assert not found.pays(9.0)
    assert not found.pays(68.0)
    assert found.pays(69.0)


def test_a_single_miss_among_many_hits_is_forgiven() -> None:
    assert judged([1.0] * 50 + [0.6] + [1.0] * 50).pays(100.0)


def test_each_failure_makes_the_pause_longer_and_a_success_short_again() -> None:
    found, now, pauses = HitRate(), 0.0, []
    for _ in range(9):
        while found.pays(now):
            found.note(100, 0, now)
            now += 1.0
        began = now
        while not found.pays(now):
            now += 1.0
        pauses.append(now - began)
    assert [round(p, -1) for p in pauses[:4]] == [60, 120, 240, 480]
    assert max(pauses) <= 3600
    for n in range(20):
        found.note(100, 100, now + n)
    for n in range(20, 40):
        found.note(100, 0, now + n)
    paused = next(n for n in range(20, 40) if not found.pays(now + n))
    assert found.pays(now + paused + 60.0)


def test_first_slices_tell_nothing_and_nothing_is_noted_in_a_pause() -> None:
    found = HitRate()
    for n in range(100):
        found.note(0, 0, float(n))
    assert (found.pays(100.0), found.rate) == (True, 1.0)
    paused = judged([0.0] * 10)
    paused.note(100, 0, 20.0)
    assert paused.rate == 1.0


def test_what_does_not_pay_is_not_cut() -> None:
    engine = make_engine(token_budget=8192, caches_prefixes=True)
    engine.model = trained()
    engine.release("s", 16, 0.0, 0.1)
    engine.on_tokens("s", 1, 0.03)
    request = make_request("long", 5000)
    assert 0 < next_piece(engine, request, 0.031, TileConfig(), GATE, sliceable=True) < 5000
    engine.hit_rate = judged([0.0] * 10, start=-9.0)
    assert next_piece(engine, request, 0.031, TileConfig(), GATE, sliceable=True) == 5000


def misses(play: Play, count: int) -> None:
    """Slices of somebody else that end without their beginning having been found."""
    for number in range(count):
        play.handle(SliceEnded(Slice("other", "e0", 2000, 1000, 10_000 + number), cached=False, found_tokens=0))


def test_the_scheduler_falls_back_by_engine_and_an_engine_that_comes_up_anew_starts_anew() -> None:
    play = stage()
    misses(play, 10)
    assert not play.scheduler.slices_pay("e0", play.now)
    assert play.scheduler.slices_pay("e1", play.now)
    assert play.arrive("long", 5000, sliceable=True, at=0.05) == ["dispatch long e0"]
    play.down("e0")
    play.up("e0", token_budget=8192, caches_prefixes=True)
    assert play.scheduler.slices_pay("e0", play.now)


def test_a_client_that_left_says_nothing_of_the_cache() -> None:
    play = stage()
    for number in range(50):
        play.handle(SliceEnded(Slice("other", "e0", 2000, 1000, 10_000 + number), cached=False))
    assert play.scheduler.slices_pay("e0", play.now)
    cut(play.arrive("long", 5000, sliceable=True, at=0.05))
