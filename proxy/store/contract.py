"""What a fleet needs of the place where its replicas meet.

A store knows which replicas live, lets one of them lead, carries letters, and keeps what all of them have to know. It
decides nothing about requests: that is the affair of whoever leads (``core.fleet``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.fleet import Standing


class StoreError(Exception):
    """The store did not do what it was asked for, or nobody knows whether it did."""


class StateStore(Protocol):
    """One pool of replicas. Every call ends within the time that the store was opened with, at worst by an error."""

    async def beat(self, replica: str, life_seconds: float, *, willing: bool = True) -> Standing:
        """Give a sign of life that holds for ``life_seconds``, and take or renew the lease if it is free or ours.

        ``willing``: whether the replica would lead.

        Raises:
            StoreError: it could not be reached in time, or refused.
        """
        ...

    async def resign(self, replica: str) -> None:
        """Leave the pool, and give up the lease if the replica has it: then the others get an empty letter.

        Raises:
            StoreError: as ``beat``; then both end with the life of the last beat.
        """
        ...

    async def post(self, to: str, letter: bytes) -> None:
        """Send a letter to a replica. It arrives once or not at all; letters of one sender keep their order.

        Raises:
            StoreError: as ``beat``; the letter may have been sent.
        """
        ...

    async def post_as_leader(self, to: str, letter: bytes, replica: str, epoch: int) -> bool:
        """Send a letter only if ``replica`` leads in this ``epoch`` at the moment of sending; whether that was so.

        Raises:
            StoreError: as ``post``.
        """
        ...

    async def listen(self, replica: str, on_letter: Callable[[bytes], None]) -> None:
        """Hand over every letter to a replica, until cancelled; connects anew whenever the connection is lost.

        Letters sent meanwhile are lost: their numbers tell.
        """
        ...

    async def share(self, name: str, value: bytes) -> bytes:
        """Keep a value under a name unless there is one already, and return the one that is kept.

        Raises:
            StoreError: as ``beat``; it may have been kept.
        """
        ...

    async def close(self) -> None:
        """End all connections."""
        ...
