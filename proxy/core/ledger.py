"""Who is where: every request from its arrival to its end, and every engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.queue import Backlog

if TYPE_CHECKING:
    from collections.abc import Collection

    from proxy.core.engine import EngineBelief
    from proxy.core.overload import Overload
    from proxy.core.queue import Servers, Waiting
    from proxy.core.rad import ModeSwitch


@dataclass(slots=True)
class Entry:
    """A request from its arrival to its end.

    Waiting while ``engine`` is ``None``; with an engine it is dispatched, or some slices of its prompt are there
    (``sliced``) and the rest waits for that engine alone.
    """

    waiting: Waiting
    engine: EngineBelief | None = None
    sliced: bool = False
    sliceable: bool = False
    first_slice: int = 0
    """Number of the first slice that counts: those of an earlier attempt may still end."""
    sliced_in: int = -1
    """The engine's step in which the last slice was sent."""


class Ledger:
    """The state that the scheduler keeps and its rules of release work on."""

    def __init__(self, max_wait_seconds: float, overload: Overload, modes: ModeSwitch | None = None) -> None:
        self.engines: dict[str, EngineBelief] = {}
        self.entries: dict[str, Entry] = {}
        self.backlog = Backlog(max_wait_seconds)
        self.overload = overload
        self.sliced: dict[str, Entry] = {}
        """Requests half-way: some of their slices were sent, the rest waits."""
        self.slices = 0
        """All slices ever sent."""
        self.modes = modes
        """Which engines are full, in throughput mode."""

    def __repr__(self) -> str:
        return f"<Ledger {len(self.entries)} requests, {len(self.backlog)} waiting, {len(self.engines)} engines>"

    def servers(self, model: str) -> Servers:
        """The engines that serve ``model``, up or not."""
        return frozenset(e.id for e in self.engines.values() if e.serves(model))

    def engines_for(self, arrived_at: float, now: float) -> Collection[EngineBelief]:
        """The engines that a whole prompt may go to, as far as throughput mode has a say."""
        engines = self.engines.values()
        return engines if self.modes is None else self.modes.open(engines, arrived_at, now)

    def any_up(self, servers: Servers) -> bool:
        return any(self.engines[engine_id].up for engine_id in servers)

    def wait(self, waiting: Waiting, now: float) -> None:
        """Put a request into the queue of those engines that serve it."""
        servers = self.servers(waiting.request.model)
        self.backlog.push(waiting, servers)
        self.overload.wait(waiting, servers, now)

    def release(self, waiting: Waiting, now: float) -> None:
        """Take a request out of the queue, as an engine has room for it."""
        self.overload.release(waiting, self.backlog.servers_of(waiting), now)
        self.backlog.remove(waiting)

    def drop(self, waiting: Waiting) -> None:
        """Take a request out of the queue for any other reason."""
        self.overload.leave(waiting, self.backlog.servers_of(waiting))
        self.backlog.remove(waiting)

    def dispatch(self, waiting: Waiting, engine: EngineBelief, now: float) -> None:
        """Note that a request's prompt, or what is left of it, is released to ``engine``."""
        request = waiting.request
        entry = self.entries[request.id]
        if entry.sliced:
            entry.sliced = False
            del self.sliced[request.id]
        else:
            self.release(waiting, now)
        entry.engine = engine
        tbt_seconds = request.request_class.tbt_seconds
        engine.release(request.id, request.prompt_tokens, now, tbt_seconds, streamed=request.streamed)
