"""Clients' connections: how many there may be, and how long each may keep the proxy waiting.

aiohttp bounds the size of what clients send, but not the time that they take for it: a connection on which half a head
has come is held for as long as the client likes, and so is one whose client has stopped to read. Both cost a client
next to nothing. So a layer between the transport and aiohttp notes when a connection began to wait for its client, and
one sweep a second ends those that wait for too long; nothing of it is on the way of a token.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from time import monotonic
from typing import TYPE_CHECKING, cast

from aiohttp import web

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from proxy.config import Settings
    from proxy.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
_HANDSHAKE_SECONDS = 10.0
_SHUTDOWN_SECONDS = 5.0
_MOST_UNSENT_BYTES = 1 << 17
_FEWEST = 64
_MOST_FILES = 1 << 16
_TELL_SECONDS = 10.0
"""Least time between two lines of the log about the same limit."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nx-slai-reason: too_many_connections\r\n"
    b"Connection: close\r\nContent-Length: 0\r\n\r\n"
)
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Most connections, in all and per client address, and most seconds of waiting for a client."""

    most: int
    most_per_address: int | None = None
    head_seconds: float = 15.0
    """From the first byte of a request, or from the beginning of a connection, to the end of the head."""
    idle_seconds: float = 75.0
    """Between two requests."""
    write_seconds: float = 60.0
    """Until a client has read at least most of what is ready for it."""


def connection_limits(settings: Settings) -> ConnectionLimits:
    """The limits that the settings set. The process may open more files for it, if the system lets it."""
    return ConnectionLimits(
        settings.max_connections or max(_FEWEST, _files_allowed() // 2),
        settings.max_connections_per_address,
        head_seconds=settings.head_timeout_seconds,
        write_seconds=settings.write_timeout_seconds,
    )


def _files_allowed() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)


def raise_file_limit() -> None:
    """Let the process open as many files as it may: every request under way takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _files_allowed()
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Connections:
    """All connections of clients."""

    def __init__(self, limits: ConnectionLimits, now: Callable[[], float]) -> None:
        self.limits = limits
        self.refused: Counter[str] = Counter(process=0, address=0)
        """Connections refused, by the limit that they would have broken: ``process`` or ``address``."""
        self.ended: Counter[str] = Counter(head=0, idle=0, read=0)
        """Connections ended, by what they waited for: ``head``, ``idle`` or ``read``."""
        self._now = now
        self._open: dict[web.RequestHandler, _Connection] = {}
        self._addresses: Counter[str] = Counter()
        self._told: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def under_way(self) -> int:
        """Requests that are not over, whatever they are."""
        return sum(connection.waits_since is None for connection in self._open.values())

    def tell(self, metrics: Metrics) -> None:
        """Show how many there are, and how many were refused and ended."""
        metrics.watch_gauge("slai.connections", "Open connections of clients", lambda: len(self))
        metrics.watch("slai.connections.refused", "Connections refused, by limit", lambda: self.refused, "limit")
        metrics.watch(
            "slai.connections.ended", "Connections ended, by what they waited for", lambda: self.ended, "waited_for"
        )

    def protocol(self, server: web.Server) -> asyncio.Protocol:
        """Make the protocol of a connection that is about to begin."""
        return _Connection(self, server, self._now)

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """End all connections that have kept us waiting for too long."""
        now = self._now()
        for connection in list(self._open.values()):
            if (waits_for := connection.overdue(self.limits, now)) is not None:
                self.ended[waits_for] += 1
                connection.end(tell=waits_for == "head")

    def end_all(self) -> None:
        """Break all connections."""
        for connection in list(self._open.values()):
            connection.end(tell=False)

    def busy(self, handler: web.RequestHandler, *, is_busy: bool) -> None:
        """Note that a request on a connection has begun or ended."""
        connection = self._open.get(handler)
        if connection is not None:
            connection.waits_since = None if is_busy else self._now()
            connection.head_begun = False

    def admit(self, connection: _Connection) -> bool:
        """Count a new connection, if there is room for it."""
        most = self.limits.most_per_address
        if len(self._open) >= self.limits.most:
            self._refuse("process", f"{self.limits.most} connections are open, the most that may be (max_connections)")
        elif most is not None and self._addresses[connection.address] >= most:
            told = f"{connection.address} has {most} connections, the most that it may (max_connections_per_address)"
            self._refuse("address", told)
        else:
            self._open[connection.handler] = connection
            self._addresses[connection.address] += 1
            return True
        return False

    def forget(self, connection: _Connection) -> None:
        """Take a connection out of the account that is over."""
        if self._open.pop(connection.handler, None) is None:
            return
        self._addresses[connection.address] -= 1
        if not self._addresses[connection.address]:
            del self._addresses[connection.address]

    def _refuse(self, limit: str, told: str) -> None:
        self.refused[limit] += 1
        now = self._now()
        if now - self._told.get(limit, now - _TELL_SECONDS) >= _TELL_SECONDS:
            self._told[limit] = now
            _log.warning("%s: more are refused", told)


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's handler, and notes since when the client keeps it waiting."""

    __slots__ = (
        "_admitted",
        "_all",
        "_closing_since",
        "_now",
        "_stuck_since",
        "_transport",
        "address",
        "handler",
        "head_begun",
        "waits_since",
    )

    def __init__(self, all_connections: Connections, server: web.Server, now: Callable[[], float]) -> None:
        self._all = all_connections
        self._now = now
        self.handler = server()
        self.address = ""
        self._transport: asyncio.Transport | None = None
        self._admitted = False
        self.waits_since: float | None = None
        """For a head, or for its first byte; ``None`` while a request is under way."""
        self.head_begun = True
        """Whether it has begun, as the first one of a connection has at once."""
        self._stuck_since: float | None = None
        """When the client had not read so much that no more is written."""
        self._closing_since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.address = _address(transport.get_extra_info("peername"))
        self._admitted = self._all.admit(self)
        if not self._admitted:
            self._transport.write(_FULL)
            self._transport.close()
            return
        self.waits_since = self._now()
        _bound_by_reader(transport, self._all.limits.write_seconds)
        self.handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._admitted:
            return
        if self.waits_since is not None and not self.head_begun:
            self.waits_since, self.head_begun = self._now(), True
        self.handler.data_received(data)

    def eof_received(self) -> None:
        if self._admitted:
            self.handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._admitted:
            self._all.forget(self)
            self.handler.connection_lost(exc)

    def pause_writing(self) -> None:
        self._stuck_since = self._now()
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self._stuck_since = None
        self.handler.resume_writing()

    def overdue(self, limits: ConnectionLimits, now: float) -> str | None:
        """What the connection has waited for too long, if it has."""
        if self._closing_since is None and self._transport is not None and self._transport.is_closing():
            self._closing_since = now  # it has yet to be rid of what the client does not read
        for since in (self._stuck_since, self._closing_since):
            if since is not None and now - since >= limits.write_seconds:
                return "read"
        if self.waits_since is None or self._closing_since is not None:
            return None
        limit = limits.head_seconds if self.head_begun else limits.idle_seconds
        if now - self.waits_since < limit:
            return None
        return "head" if self.head_begun else "idle"

    def end(self, *, tell: bool) -> None:
        """Break the connection; with ``tell`` say first that the request did not come in time."""
        if self._transport is None:
            return
        if tell:
            self._transport.write(_TIMEOUT)
            self._transport.close()
        else:
            self._transport.abort()


CONNECTIONS = web.AppKey("connections", Connections)


def limit_connections(app: web.Application, settings: Settings) -> Connections:
    """Keep an account of the connections to an application whose middlewares tell it of requests."""
    app[CONNECTIONS] = connections = Connections(connection_limits(settings), monotonic)
    return connections


@web.middleware
async def note_requests(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Tell the connections which of them have a request under way."""
    connections, protocol = request.app[CONNECTIONS], request.protocol
    connections.busy(protocol, is_busy=True)
    try:
        return await handler(request)
    finally:
        connections.busy(protocol, is_busy=False)


class Site(web.BaseSite):
    """Listens for clients, with their connections under the limits."""

    def __init__(
        self,
        runner: web.AppRunner,
        connections: Connections,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        backlog: int = 4096,
        shared: bool = False,
    ) -> None:
        """``shared``: with other processes, among which the system deals the connections out."""
        super().__init__(runner, ssl_context=tls, backlog=backlog)
        self._connections = connections
        self._host = host
        self._port = port
        self._shared = shared

    @property
    def name(self) -> str:
        return f"{'http' if self._ssl_context is None else 'https'}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            OSError: the address is not free or not ours.
        """
        await super().start()
        server = self._runner.server
        assert server is not None
        tls = self._ssl_context
        self._server = await asyncio.get_running_loop().create_server(
            lambda: self._connections.protocol(server),
            self._host,
            self._port,
            ssl=tls,
            backlog=self._backlog,
            reuse_port=self._shared or None,
            ssl_handshake_timeout=None if tls is None else _HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=None if tls is None else _SHUTDOWN_SECONDS,
        )


def _bound_by_reader(transport: asyncio.BaseTransport, seconds: float) -> None:
    """Have the system keep little of what a client does not read, and end a connection on which nothing arrives.

    Left to itself it would take up to four megabytes for each client that has stopped to read, and let its answer be
    generated to the end for nobody. With less taken, the transport's own buffer fills, and ``pause_writing`` tells.
    """
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for option, value in (("TCP_NOTSENT_LOWAT", _MOST_UNSENT_BYTES), ("TCP_USER_TIMEOUT", int(seconds * 1000))):
        if (number := getattr(socket, option, None)) is not None:  # both are Linux's
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, number, value)


def _address(peer: object) -> str:
    """What stands for a client: its address, or its network of 64 bits, all of which one host may have."""
    if not isinstance(peer, tuple):
        return ""  # a Unix socket
    try:
        address = ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return str(peer[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(IPv6Address(int(address) >> 64 << 64)) + "/64"
    return str(address)
