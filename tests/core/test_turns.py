"""Who went before whom, and why: the order of releases against that of arrival."""

from typing import Any

import pytest
from playbook import Play

from proxy.core.ordering import first_come_first_served, shortest_prompt_first
from proxy.core.request import RequestClass
from proxy.core.turns import Turn

PROMPT = RequestClass("prompt", ttft_seconds=10.0)


def full(**fields: Any) -> Play:
    """An engine with one place, which is taken."""
    play = Play(max_num_seqs=1, **fields)
    play.arrive("first", 500, tenant="t")
    play.tokens("first", at=0.1)
    assert play.scheduler.ledger.turns.counts[Turn.ALONE] == 1
    return play


def turns(play: Play) -> dict[str, int]:
    """What has left the queue of a full engine."""
    counts = play.scheduler.ledger.turns.counts | {Turn.ALONE: play.scheduler.ledger.turns.counts[Turn.ALONE] - 1}
    return {turn.value: count for turn, count in counts.items() if count}


def test_who_is_alone_goes_before_nobody() -> None:
    play = full()
    play.arrive("a", 50)
    assert play.end("first", at=2.0) == ["dispatch a e0"]
    assert turns(play) == {"alone": 1}
    assert play.scheduler.ledger.turns.overtaking_seconds == 0


def test_a_short_prompt_overtakes_an_older_long_one() -> None:
    play = full(ordering=shortest_prompt_first(15.0))
    play.arrive("long", 1000, at=1.0)
    play.arrive("short", 10, at=1.5)
    assert play.end("first", at=2.0) == ["dispatch short e0"]
    assert turns(play) == {"length": 1}
    assert play.scheduler.ledger.turns.overtaking_seconds == pytest.approx(0.5)


def test_a_long_prompt_that_has_aged_goes_before_a_shorter_one() -> None:
    play = full(ordering=shortest_prompt_first(2.0))
    play.arrive("long", 100, at=1.0)
    play.arrive("short", 50, at=9.0)
    assert play.end("first", at=10.0) == ["dispatch long e0"]
    assert turns(play) == {"age": 1}


def test_in_order_of_arrival() -> None:
    play = full(ordering=first_come_first_served())
    play.arrive("a", 50, at=1.0)
    play.arrive("b", 60, at=1.5)
    assert play.end("first", at=2.0) == ["dispatch a e0"]
    assert turns(play) == {"arrival": 1}


def test_who_has_waited_for_as_long_as_anybody_may() -> None:
    play = full(ordering=shortest_prompt_first(1000.0), max_wait_seconds=5.0)
    play.arrive("long", 1000, at=1.0)
    play.arrive("short", 10, at=1.5)
    assert play.end("first", at=6.2) == ["dispatch long e0"]
    assert turns(play) == {"overdue": 1}


def test_a_first_token_that_is_due() -> None:
    play = full(ordering=shortest_prompt_first(1000.0))
    play.arrive("older", 10, at=1.0)
    play.arrive("promised", 1000, at=1.5, request_class=PROMPT)
    assert play.end("first", at=11.35) == ["dispatch promised e0"]
    assert turns(play) == {"deadline": 1}


def test_the_turn_of_another_tenant() -> None:
    play = full()
    play.arrive("older", 10, at=1.0, tenant="t")
    play.arrive("calm", 900, at=1.5, tenant="other")
    assert play.end("first", at=2.0) == ["dispatch calm e0"]
    assert turns(play) == {"share": 1}


def test_what_comes_back_and_leaves_again_is_counted_again_and_a_refusal_is_not() -> None:
    play = full()
    play.arrive("a", 50, at=1.0)
    play.end("first", at=2.0)
    play.not_started("a", 1.0, at=2.1)
    assert play.tick(at=3.2) == ["dispatch a e0"]
    play.arrive("b", 50, at=3.3)
    play.end("b", at=3.4)
    assert turns(play) == {"alone": 2}
