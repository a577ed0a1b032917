"""What came back for one request, in more detail than the figures of ``proxy.sim.records`` need."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from proxy.sim.records import RequestRecord


@dataclass(slots=True)
class Result(RequestRecord):
    """The life of one request that was really sent; times in seconds since the run's start, in the run's own time.

    ``request.at_seconds`` is its intended time. Of a request that waits for another's answer, and in a closed loop,
    that is the time at which it became due, and not the one in the schedule.
    """

    url: str = ""
    """The server that it was sent to."""
    status: int | None = None
    """Of the HTTP answer; ``None`` where there was none."""
    first_byte_at: float | None = None
    """When the body's first byte came, whatever was in it."""
    chunk_times: array[float] = field(default_factory=lambda: array("d"))
    """When each chunk with a token in it came; several may have come in one read, and so at one time."""
    chunk_tokens: array[int] = field(default_factory=lambda: array("I"))
    """Tokens in each of those chunks, as far as can be told: at least one."""
    prompt_tokens: int | None = None
    """From ``usage``, as are the next two; ``None`` where the server does not tell."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    def on_tokens(self, now: float, count: int = 1) -> None:
        """Note that a chunk with ``count`` tokens arrived at ``now``."""
        self.chunk_times.append(now)
        self.chunk_tokens.append(count)
        RequestRecord.on_tokens(self, now, count)  # slots=True makes a class anew, which super() does not know

    @property
    def schedule_delay_seconds(self) -> float | None:
        """How late the client itself was."""
        return None if self.sent_at is None else self.sent_at - self.request.at_seconds
