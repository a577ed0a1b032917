"""The store of replicas on several machines, or in several processes: a Redis or Valkey server, 6.2 or later.

All keys of a pool carry one hash tag, so that in cluster mode they lie together and a function may use them all.
Letters are published, not queued: one that nobody hears is lost, and its successor's number tells. So a replica that is
away leaves nothing behind, and memory does not grow with what happens.
"""

from __future__ import annotations

import asyncio
import logging
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

import redis.asyncio as aioredis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from proxy.core.fleet import Standing
from proxy.store.address import check_url
from proxy.store.contract import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

VERSION = "v1"
"""Of keys, letters and functions: replicas of another version are another pool."""
_CONNECTIONS = 16
_MICROSECONDS = 1e6
_RECONNECT_SECONDS = (0.05, 1.0)
_PING_SECONDS = 5.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


class RedisStore:
    """One pool on a server. Every call ends within ``timeout_seconds``, whatever has become of the server."""

    def __init__(
        self,
        client: aioredis.Redis | RedisCluster,
        pool: str,
        timeout_seconds: float,
        *,
        finders: Sequence[aioredis.Redis] = (),
    ) -> None:
        """``finders``: clients of those who tell where the server is; they end with the store."""
        self._client = client
        self._finders = finders
        self._calls: set[asyncio.Future[Any]] = set()
        self._timeout_seconds = timeout_seconds
        self._prefix = f"slai:{{{pool}}}:{VERSION}"
        self._lease, self._members = f"{self._prefix}:lease", f"{self._prefix}:members"
        self._beat, self._post, self._resign = (
            client.register_script(_script(name)) for name in ("beat", "post", "resign")
        )

    @classmethod
    def from_url(cls, url: str, pool: str = "default", timeout_seconds: float = 0.5) -> RedisStore:
        """Open a store without connecting yet.

        ``url``: ``redis://``, ``rediss://`` (TLS) or ``unix://`` as redis-py has them; ``redis+cluster://`` and
        ``rediss+cluster://`` for any node of a cluster; ``redis+sentinel://HOST:PORT,HOST:PORT/NAME`` for the master
        that sentinels know by that name.

        Raises:
            TypeError: an option behind the ``?`` of the URL is not known.
            ValueError: the URL is none of these.
        """
        client, finders = _connect(url, timeout_seconds)
        return cls(client, pool, timeout_seconds, finders=finders)

    async def beat(self, replica: str, life_seconds: float, *, willing: bool = True) -> Standing:
        life = round(life_seconds * _MICROSECONDS)
        leader, epoch, left, members, memory = await self._bounded(
            self._beat(keys=(self._lease, self._members), args=(replica, life, int(willing)))
        )
        names = frozenset(name.decode(errors="replace") for name in members)
        leads = leader.decode(errors="replace")
        return Standing(leads, int(epoch), int(left) / _MICROSECONDS, names, int(memory) / _MICROSECONDS)

    async def open_unused(self) -> None:
        """Tell a server that nobody has used before that it knows all who ever led here: nobody.

        Else whoever comes first would wait until a lease of which it does not know were over.

        Raises:
            StoreError: as ``beat``.
        """
        await self._bounded(self._client.hset(self._lease, "born", "0"))

    async def resign(self, replica: str) -> None:
        await self._bounded(self._resign(keys=(self._lease, self._members), args=(replica, self._channel(""))))

    async def post(self, to: str, letter: bytes) -> None:
        await self._bounded(self._client.publish(self._channel(to), letter))

    async def post_as_leader(self, to: str, letter: bytes, replica: str, epoch: int) -> bool:
        arguments = (replica, epoch, self._channel(to), letter)
        return bool(await self._bounded(self._post(keys=(self._lease,), args=arguments)))

    async def listen(self, replica: str, on_letter: Callable[[bytes], None]) -> None:
        pause, longest = _RECONNECT_SECONDS
        comes = True
        while True:
            try:
                async with self._client.pubsub() as subscription:
                    await self._bounded(subscription.subscribe(self._channel(replica)))
                    pause, comes = _RECONNECT_SECONDS[0], True
                    while True:
                        # A connection that is cut without a word would never tell: a ping does.
                        waiting = subscription.get_message(timeout=_PING_SECONDS)
                        found = await self._bounded(waiting, _PING_SECONDS + self._timeout_seconds)
                        if found is None:
                            await self._bounded(subscription.ping())
                        elif found["type"] == "message":
                            on_letter(found["data"])
            except (RedisError, OSError, StoreError) as error:
                # Once, however long it lasts.
                _log.log(logging.WARNING if comes else logging.DEBUG, "letters do not come: %s", error)
                comes = False
                await asyncio.sleep(pause)
                pause = min(longest, 2 * pause)

    async def share(self, name: str, value: bytes) -> bytes:
        key = f"{self._prefix}:shared:{name}"
        await self._bounded(self._client.set(key, value, nx=True))
        found = await self._bounded(self._client.get(key))
        if not isinstance(found, bytes):
            raise StoreError(f"{key} was lost at once")
        return found

    async def close(self) -> None:
        if self._calls:
            await asyncio.wait(self._calls, timeout=self._timeout_seconds)  # they have been cancelled
        for client in (self._client, *self._finders):
            await client.aclose()

    def _channel(self, replica: str) -> str:
        return f"{self._prefix}:to:{replica}"

    async def _bounded(self, call: Awaitable[T], seconds: float | None = None) -> T:
        """Wait for an answer, but not longer than the store may take, and not when cancelled.

        In a task of its own, as the client does not always end when it is told to.
        """
        calling = asyncio.ensure_future(call)
        self._calls.add(calling)
        calling.add_done_callback(self._forget)
        limit = self._timeout_seconds if seconds is None else seconds
        try:
            await asyncio.wait((calling,), timeout=limit)
            if calling.done():
                return calling.result()
        except (RedisError, OSError) as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error
        finally:
            calling.cancel()
        raise StoreError(f"no answer within {limit:g} s")

    def _forget(self, call: asyncio.Future[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # of one that nobody waits for any more


def _script(name: str) -> str:
    return files(__package__).joinpath("lua", f"{name}.lua").read_text()


def _connect(url: str, timeout_seconds: float) -> tuple[aioredis.Redis | RedisCluster, Sequence[aioredis.Redis]]:
    # A call that fails is told at once: what to do then is decided by those who asked, and a retry would be late.
    options: dict[str, Any] = {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
    }
    parts = urlsplit(check_url(url))
    match parts.scheme:
        case "redis" | "rediss" | "unix":
            pool = aioredis.BlockingConnectionPool.from_url(
                url, max_connections=_CONNECTIONS, timeout=timeout_seconds, **options
            )
            pool.connection_class(**pool.connection_kwargs)  # what it does not know would only be told by each call
            return aioredis.Redis.from_pool(pool), ()
        case "redis+cluster" | "rediss+cluster":
            plain = urlunsplit(parts._replace(scheme=parts.scheme.removesuffix("+cluster")))
            return RedisCluster.from_url(plain, max_connections=_CONNECTIONS, **options), ()
        case "redis+sentinel":
            nodes = [_host_and_port(node) for node in parts.netloc.rpartition("@")[2].split(",")]
            name = parts.path.strip("/")
            told = {"username": parts.username, "password": parts.password}
            options |= {key: value and unquote(value) for key, value in told.items()}
            options |= {key: values[-1] for key, values in parse_qs(parts.query).items() if key == "db"}
            sentinel = Sentinel(nodes, socket_timeout=timeout_seconds)  # type: ignore[no-untyped-call]
            return sentinel.master_for(name, **options), sentinel.sentinels
        case scheme:
            raise ValueError(f"no URL of a Redis server: {scheme}")


def _host_and_port(node: str) -> tuple[str, int]:
    host, _, port = node.rpartition(":")
    return (host.strip("[]"), int(port)) if host else (port, 26379)
