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


Action = Dispatch | Reject


def describe(action: Action, now: float) -> str:
    """Return the action as one line of a decision log: equal lines, equal decisions."""
    match action:
        case Dispatch(request_id, engine_id):
            return f"{now:.6f} dispatch {request_id} {engine_id}"
        case Reject(request_id, reason, _):
            return f"{now:.6f} reject {request_id} {reason}"
