"""What every store does, the one in memory and the one on a Redis server alike."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from stores import letters_to, open_memory, open_redis

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from stores import Opened

    from proxy.store.contract import StateStore

    Advance = Callable[[float], Awaitable[None]]

LIFE_SECONDS = 0.2


@pytest.fixture(params=["memory", "redis"])
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    async with open_memory() if request.param == "memory" else open_redis(tmp_path) as opened:
        yield opened


@pytest.fixture
def store(opened: Opened) -> StateStore:
    return opened.store


@pytest.fixture
def advance(opened: Opened) -> Advance:
    return opened.advance


async def test_the_first_that_is_willing_leads(store: StateStore) -> None:
    assert (await store.beat("a", LIFE_SECONDS, willing=False)).leader == ""
    assert (await store.beat("b", LIFE_SECONDS)).leader == "b"
    standing = await store.beat("a", LIFE_SECONDS)
    assert standing.leader == "b"
    assert standing.members == {"a", "b"}
    assert 0 < standing.valid_seconds < 1.01 * LIFE_SECONDS


async def test_a_store_tells_for_how_long_it_remembers_who_led(store: StateStore, advance: Advance) -> None:
    assert (await store.beat("a", LIFE_SECONDS)).memory_seconds < LIFE_SECONDS / 4
    await advance(LIFE_SECONDS)
    assert LIFE_SECONDS * 0.99 < (await store.beat("b", LIFE_SECONDS)).memory_seconds < 20 * LIFE_SECONDS


async def test_a_beat_renews_the_lease_in_the_same_epoch(store: StateStore, advance: Advance) -> None:
    first = await store.beat("a", LIFE_SECONDS)
    for _ in range(4):
        await advance(LIFE_SECONDS / 3)
        standing = await store.beat("a", LIFE_SECONDS)
    assert (standing.leader, standing.epoch) == ("a", first.epoch)


async def test_a_lease_that_ends_goes_to_another_in_a_later_epoch_and_the_dead_are_forgotten(
    store: StateStore, advance: Advance
) -> None:
    first = await store.beat("a", LIFE_SECONDS)
    await advance(LIFE_SECONDS * 1.2)
    second = await store.beat("b", LIFE_SECONDS)
    assert (second.leader, second.members) == ("b", frozenset({"b"}))
    assert second.epoch > first.epoch


async def test_one_that_let_its_lease_end_leads_again_only_in_a_new_epoch(store: StateStore, advance: Advance) -> None:
    first = await store.beat("a", LIFE_SECONDS)
    await advance(LIFE_SECONDS * 1.2)
    assert (await store.beat("a", LIFE_SECONDS)).epoch > first.epoch


async def test_who_resigns_is_followed_at_once(store: StateStore) -> None:
    first = await store.beat("a", LIFE_SECONDS)
    await store.beat("b", LIFE_SECONDS)
    await store.resign("a")
    second = await store.beat("b", LIFE_SECONDS)
    assert (second.leader, second.members) == ("b", frozenset({"b"}))
    assert second.epoch > first.epoch


async def test_a_lease_that_is_given_up_is_told_to_the_others(store: StateStore) -> None:
    async with letters_to(store, "b") as got:
        await store.beat("a", 5.0)
        await store.beat("b", 5.0)
        await store.resign("a")
        async with asyncio.timeout(5):
            assert await got.get() == b""
        assert (await store.beat("b", 5.0)).leader == "b"
        await store.beat("c", 5.0)
        await store.resign("c")
        await store.post("b", b"letter")
        assert await got.get() == b"letter"


async def test_a_follower_that_resigns_takes_nothing_from_the_leader(store: StateStore) -> None:
    first = await store.beat("a", LIFE_SECONDS)
    await store.beat("b", LIFE_SECONDS)
    await store.resign("b")
    second = await store.beat("a", LIFE_SECONDS)
    assert (second.leader, second.epoch, second.members) == ("a", first.epoch, frozenset({"a"}))


async def test_letters_reach_whom_they_are_for_in_their_order(store: StateStore) -> None:
    sent = [b"%d" % i for i in range(100)]
    async with letters_to(store, "a") as got, letters_to(store, "b") as other:
        for letter in sent:
            await store.post("a", letter)
        assert [await got.get() for _ in sent] == sent
        assert other.empty()


async def test_a_letter_to_nobody_is_lost_without_an_error(store: StateStore) -> None:
    await store.post("nobody", b"letter")


async def test_only_the_leader_of_this_epoch_posts_as_the_leader(store: StateStore, advance: Advance) -> None:
    async with letters_to(store, "b") as got:
        first = await store.beat("a", LIFE_SECONDS)
        assert await store.post_as_leader("b", b"1", "a", first.epoch)
        assert not await store.post_as_leader("b", b"2", "b", first.epoch)
        assert not await store.post_as_leader("b", b"3", "a", first.epoch - 1)
        await advance(LIFE_SECONDS * 1.2)
        assert not await store.post_as_leader("b", b"4", "a", first.epoch)  # nobody else leads, and yet
        second = await store.beat("b", LIFE_SECONDS)
        assert not await store.post_as_leader("b", b"5", "a", first.epoch)
        assert await store.post_as_leader("b", b"6", "b", second.epoch)
        assert [await got.get(), await got.get()] == [b"1", b"6"]


async def test_the_first_value_of_a_name_is_everybodys(store: StateStore) -> None:
    assert await store.share("secret", b"\x00\xff") == b"\x00\xff"
    assert await store.share("secret", b"other") == b"\x00\xff"
    assert await store.share("another", b"other") == b"other"
