"""A small soak: the large one is run by hand (``make soak``)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soak.run import Result, check, soak

GOOD = Result(
    requests=100,
    killed=1,
    went={"done": 68, "left (sent)": 32},
    generations_sent=95,
    answered=60,
    before={"tasks": 6, "task_names": {}, "files": 20, "idle_upstream": 3, "connections": 2},
    samples=[(40, 1000), (70, 1000), (100, 1000)],
    after={
        "tasks": 6,
        "task_names": {},
        "files": 20,
        "idle_upstream": 3,
        "connections": 0,
        "left_over": {},
        "begun": 80,
        "outcomes": {"completed": 60, "client_gone": 20},
    },
    exit_code=0,
)


@pytest.mark.e2e
async def test_nothing_is_left_of_some_hundred_requests() -> None:
    result = await soak(220, at_once=60, engines=2, kill_seconds=0.05)
    assert check(result) == []
    assert result.went["done"] > 60


def test_a_good_result_is_good() -> None:
    assert check(GOOD) == []
    assert GOOD.growth_bytes() == 0.0
    assert replace(GOOD, samples=[(40, 0), (70, 300), (100, 600)]).growth_bytes() == pytest.approx(10)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"left_over": {"tickets": 1}}, "held for requests"),
        ({"outcomes": {"completed": 60, "client_gone": 21}}, "outcomes"),
        ({"outcomes": {"completed": 60, "client_gone": 19}}, "outcomes"),
        ({"tasks": 7}, "tasks"),
        ({"connections": 1}, "connections of clients"),
        ({"files": 40}, "files left open"),
        ({"begun": 96, "outcomes": {"completed": 96}}, "more or fewer"),
        ({"begun": 59, "outcomes": {"completed": 59}}, "more or fewer"),
    ],
)
def test_what_is_left_is_told(changed: dict[str, object], told: str) -> None:
    (wrong,) = check(replace(GOOD, after={**GOOD.after, **changed}))
    assert told in wrong


@pytest.mark.parametrize("went", ["hung", "incomplete", "usage left in"])
def test_ends_that_are_none_are_told(went: str) -> None:
    assert len(check(replace(GOOD, went={"done": 67, "left (sent)": 32, went: 1}))) == 1
