"""Several real proxies that meet at a real Redis server."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from math import nan
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio as aioredis
from interpreted import interpreted
from live_proxy import live_proxy, until
from redis_server import PROGRAM, WHY_NOT, RedisServer
from scripted_engine import DONE, last, scripted_engine, token, two_tokens, usage
from test_debug import debugged, get

from proxy.core.events import DrainStarted
from proxy.core.fleet import FleetConfig, Letter, Member, Role, letters
from proxy.core.request import Request
from proxy.keys import KeySettings, digest_of
from proxy.server.app import GENERATOR, PROXY
from proxy.server.live import view as live_view
from proxy.store.redis import RedisStore
from proxy.telemetry.chronicle import Stage
from proxy.wire.letters import encode_letter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from live_proxy import LiveProxy
    from scripted_engine import Call, ScriptedEngine


pytestmark = pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)


@pytest.fixture
async def redis_server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path) as server:
        yield server


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


async def test_at_a_server_that_nobody_has_used_the_first_leads_before_it_serves(redis_server: RedisServer) -> None:
    store = RedisStore.from_url(redis_server.url)
    await store.open_unused()
    await store.close()
    async with scripted_engine() as one, live_proxy(one, redis=redis_server.url) as first:
        assert member_of(first).role is Role.LEADER


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


async def test_forged_letters_and_garbage_harm_nobody(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        scripted_engine() as one,
        live_proxy(one, redis=redis_server.url) as first,
        live_proxy(one, redis=redis_server.url) as second,
        aioredis.Redis.from_url(redis_server.url) as direct,
    ):
        leader, follower = member_of(first), member_of(second)
        await until(lambda: leader.role is Role.LEADER)
        await until(lambda: (line := follower._following.line) is not None and line.acknowledged)

        async def send(to: Member, data: bytes) -> None:
            await direct.publish(f"slai:{{default}}:v1:to:{to.id}", data)

        def told(to: Member, sender: str, *notes: letters.Note, leads: bool, epoch: int, number: int = 1) -> bytes:
            written = Letter(sender, to.id, epoch, leads=leads, session=1, number=number, heard=0, notes=notes)
            return encode_letter(written)

        nothing, request = letters.Announced((), (), {}), Request("1", 10)
        bad = letters.Announced((letters.Waits(request, nan),), (), {})
        gone = letters.Announced((), (letters.Runs(request, 1.0, "nowhere", 4),), {"nowhere": 3, one.url: -7})
        epoch = leader.epoch
        for data in (b"\x00", b"\xc1" * 1000, b"\xdd\xff\xff\xff\xff", b"x" * 5_000_000):
            await send(leader, data)
            await send(follower, data)
        await send(leader, told(leader, "ghost", bad, leads=False, epoch=epoch))
        await send(leader, told(leader, "ghost", gone, leads=False, epoch=epoch))
        ghosts = letters.Waits(request, -5.0), letters.Over("2"), letters.SliceOver("1", 3, cached=True)
        await send(leader, told(leader, "another", nothing, *ghosts, leads=False, epoch=epoch))
        await send(leader, told(leader, leader.id, nothing, letters.Waits(request, 0.0), leads=False, epoch=epoch))
        for to in (leader, follower):  # whoever says that it leads, without the store saying so
            await send(to, told(to, "nobody", letters.Call(), leads=True, epoch=2**64 - 1))
        for note in (letters.SendSlice("1", one.url, 5, 0, 1), letters.Send("1", "nowhere"), letters.Leaves()):
            await send(follower, told(follower, leader.id, note, leads=True, epoch=epoch, number=2))
        for proxy in (first, second):
            assert (await proxy.fetch())[0] == 200
        await until(lambda: (leader.role, follower.role) == (Role.LEADER, Role.FOLLOWER), 10)
        await until(lambda: follower.leader == leader.id)
        assert first.samples("slai_fleet_letters_total")["unread",] >= 4
        assert len([r for r in caplog.records if "left aside" in r.message]) == 2, "of each replica one"
        await until(lambda: not first.scheduler.ledger.entries, 10)  # those of the ghosts, too


@interpreted
async def test_a_fault_in_taking_a_letter_in_stops_no_replica(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_engine() as one, live_proxy(one, redis=redis_server.url) as proxy:
        member = member_of(proxy)
        await until(lambda: member.role is Role.LEADER)

        def fail(*_: object) -> None:
            raise KeyError("a fault")

        monkeypatch.setattr(member, "receive", fail)
        letter = Letter("b", member.id, member.epoch, leads=False, session=1, number=1, heard=0)
        async with aioredis.Redis.from_url(redis_server.url) as direct:
            await direct.publish(f"slai:{{default}}:v1:to:{member.id}", encode_letter(letter))
        await until(lambda: proxy.samples("slai_fleet_letters_total")["unread",] == 1)
        assert "a fault" in caplog.text
        assert (await proxy.fetch())[0] == 200


KEY = "sk-test-canary-key"
BEARER = {"Authorization": f"Bearer {KEY}"}


@asynccontextmanager
async def with_keys(
    server: RedisServer, engine: ScriptedEngine, *, tiles: bool = False, **limits: Any
) -> AsyncIterator[tuple[LiveProxy, LiveProxy]]:
    """One that leads and one that follows, with the same key."""
    named = {"k": KeySettings(sha256=digest_of(KEY), **limits)}
    async with (
        live_proxy(engine, redis=server.url, keys=named, tiles=tiles) as first,
        live_proxy(engine, redis=server.url, keys=named, tiles=tiles) as second,
    ):
        await until(lambda: member_of(first).role is Role.LEADER)
        await until(lambda: (line := member_of(second)._following.line) is not None and line.heard)
        yield first, second


async def ask(
    proxy: LiveProxy, path: str = "/v1/completions", body: bytes | None = None
) -> tuple[int, bytes, dict[str, str]]:
    async with proxy.post(path, body, headers=BEARER) as response:
        return response.status, await response.read(), dict(response.headers)


async def test_a_key_has_one_quota_of_requests_and_the_same_answers_everywhere(redis_server: RedisServer) -> None:
    async with scripted_engine() as one, with_keys(redis_server, one, requests_per_minute=4) as (first, second):
        for number, proxy in enumerate((second, first, second, first)):
            status, _, headers = await ask(proxy)
            assert status == 200
            assert headers["x-ratelimit-limit-requests"] == "4"
            assert headers["x-ratelimit-remaining-requests"] == str(3 - number)
        waits = []
        for path in ("/v1/completions", "/v1/embeddings", "/v1/models"):
            for proxy in (second, first):
                status, body, headers = await ask(proxy, path)
                assert status == 429
                assert b'"code": "rate_limit_exceeded"' in body
                assert headers["x-slai-reason"] == "requests_per_minute"
                assert headers["x-ratelimit-remaining-requests"] == "0"
                waits.append(int(headers["Retry-After"]))
        assert waits == sorted(waits), "one after the other, wherever they come"
        assert waits[-1] - waits[0] >= 70
        for proxy in (first, second):
            assert proxy.samples("slai_access_refusals_total") == {("requests_per_minute",): 3}
        assert len(one.calls) == 4
        status, body, _ = await ask(second, "/v1/messages", b'{"model": "m", "messages": [], "max_tokens": 5}')
        assert (status, b"rate_limit_error" in body) == (429, True)


async def test_a_key_has_one_quota_of_tokens_and_what_is_used_anywhere_is_taken(redis_server: RedisServer) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin()
        await go.wait()
        await call.write(token() + last() + usage(10, 5) + DONE)
        await call.end()

    body = b'{"model": "m", "prompt": [1,2,3,4,5,6,7,8,9,10], "stream": true, "max_tokens": 60}'
    async with scripted_engine(script) as one, with_keys(redis_server, one, tokens_per_minute=100) as (first, second):
        quota = member_of(first).claims.quotas["k"]
        async with second.post(body=body, headers=BEARER) as under_way:
            assert under_way.headers["x-ratelimit-remaining-tokens"] == "30"
            for proxy in (second, first):
                status, _, headers = await ask(proxy, body=body)
                assert status == 429
                assert headers["x-slai-reason"] == "tokens_per_minute"
                assert headers["x-should-retry"] == "true"
                assert int(headers["Retry-After"]) in range(22, 67)
                assert int(headers["x-ratelimit-remaining-tokens"]) in (30, 31)
            go.set()
            await under_way.read()
        await until(lambda: (quota.active, quota.reserved) == (0, 0))
        left = quota.tokens(first.driver.now())
        assert left is not None
        assert left.remaining in range(84, 88)
        too_long = body.replace(b"[1,", b"[" + b"1," * 100)
        status, _, headers = await ask(second, body=too_long)
        assert (status, headers["x-should-retry"], headers.get("Retry-After")) == (429, "false", None)
        status, _, headers = await ask(second, body=body)
        assert status == 200
        assert int(headers["x-ratelimit-remaining-tokens"]) in range(14, 18)
        assert second.reasons() == {"tokens_per_minute": 2}


async def test_a_key_may_have_so_many_requests_at_once_everywhere(redis_server: RedisServer) -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await call.gone.wait()

    async with scripted_engine(script) as one, with_keys(redis_server, one, concurrency=2) as (first, second):
        quota = member_of(first).claims.quotas["k"]
        for _ in range(2):
            async with first.post(headers=BEARER), second.post(headers=BEARER):
                for proxy in (second, first):
                    status, _, headers = await ask(proxy)
                    assert (status, headers["x-slai-reason"], headers["Retry-After"]) == (429, "concurrency", "1")
            await until(lambda: not quota.active)


async def test_an_upload_waits_for_the_leaders_word_and_a_client_that_leaves_meanwhile_holds_nothing(
    redis_server: RedisServer,
) -> None:
    async with scripted_engine() as one, with_keys(redis_server, one, concurrency=1) as (first, second):
        quota = member_of(first).claims.quotas["k"]
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 99\r\n\r\n{{"
        )
        _, writer = await asyncio.open_connection("127.0.0.1", second.port)
        writer.write(head.encode())
        await until(lambda: quota.active)
        reader, other = await asyncio.open_connection("127.0.0.1", second.port)
        other.write(head.encode())
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")
        writer.close()
        other.close()
        await until(lambda: not quota.active)
        assert (await ask(second))[0] == 200


async def test_nobody_works_for_a_request_before_the_leader_has_let_it_in(redis_server: RedisServer) -> None:
    """It would be told its prompt's tokens, and inflated, before it is known whether it may come in."""
    long = b'{"model": "m", "prompt": "%b", "stream": true}' % (b"a word " * 1000)
    async with (
        scripted_engine() as one,
        with_keys(redis_server, one, tiles=True, requests_per_minute=1) as (first, second),
    ):
        assert (await ask(first))[0] == 200
        assert (await ask(second, body=long))[0] == 429
        assert len(one.calls) == 1
        async with second.post(body=b"not gzip", headers=BEARER | {"Content-Encoding": "gzip"}) as response:
            assert response.status == 429


async def test_a_refusal_after_the_head_of_a_stream_is_its_only_event(redis_server: RedisServer) -> None:
    """A client that is told that its request waits has got a status already."""
    async with scripted_engine() as one, with_keys(redis_server, one, requests_per_minute=1) as (first, second):
        parts = second.app[GENERATOR]
        parts.comment_seconds = 0.001
        assert (await ask(first))[0] == 200
        known = member_of(second).claims.quotas["k"]
        await until(lambda: known.used(second.driver.now()).requests > 0.5)
        await redis_server.kill()
        asked = asyncio.ensure_future(ask(second))
        await until(lambda: member_of(second).role is Role.LOCAL, 20)
        status, body, _ = await asked
        assert status == 200
        assert body.startswith(b": waiting")
        assert body.splitlines()[-2].startswith(b'data: {"error":')
        assert b'"code": "rate_limit_exceeded"' in body
        assert not body.count(b"[DONE]")


async def test_what_a_key_has_used_outlives_the_leader(redis_server: RedisServer) -> None:
    named = {"k": KeySettings(sha256=digest_of(KEY), requests_per_minute=2)}
    async with scripted_engine() as one, live_proxy(one, redis=redis_server.url, keys=named) as second:
        await until(lambda: member_of(second).role is Role.LEADER)
        async with live_proxy(one, redis=redis_server.url, keys=named) as third:
            await until(lambda: (line := member_of(third)._following.line) is not None and line.heard)
            assert [(await ask(proxy))[0] for proxy in (second, third, second)] == [200, 200, 429]
            second.driver.feed(DrainStarted())
            await until(lambda: member_of(third).role is Role.LEADER, 10.0)
            assert (await ask(third))[0] == 429


async def test_why_a_replica_decides_alone_is_told_once(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        scripted_engine() as one,
        live_proxy(one, redis=redis_server.url) as proxy,
        aioredis.Redis.from_url(redis_server.url) as direct,
    ):
        await until(lambda: member_of(proxy).role is Role.LEADER)
        await direct.delete("slai:{default}:v1:lease")
        await direct.set("slai:{default}:v1:lease", "not ours")
        await until(lambda: member_of(proxy).role is Role.LOCAL)
        await direct.delete("slai:{default}:v1:lease")
        await until(lambda: member_of(proxy).role is Role.LEADER)
        assert caplog.text.count("WRONGTYPE") == 1
        assert caplog.text.count("answers again") == 1


async def ask_first(proxy: LiveProxy) -> bytes:
    """What a client is told that asks before it sends a body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n"
        b"Connection: close\r\n\r\n"
    )
    async with asyncio.timeout(10):
        told = await reader.readline()
        if b" 100 " in told:
            writer.write(b"{}")
            await reader.readline()
            told = await reader.readline()
    writer.close()
    return told


async def test_who_asks_a_follower_before_it_sends_a_body_is_refused_as_elsewhere(redis_server: RedisServer) -> None:
    """A follower cannot tell at once what the leader will say, and asks for the body then."""
    async with (
        live_proxy(redis=redis_server.url) as first,
        live_proxy(redis=redis_server.url) as second,
    ):
        await until(lambda: member_of(first).role is Role.LEADER)
        await until(lambda: member_of(second).leader == member_of(first).id)
        for proxy in (first, second):
            assert (await ask_first(proxy)).startswith(b"HTTP/1.1 503 ")
            assert proxy.reasons() == {"no_engine": 1}
            proxy.driver.feed(DrainStarted())
            assert (await ask_first(proxy)).startswith(b"HTTP/1.1 503 ")
            assert proxy.reasons() == {"no_engine": 1, "draining": 1}


async def test_where_a_request_waits_is_shown(redis_server: RedisServer) -> None:
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await two_tokens(call)

    async with (
        scripted_engine(slow) as one,
        live_proxy(one, redis=redis_server.url, max_num_seqs=1, debug_port=0) as first,
        live_proxy(one, redis=redis_server.url, max_num_seqs=1, debug_port=0) as second,
        debugged(first) as of_first,
        debugged(second) as of_second,
        asyncio.TaskGroup() as group,
    ):
        leader, follower = member_of(first), member_of(second)
        await until(lambda: leader.role is Role.LEADER)
        await until(lambda: follower.leader == leader.id)
        group.create_task(second.fetch())
        await until(lambda: one.calls)
        group.create_task(second.fetch(headers={"x-request-id": "waits"}))
        await until(lambda: first.scheduler.waiting)
        told = await get(of_second, "/debug/requests/waits")
        assert (told["stage"], told["decided_by"]) == ("waiting", leader.id)
        first_one = await get(of_second, "/debug/requests/0")
        assert (first_one["stage"], first_one["engine"]) == (Stage.FIRST_TOKEN, one.url)
        assert sum(second.samples("slai_releases_total").values()) == 1
        name = f"{follower.id}/{told['request_id']}"
        state = await get(of_first, "/debug/state")
        assert state["queues"][0]["head"]["request_id"] == name
        assert state["fleet"] == {"id": leader.id, "role": "leader", "leader": leader.id, "replicas": 2}
        assert (await get(of_second, "/debug/state"))["fleet"]["role"] == "follower"
        for proxy in (first, second):
            parts = proxy.app[PROXY]
            assert parts.chronicle is not None
            assert live_view(parts, parts.chronicle, proxy.driver.now())["waiting"] == 1
        release.set()


async def test_who_comes_after_the_store_has_lost_all_hides_keys_as_the_others_do(redis_server: RedisServer) -> None:
    key = "slai:{default}:v1:shared:secret"
    async with (
        scripted_engine() as one,
        live_proxy(one, redis=redis_server.url) as first,
        aioredis.Redis.from_url(redis_server.url) as direct,
    ):
        await until(lambda: member_of(first).role is Role.LEADER)
        before = await direct.get(key)
        assert before
        await direct.flushall()
        async with asyncio.timeout(10):
            while await direct.get(key) != before:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.02)


async def test_a_leader_that_drains_is_followed_at_once(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = FleetConfig(beat_seconds=3.0, life_seconds=4.2, patience_seconds=4.0, roll_call_seconds=4.0)
    monkeypatch.setattr("proxy.server.fleet.Member", lambda name, scheduler: Member(name, scheduler, slow))
    async with (
        scripted_engine() as one,
        live_proxy(one, redis=redis_server.url) as first,
        live_proxy(one, redis=redis_server.url) as second,
    ):
        await until(lambda: member_of(first).role is Role.LEADER, 10.0)
        await until(lambda: (line := member_of(second)._following.line) is not None and line.heard, 10.0)
        first.driver.feed(DrainStarted())
        await until(lambda: member_of(second).role is Role.LEADER, 2.0)
        assert (await second.fetch())[0] == 200
        assert (await first.fetch())[0] == 503
