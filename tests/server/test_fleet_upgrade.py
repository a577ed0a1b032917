"""Replicas that are exchanged one after another, by the same version or by another, at a real Redis server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import redis.asyncio as aioredis
from live_proxy import live_proxy, until
from redis_server import PROGRAM, WHY_NOT, RedisServer
from scripted_engine import scripted_engine, two_tokens

from proxy.core.events import DrainStarted
from proxy.core.fleet import Member, Role
from proxy.server.app import PROXY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from live_proxy import LiveProxy
    from scripted_engine import Call, ScriptedEngine

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
VERSION = "proxy.store.redis.VERSION"
SLOTS = 2


@pytest.fixture
async def redis_server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path) as server:
        yield server


class Busy:
    """An engine's script that counts what is under way."""

    def __init__(self) -> None:
        self.active = 0
        self.most = 0

    async def __call__(self, call: Call) -> None:
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            await two_tokens(call)
        finally:
            self.active -= 1


def member_of(proxy: LiveProxy) -> Member:
    fleet = proxy.app[PROXY].fleet
    assert fleet is not None
    return fleet.member


def settled(*proxies: LiveProxy) -> bool:
    """Whether one leads and the others follow it, and it knows them."""
    roles = sorted(member_of(proxy).role for proxy in proxies)
    leaders = {member_of(proxy).leader for proxy in proxies}
    heard = [line.heard for proxy in proxies if (line := member_of(proxy)._following.line) is not None]
    expected = sorted([Role.LEADER] + [Role.FOLLOWER] * (len(proxies) - 1))
    return roles == expected and len(leaders) == 1 and all(heard) and len(heard) == len(proxies) - 1


async def test_two_versions_are_two_fleets_that_share_among_themselves(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine has what each of them may give it, and not what each replica may."""
    busy = Busy()
    async with scripted_engine(busy) as one, AsyncExitStack() as stack:
        fleets: dict[str, list[LiveProxy]] = {"v1": [], "v2": []}
        for version, proxies in fleets.items():
            monkeypatch.setattr(VERSION, version)
            for _ in range(2):
                entered = live_proxy(one, redis=redis_server.url, max_num_seqs=SLOTS)
                proxies.append(await stack.enter_async_context(entered))
        for proxies in fleets.values():
            await until(lambda proxies=proxies: settled(*proxies), 20)  # type: ignore[misc]
        for name, proxies in fleets.items():
            busy.most = 0
            answers = await asyncio.gather(*(proxy.fetch() for proxy in proxies for _ in range(10)))
            assert [status for status, _ in answers] == [200] * 20
            assert busy.most <= SLOTS, f"{name} is one queue"
        busy.most = 0
        everybody = [proxy for proxies in fleets.values() for proxy in proxies]
        answers = await asyncio.gather(*(proxy.fetch() for proxy in everybody for _ in range(10)))
        assert [status for status, _ in answers] == [200] * 40
        assert busy.most <= len(fleets) * SLOTS
        async with aioredis.Redis.from_url(redis_server.url) as direct:
            keys = await direct.keys("slai:{default}:*")
        assert {str(key).split(":")[2] for key in keys} == {"v1", "v2"}
        for proxy in everybody:
            told = proxy.samples("slai_fleet_letters_total")
            assert (told["unread",], told["failed",]) == (0, 0)
    assert "left aside" not in caplog.text


async def keep_asking(proxy: LiveProxy, stop: asyncio.Event, statuses: list[int]) -> None:
    while not stop.is_set():
        statuses.append((await proxy.fetch())[0])


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_a_restart_of_one_after_another_loses_no_request_of_those_that_go_on(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """To the same version, or to another."""
    busy, statuses = Busy(), list[int]()

    async def start(one: ScriptedEngine) -> tuple[AsyncExitStack, LiveProxy]:
        stack = AsyncExitStack()
        proxy = live_proxy(one, redis=redis_server.url, max_num_seqs=SLOTS)
        return stack, await stack.enter_async_context(proxy)

    async with scripted_engine(busy) as one:
        there = [await start(one) for _ in range(3)]
        await until(lambda: settled(*(proxy for _, proxy in there)), 20)
        monkeypatch.setattr(VERSION, version)
        first_to_go = member_of(there[0][1]).id
        assert member_of(there[1][1]).leader == first_to_go
        for number in range(3):
            stack, old = there.pop(0)
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as asking:
                for _, proxy in there:
                    for _ in range(3):
                        asking.create_task(keep_asking(proxy, stop, statuses))
                old.driver.feed(DrainStarted())
                await old.idle()
                await stack.aclose()
                there.append(await start(one))
                await until(lambda: member_of(there[-1][1]).leader, 20)
                if version == "v1":
                    await until(lambda: settled(*(proxy for _, proxy in there)), 20)
                assert (await there[-1][1].fetch())[0] == 200, number
                stop.set()
        await until(lambda: settled(*(proxy for _, proxy in there)), 20)
        assert len(statuses) >= 18
        assert set(statuses) == {200}
        assert busy.most <= SLOTS * (1 if version == "v1" else 2)
        assert busy.active == 0
        for stack, _ in there:
            await stack.aclose()
