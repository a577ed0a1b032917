"""How long a request was held back, as the header ``Server-Timing`` tells it (W3C Server Timing): ``queue;dur=12.3``.

The proxy adds it for clients that ask by ``x-slai-timing: 1``, as ``slai-loadgen`` does; others get the engine's
headers as they are.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import TYPE_CHECKING, Any

from multidict import istr

if TYPE_CHECKING:
    from multidict import MultiMapping

SERVER_TIMING = "Server-Timing"
ASK_TIMING = "x-slai-timing"
_ASK_TIMING = istr(ASK_TIMING)
_QUEUE = re.compile(r"(?:^|,)\s*queue\s*(?:;[^,]*?)?;\s*dur\s*=\s*\"?([0-9.]{1,20})", re.IGNORECASE)
_LONGEST_SECONDS = 86_400.0


def wants_timing(headers: MultiMapping[str]) -> bool:
    """Whether a client asks to be told."""
    return headers.get(_ASK_TIMING) == "1"


def queue_timing(seconds: float) -> str:
    """Return the header's value for a time in the queue."""
    return f"queue;dur={1000 * seconds:.1f}"


def queue_seconds(headers: MultiMapping[str]) -> float | None:
    """Return the time in queues that an answer tells, of all servers on its way; ``None`` if none does."""
    told = [
        seconds
        for value in headers.getall(SERVER_TIMING, ())
        for found in _QUEUE.findall(value)
        if (seconds := milliseconds(found)) is not None
    ]
    return sum(told) if told else None


def milliseconds(value: Any) -> float | None:
    """Return a time told in milliseconds, in seconds; ``None`` where it makes no sense."""
    try:
        seconds = float(value) / 1000 if type(value) in (int, float, str) else -1.0
    except (ValueError, OverflowError):
        return None
    return seconds if isfinite(seconds) and 0 <= seconds <= _LONGEST_SECONDS else None
