"""Several real proxies that meet at a real Redis server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from live_proxy import live_proxy, until
from redis_server import PROGRAM, WHY_NOT, RedisServer
from scripted_engine import scripted_engine, two_tokens

from proxy.core.fleet import Role
from proxy.server.app import PROXY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from live_proxy import LiveProxy
    from scripted_engine import Call

    from proxy.core.fleet import Member

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)


@pytest.fixture
async def redis_server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(tmp_path)
    await server.start()
    yield server
    await server.kill()


def member_of(proxy: LiveProxy) -> Member:
    fleet = proxy.app[PROXY].fleet
    assert fleet is not None
    return fleet.member


async def test_the_first_leads_and_the_others_know(redis_server: RedisServer) -> None:
    async with scripted_engine() as one, live_proxy(one, redis=redis_server.url) as first:
        await until(lambda: member_of(first).role is Role.LEADER)
        async with live_proxy(one, redis=redis_server.url) as second:
            await until(lambda: member_of(second).leader == member_of(first).id)
            assert member_of(second).role is Role.FOLLOWER


async def test_a_follower_asks_the_leader_and_gets_its_answer(redis_server: RedisServer) -> None:
    async with (
        scripted_engine() as one,
        live_proxy(one, redis=redis_server.url) as first,
        live_proxy(one, redis=redis_server.url) as second,
    ):
        await until(lambda: member_of(first).role is Role.LEADER)
        await until(lambda: member_of(second).leader == member_of(first).id)
        for _ in range(3):
            assert (await second.fetch())[0] == 200
        await until(lambda: not first.scheduler.ledger.entries)
        assert second.outcomes() == {"completed": 3}
        assert first.outcomes() == {}


async def test_one_queue_for_all_replicas(redis_server: RedisServer) -> None:
    """An engine with one slot: requests of both replicas go one after the other."""
    active, most = 0, 0

    async def one_after_the_other(call: Call) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await two_tokens(call)
        active -= 1

    async with (
        scripted_engine(one_after_the_other) as one,
        live_proxy(one, redis=redis_server.url, max_num_seqs=1) as first,
        live_proxy(one, redis=redis_server.url, max_num_seqs=1) as second,
    ):
        await until(lambda: member_of(first).role is Role.LEADER)
        await until(lambda: member_of(second).leader == member_of(first).id)
        answers = await asyncio.gather(*(proxy.fetch() for proxy in (first, second) for _ in range(10)))
        assert [status for status, _ in answers] == [200] * 20
        assert most == 1


async def test_how_the_fleet_fares_is_in_the_metrics(redis_server: RedisServer) -> None:
    async with (
        scripted_engine() as one,
        live_proxy(one, redis=redis_server.url) as first,
        live_proxy(one, redis=redis_server.url) as second,
    ):
        await until(lambda: member_of(first).role is Role.LEADER)
        assert (await second.fetch())[0] == 200
        assert first.samples("slai_fleet_role")["leader",] == 1
        assert second.samples("slai_fleet_role") == {("follower",): 1, ("leader",): 0, ("local",): 0, ("roll_call",): 0}
        await until(lambda: first.samples("slai_fleet_replicas")[()] == 2)
        assert second.samples("slai_fleet_letters_total")["sent",] > 0
        assert second.samples("slai_fleet_letters_total")["received",] > 0
        assert second.samples("slai_fleet_beats_total")[()] > 0


async def test_without_the_server_each_decides_alone_and_with_it_they_are_one_again(redis_server: RedisServer) -> None:
    async with (
        scripted_engine() as one,
        live_proxy(one, redis=redis_server.url) as first,
        live_proxy(one, redis=redis_server.url) as second,
    ):
        await until(lambda: member_of(first).role is Role.LEADER)
        await until(lambda: member_of(second).leader == member_of(first).id)
        await redis_server.kill()
        for proxy in (first, second):
            assert (await proxy.fetch())[0] == 200  # waits for as long as the store may be silent, at most
        await until(lambda: {member_of(first).role, member_of(second).role} == {Role.LOCAL}, 20)
        await redis_server.start()
        await until(lambda: {member_of(first).role, member_of(second).role} == {Role.LEADER, Role.FOLLOWER}, 20)
        for proxy in (first, second):
            assert (await proxy.fetch())[0] == 200


async def test_a_replica_starts_and_serves_without_the_server(redis_server: RedisServer) -> None:
    await redis_server.kill()
    async with scripted_engine() as one, live_proxy(one, redis=redis_server.url) as alone:
        assert (await alone.fetch())[0] == 200
        await redis_server.start()
        await until(lambda: member_of(alone).role is Role.LEADER, 20)
        assert (await alone.fetch())[0] == 200
