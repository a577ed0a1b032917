"""Other settings while requests wait and run."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from builders import make_request
from hypothesis import given
from hypothesis import strategies as st
from playbook import Play

from proxy.core.codec import decode, encode
from proxy.core.events import Reconfigured
from proxy.core.holdings import Holdings
from proxy.core.lane import Waiting
from proxy.core.ordering import first_come_first_served
from proxy.core.rad import RadConfig
from proxy.core.tiles import TileConfig


def change(play: Play, **fields: Any) -> list[str]:
    return play.handle(Reconfigured(replace(play.scheduler.config, **fields)))


def busy(**fields: Any) -> Play:
    """A stage on which everybody has to wait."""
    play = Play(**fields)
    play.up(max_num_seqs=1)
    play.arrive("running")
    return play


def test_a_smaller_queue_refuses_newcomers_and_keeps_who_waits() -> None:
    play = busy(max_queue_requests=3)
    for name in ("a", "b", "c"):
        assert play.arrive(name) == []
    assert change(play, max_queue_requests=2) == []
    assert play.scheduler.waiting == 3
    assert play.arrive("d") == ["reject d queue_full"]
    assert change(play, max_queue_requests=4) == []
    assert play.arrive("e") == []


def test_a_shorter_time_limit_holds_for_those_who_wait() -> None:
    play = busy()
    play.arrive("a")
    change(play, queue_timeout_seconds=5.0)
    assert play.tick(at=5.0) == ["reject a queue_timeout"]


def test_a_larger_backlog_is_used_at_once() -> None:
    play = Play()
    play.up(token_budget=100, max_num_seqs=10)
    for n in range(4):
        play.arrive(f"r{n}", 100)
    waiting = play.scheduler.waiting
    assert waiting > 1
    gate = replace(play.scheduler.config.gate, backlog_factor=50.0)
    assert len(change(play, gate=gate)) == waiting


def test_who_has_waited_long_goes_first_by_the_new_measure() -> None:
    play = busy(max_wait_seconds=100.0)
    play.arrive("old", 10_000, at=0.0)
    play.arrive("new", 10, at=20.0)
    change(play, max_wait_seconds=15.0)
    assert play.end("running", at=21.0) == ["dispatch old e0"]


def test_the_order_tiles_and_throughput_mode_stay() -> None:
    play = busy()
    before = play.scheduler.config
    change(play, ordering=first_come_first_served(), tiles=TileConfig())
    assert play.scheduler.config == before
    change(play, rad=RadConfig())
    assert play.scheduler.config == before


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_share_by_the_new_weights(weight: float) -> None:
    play = busy()
    for n in range(60):
        for tenant in ("a", "b"):
            play.arrive(f"{tenant}{n}", 100, tenant=tenant)
    change(play, tenant_weights={"a": weight})
    got: Counter[str] = Counter()
    running = "running"
    for _ in range(40):
        (told,) = play.end(running)
        running = told.split()[1]
        got[running[0]] += 1
    assert got["a"] / got["b"] == pytest.approx(weight, rel=0.15)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(0, 100)), min_size=1, max_size=20),
    st.integers(1, 30),
    st.integers(1, 500),
    st.none() | st.integers(1, 500),
)
def test_holdings_measured_anew_are_those_that_had_the_bounds_from_the_beginning(
    held: list[tuple[str, int, int]], requests: int, size_bytes: int, tokens: int | None
) -> None:
    changed, fresh = Holdings(7, 77, 777), Holdings(requests, size_bytes, tokens)
    for number, (tenant, prompt, size) in enumerate(held):
        request = make_request(str(number), prompt, tenant=tenant, size_bytes=size)
        for holdings in (changed, fresh):
            holdings.add(Waiting(request, 0.0, 0.0, number))
    changed.rebound(requests, size_bytes, tokens)
    assert [h.tenant for h in changed._by_part] == [h.tenant for h in fresh._by_part]


def test_it_is_told_in_decision_logs() -> None:
    event = Reconfigured(Play().scheduler.config)
    assert decode(encode(event)) == event
