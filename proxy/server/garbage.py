"""When Python looks for garbage that refers to itself, and so never goes by itself.

A full collection looks at every object that there is, and nobody is served meanwhile: with 100,000 waiting requests for
half a second (``python -m bench queue``), again and again, as requests come and go. Next to nothing is found by it. So
only young objects are looked at as they are made, and all of them in a quiet moment.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_YOUNG, _OLDER, _NEVER = 2_000, 5, 1_000_000
"""So few take some 50 us, what is left after several looks 0.3 ms: as long as that, every token waits."""
_LOOK_SECONDS = 60.0
_MOST_LOOKS = 30
"""After so many without a quiet moment, one that is not quiet has to do."""


def collect_young_only() -> None:
    """Leave what there is by now alone for good, and whatever lives for long until ``collect_when_quiet``."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _OLDER, _NEVER)


async def collect_when_quiet(quiet: Callable[[], bool]) -> None:
    """Look for all garbage every minute that is ``quiet``, and now and then if none is, until cancelled."""
    looks = 0
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        looks += 1
        if looks >= _MOST_LOOKS or quiet():
            gc.collect()
            looks = 0
