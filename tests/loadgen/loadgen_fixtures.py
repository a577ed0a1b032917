"""Fixtures of the load generator's tests; a plugin, so that only pytest imports it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from scripted_upstream import Clock, Upstream, serve


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with serve() as upstream:
        yield upstream


@pytest.fixture
def clock() -> Clock:
    return Clock()
