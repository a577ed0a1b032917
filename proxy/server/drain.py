"""The orderly end: not ready, then not listening, then without what waits, then without what streams."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.core.events import EngineRemoved

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proxy.server.app import Proxy

_log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 0.5
"""How long the error event of a stream that is cut may take to its client."""
_LOOK_SECONDS = 0.1


@dataclass(slots=True)
class Signals:
    """What the process has been told by signals."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """SIGTERM or SIGINT."""
    at_once: asyncio.Event = field(default_factory=asyncio.Event)
    """A second one."""
    reload: asyncio.Event = field(default_factory=asyncio.Event)
    """SIGHUP."""
    interactive: bool = False
    """Whether it was SIGINT, as from a terminal."""

    def listen(self) -> None:
        """Take the signals from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self.reload.set)

    def _end(self, number: signal.Signals) -> None:
        if not self.stop.is_set():
            self.interactive = number == signal.SIGINT
        (self.at_once if self.stop.is_set() else self.stop).set()


async def drain(proxy: Proxy, signals: Signals, stop_listening: Callable[[], Awaitable[None]]) -> None:
    """Bring the proxy to its end, for as long as the settings say or until a second signal."""
    settings = proxy.settings
    proxy.draining = True  # seen by whoever asks /readyz; all else goes on as before
    if settings.drain_grace_seconds and not signals.interactive:
        _log.info("not ready: no more new requests in %g s", settings.drain_grace_seconds)
        await _happens(signals.at_once, settings.drain_grace_seconds)
    await stop_listening()
    proxy.start_drain()
    if under_way := proxy.connections.under_way:  # with what passes by the queue
        _log.info("draining: %d requests in flight; a second signal ends at once", under_way)
    await _while_any(lambda: proxy.connections.under_way, settings.drain_seconds, signals.at_once)
    if left := proxy.scheduler.dispatched:
        _log.warning("%d requests in flight are cut", left)
        for engine in proxy.scheduler.engines:
            proxy.driver.feed(EngineRemoved(engine.id, 0.0))
        seconds = 0.0 if signals.at_once.is_set() else _LAST_WORDS_SECONDS
        await _while_any(lambda: proxy.scheduler.dispatched, seconds, signals.at_once)
    # Who has its answer keeps its connection for another request, and would be waited for.
    proxy.connections.end_all()
    await asyncio.sleep(0)


async def _while_any(left: Callable[[], int], seconds: float, until: asyncio.Event) -> None:
    """Wait until none is left, ``until`` is set or the time is over."""
    now = asyncio.get_running_loop().time
    deadline = now() + seconds
    while left() and not until.is_set() and (remaining := deadline - now()) > 0:
        await _happens(until, min(_LOOK_SECONDS, remaining))


async def _happens(event: asyncio.Event, seconds: float) -> None:
    """Wait until ``event`` is set, at most so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
