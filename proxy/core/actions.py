"""What the scheduler asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.request import RejectReason


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to the engine now."""

    request_id: str
    engine_id: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse the request. ``retry_after_seconds`` is our honest guess of when a retry may get in."""

    request_id: str
    reason: RejectReason
    retry_after_seconds: float | None = None
    estimated_wait_seconds: float | None = None
    """When its first token would have come, had it been let in; ``None`` where nobody knows."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Send the first ``tokens`` tokens of the request's prompt to the engine, to be cached and for no other end."""

    request_id: str
    engine_id: str
    tokens: int
    held_tokens: int
    """How many of them the engine has cached already, by the slices before."""
    number: int
    """Of all slices ever sent: a request may be sliced anew, at another engine or after it came back."""

    @property
    def slice_id(self) -> str:
        return f"{self.request_id}/{self.number}"


@dataclass(frozen=True, slots=True)
class Cut:
    """End a dispatched request's answer where it is: the engine has been removed, and its time to leave has come."""

    request_id: str
    engine_id: str


Action = Dispatch | Reject | Slice | Cut


def describe(action: Action, now: float) -> str:
    """Return the action as one line of a decision log: equal lines, equal decisions."""
    match action:
        case Dispatch(request_id, engine_id):
            return f"{now:.6f} dispatch {request_id} {engine_id}"
        case Slice(request_id, engine_id, tokens, _, _):
            return f"{now:.6f} slice {request_id} {engine_id} {tokens}"
        case Cut(request_id, engine_id):
            return f"{now:.6f} cut {request_id} {engine_id}"
        case Reject(request_id, reason):
            return f"{now:.6f} reject {request_id} {reason}"
