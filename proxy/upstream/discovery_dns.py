"""Engines by name: the addresses of a host, or the servers of a service record, looked up again and again."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from proxy.upstream.discovery import SourceError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dns.asyncresolver import Resolver

    from proxy.upstream.discovery import Urls

_LONGEST_SECONDS = 5.0
_NONE = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""There is no such name, or no address of it: so does a headless service answer that has no endpoint."""


class AddressSource:
    """All addresses (A and AAAA) of ``host``; each is an engine at ``port``."""

    def __init__(self, host: str, port: int, prefix: str, interval_seconds: float) -> None:
        self._host, self._port, self._prefix = host, port, prefix
        self._interval_seconds = interval_seconds

    async def watch(self) -> AsyncGenerator[Urls]:
        """See ``Source``."""
        while True:
            yield await self._look()
            await asyncio.sleep(self._interval_seconds)

    async def _look(self) -> Urls:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_LONGEST_SECONDS):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in _NONE:
                return frozenset()
            raise SourceError(f"{self._host} cannot be looked up: {error.strerror}") from None
        except OSError as error:  # a TimeoutError is one as well
            raise SourceError(f"{self._host} cannot be looked up: {str(error) or 'no answer'}") from None
        hosts = {str(address[0]) for _, _, _, _, address in found}
        return frozenset(f"http://{f'[{h}]' if ':' in h else h}:{self._port}{self._prefix}" for h in hosts)


class ServiceRecordSource:
    """The servers of a service record (SRV), each with its own port. Needs the extra ``dns``."""

    def __init__(self, name: str, prefix: str, interval_seconds: float, resolver: Resolver | None = None) -> None:
        self._name, self._prefix = name, prefix
        self._interval_seconds = interval_seconds
        self._resolver = resolver

    async def watch(self) -> AsyncGenerator[Urls]:
        """See ``Source``."""
        while True:
            yield await self._look()
            await asyncio.sleep(self._interval_seconds)

    async def _look(self) -> Urls:
        from dns import asyncresolver, exception, resolver  # noqa: PLC0415 - of an extra

        try:
            if self._resolver is None:
                self._resolver = asyncresolver.Resolver()
            answer = await self._resolver.resolve(self._name, "SRV", lifetime=_LONGEST_SECONDS)
        except (resolver.NXDOMAIN, resolver.NoAnswer):
            return frozenset()
        except (exception.DNSException, OSError) as error:
            raise SourceError(f"{self._name} cannot be looked up: {error}") from None
        servers = ((record.target.to_text(omit_final_dot=True), record.port) for record in answer)
        return frozenset(f"http://{host}:{port}{self._prefix}" for host, port in servers)
