"""How late the loop is."""

import asyncio

from proxy.server.lag import INTERVAL_SECONDS, watch_lag


async def test_what_holds_up_the_loop_is_seen() -> None:
    """A clock that jumps ahead by half a second while the loop sleeps stands for work that takes as long."""
    at, seen = 0.0, []
    told = asyncio.Event()

    def clock() -> float:
        return at

    def record(seconds: float) -> None:
        nonlocal at
        seen.append(round(seconds, 6))
        told.set()

    watching = asyncio.ensure_future(watch_lag(record, clock))
    await asyncio.sleep(0)
    at = INTERVAL_SECONDS + 0.5
    await told.wait()
    told.clear()
    await told.wait()
    watching.cancel()
    assert seen == [0.5, 0.0], "late by half a second; then the clock stands still, and nobody is early"
