"""How late the event loop is: what it takes longer for than it should, every token waits for."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_SECONDS = 0.1


async def watch_lag(record: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
    """Tell by how many seconds a timer was late, again and again, until cancelled.

    uvloop's timers count whole milliseconds, so an idle loop shows up to one.
    """
    while True:
        due = clock() + INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        record(max(0.0, clock() - due))
