"""What becomes of calls when a real Redis server fails, and the kinds of servers there are."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio as aioredis
import trustme
from redis_server import PROGRAM, WHY_NOT, RedisServer, free_port
from stores import letters_to

from proxy.store.address import with_password
from proxy.store.contract import StoreError
from proxy.store.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from proxy.core.fleet import Standing

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
TIMEOUT_SECONDS = 0.2


@asynccontextmanager
async def running(directory: Path, *options: str) -> AsyncIterator[RedisServer]:
    server = RedisServer(directory, *options)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


@asynccontextmanager
async def opened(url: str, timeout_seconds: float = 5.0) -> AsyncIterator[RedisStore]:
    store = RedisStore.from_url(url, "tests", timeout_seconds)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with running(tmp_path) as server:
        yield server


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    async with opened(server.url) as store:
        yield store


async def test_a_dead_server_is_an_error_at_once_and_its_successor_is_used(
    server: RedisServer, store: RedisStore
) -> None:
    first = await store.beat("a", 1.0)
    await server.kill()
    with pytest.raises(StoreError):
        await store.beat("a", 1.0)
    await server.start()
    second = await store.beat("a", 1.0)  # with no memory of the scripts, the lease and the members
    assert (second.leader, second.members) == ("a", frozenset({"a"}))
    assert second.epoch > first.epoch


async def test_a_server_that_hangs_is_an_error_in_time_for_all_who_ask_and_back_when_it_wakes(
    server: RedisServer,
) -> None:
    store = RedisStore.from_url(server.url, "tests", TIMEOUT_SECONDS)
    await _eventually(store)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        began = monotonic()
        told = await asyncio.gather(*(store.post("b", b"letter") for _ in range(100)), return_exceptions=True)
        assert all(isinstance(error, StoreError) for error in told)
        assert monotonic() - began < 5 * TIMEOUT_SECONDS  # all together: more than there are connections for
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert (await _eventually(store)).leader == "a"
    await store.close()


async def test_a_flushed_server_forgets_all_but_that_epochs_grow(server: RedisServer, store: RedisStore) -> None:
    first = await store.beat("a", 1.0)
    await store.beat("b", 1.0)
    async with aioredis.Redis.from_url(server.url) as direct:
        await direct.flushall()
        await direct.script_flush()
    assert not await store.post_as_leader("b", b"letter", "a", first.epoch)
    second = await store.beat("b", 1.0)
    assert (second.leader, second.members) == ("b", frozenset({"b"}))
    assert second.epoch > first.epoch
    assert second.memory_seconds == 0.0
    assert 0.0 < (await store.beat("b", 1.0)).memory_seconds < 10.0


async def test_a_server_that_nobody_has_used_knows_all_who_ever_led(server: RedisServer, store: RedisStore) -> None:
    await store.open_unused()
    first = await store.beat("a", 1.0)
    assert (first.leader, first.members) == ("a", frozenset({"a"}))
    assert first.memory_seconds > 1e9


async def test_a_server_without_memory_is_an_error(tmp_path: Path) -> None:
    async with (
        running(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction") as full,
        opened(full.url) as store,
    ):
        with pytest.raises(StoreError, match="OutOfMemory"):
            await store.beat("a", 1.0)


LEASE, MEMBERS = "slai:{tests}:v1:lease", "slai:{tests}:v1:members"


@pytest.mark.parametrize(
    "found",
    [
        {"epoch": "junk", "ends_at": "junk"},
        {"leader": "gone", "epoch": "1e300", "ends_at": "0"},
        {"leader": "gone", "epoch": "nan", "ends_at": "nan"},
        {"leader": "gone", "epoch": "-5", "ends_at": "-inf"},
    ],
)
async def test_a_lease_that_makes_no_sense_is_given_anew(
    server: RedisServer, store: RedisStore, found: dict[Any, Any]
) -> None:
    async with aioredis.Redis.from_url(server.url) as direct:
        await direct.hset(LEASE, mapping=found)
    standing = await store.beat("a", 1.0)
    if standing.leader != "a":  # as long as one may hold it
        await asyncio.sleep(1.0)
        standing = await store.beat("a", 1.0)
    assert standing.leader == "a"
    assert 0 < standing.epoch < 2**53
    assert await store.post_as_leader("b", b"letter", "a", standing.epoch)


async def test_a_lease_of_a_clock_that_was_set_back_ends_in_time(server: RedisServer, store: RedisStore) -> None:
    first = await store.beat("a", 0.3)
    async with aioredis.Redis.from_url(server.url) as direct:
        await direct.hset(LEASE, "ends_at", str(int((first.epoch / 1e6 + 3600) * 1e6)))
        await direct.zadd(MEMBERS, {"a": first.epoch + 3600e6})
    assert (await store.beat("b", 0.3)).leader == "a"  # who may still count on it
    await asyncio.sleep(0.35)
    second = await store.beat("b", 0.3)
    assert (second.leader, second.members) == ("b", frozenset({"b"}))
    assert second.epoch > first.epoch


async def test_members_that_are_none_neither_stay_nor_stand_in_the_way(server: RedisServer, store: RedisStore) -> None:
    await store.beat("a", 1.0)
    async with aioredis.Redis.from_url(server.url) as direct:
        await direct.zadd(MEMBERS, {b"\xff\xfe": (await direct.time())[0] * 1e6 + 1.5e6, b"for ever": float("inf")})
    standing = await store.beat("a", 1.0)
    assert standing.leader == "a"
    assert standing.members == {"a", "\ufffd\ufffd"}


async def test_a_key_of_another_kind_is_an_error(server: RedisServer, store: RedisStore) -> None:
    async with aioredis.Redis.from_url(server.url) as direct:
        await direct.set(LEASE, "x")
        with pytest.raises(StoreError, match="WRONGTYPE"):
            await store.beat("a", 1.0)


async def test_letters_come_again_after_a_restart(server: RedisServer, store: RedisStore) -> None:
    async with letters_to(store, "a") as got:
        await server.kill()
        await server.start()
        async with asyncio.timeout(10):
            while got.empty():
                await asyncio.sleep(0.01)
                await _post_anyhow(store)


async def test_a_call_ends_when_it_is_cancelled_however_far_it_is(server: RedisServer) -> None:
    for turns in range(1, 40):
        async with opened(server.url) as store, asyncio.TaskGroup() as group:
            call = group.create_task(store.post("a", b"letter"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if not call.done():
                call.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert call.done(), turns


async def test_pools_of_one_server_know_nothing_of_each_other(server: RedisServer, store: RedisStore) -> None:
    other = RedisStore.from_url(server.url, "others")
    assert (await store.beat("a", 1.0)).leader == "a"
    standing = await other.beat("b", 1.0)
    assert (standing.leader, standing.members) == ("b", frozenset({"b"}))
    await other.close()


async def test_a_cluster(tmp_path: Path) -> None:
    async with running(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        async with aioredis.Redis.from_url(node.url) as direct:
            await direct.cluster("ADDSLOTSRANGE", "0", "16383")
            async with asyncio.timeout(10):
                while (await direct.cluster("INFO"))["cluster_state"] != "ok":  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.05)
        async with opened(node.url.replace("redis://", "redis+cluster://")) as store:
            standing = await store.beat("a", 1.0)
            async with letters_to(store, "b") as got:
                assert await store.post_as_leader("b", b"letter", "a", standing.epoch)
                assert await got.get() == b"letter"
            assert await store.share("secret", b"1") == b"1"
            await store.resign("a")


async def test_the_master_that_a_sentinel_knows(tmp_path: Path, server: RedisServer) -> None:
    sentinel = RedisServer(tmp_path)
    sentinel.watch("fleet", server.port)
    await sentinel.start()
    try:
        async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/fleet") as store:
            assert (await _eventually(store)).leader == "a"
        async with opened(server.url) as direct:
            assert (await direct.beat("b", 1.0)).leader == "a"
    finally:
        await sentinel.kill()


async def test_tls_and_a_user_with_only_the_rights_that_are_needed(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    key, chain, root = (tmp_path / name for name in ("key.pem", "chain.pem", "root.pem"))
    certificate.private_key_pem.write_to_path(str(key))
    certificate.cert_chain_pems[0].write_to_path(str(chain))
    authority.cert_pem.write_to_path(str(root))
    user = ("--user", "proxy", "on", ">secret", "~slai:*", "&slai:*", "+@all", "-@admin", "-@dangerous")
    with_tls = RedisServer(tmp_path, *user)
    with_tls.serve_tls(key, chain, root)
    await with_tls.start()
    try:
        url = f"rediss://proxy:secret@127.0.0.1:{with_tls.port}?ssl_ca_certs={root}"
        async with opened(url) as store:
            assert (await store.beat("a", 1.0)).leader == "a"
        async with opened(url.replace("secret", "wrong")) as store:
            with pytest.raises(StoreError):
                await store.beat("a", 1.0)
        async with opened(f"rediss://proxy:secret@127.0.0.1:{with_tls.port}") as store:
            with pytest.raises(StoreError):  # nobody vouches for the server
                await store.beat("a", 1.0)
    finally:
        await with_tls.kill()


async def test_a_password_with_characters_that_mean_something_in_a_url(tmp_path: Path) -> None:
    async with running(tmp_path, "--requirepass", "p:w@/?#%") as server:
        async with opened(with_password(server.url, "p:w@/?#%")) as store:
            assert (await store.beat("a", 1.0)).leader == "a"
        async with opened(server.url) as store:
            with pytest.raises(StoreError):
                await store.beat("a", 1.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1", "127.0.0.1:6379", "redis+sentinel://127.0.0.1:26379"])
def test_what_is_no_url_of_a_server_is_told(url: str) -> None:
    with pytest.raises(ValueError, match="redis"):
        RedisStore.from_url(url)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0?colour=red", "redis://127.0.0.1:1/0?socket_timeout=long"])
async def test_options_of_a_url_that_nobody_knows_are_told_at_once(url: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"colour|socket_timeout"):
        RedisStore.from_url(url)


async def _eventually(store: RedisStore) -> Standing:
    async with asyncio.timeout(10):
        while True:
            try:
                return await store.beat("a", 1.0)
            except StoreError:
                await asyncio.sleep(0.02)


async def _post_anyhow(store: RedisStore) -> None:
    with suppress(StoreError):
        await store.post("a", b"letter")
