"""What the core takes: a request from its arrival to its end, and a token."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest

from proxy.core.config import SchedulerConfig
from proxy.core.events import Arrived, Ended, EngineUp
from proxy.core.limits import EngineLimits
from proxy.core.promptsize import PromptSize, PromptSizes
from proxy.core.request import Request
from proxy.core.scheduler import Scheduler

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

_PACE_SECONDS = 1e-4


class Traffic:
    """Requests that come and go, of which so many are under way."""

    def __init__(self, *, engines: int, under_way: int, prompt_tokens: int = 150) -> None:
        self.scheduler = Scheduler(SchedulerConfig(queue_timeout_seconds=1e6))
        for engine in range(engines):
            self.scheduler.handle(EngineUp(f"e{engine}", EngineLimits(), frozenset({"m"})), 0.0)
        self.now = 0.0
        self._prompt_tokens = prompt_tokens
        self._numbers = count()
        self._ids = [self._arrive() for _ in range(under_way)]
        self._turn = 0

    def request(self) -> None:
        """Let the oldest request end and another come."""
        self._ids.append(self._arrive())
        self.now = round(self.now + _PACE_SECONDS, 6)
        self.scheduler.handle(Ended(self._ids.pop(0), 1, None, True), self.now)
        self.scheduler.next_deadline()

    def token(self) -> None:
        """Let the next stream have a token."""
        self.now += 1e-6
        self._turn = (self._turn + 1) % len(self._ids)
        self.scheduler.on_tokens(self._ids[self._turn], 1, self.now)

    def _arrive(self) -> str:
        self.now = round(self.now + _PACE_SECONDS, 6)
        request_id = str(next(self._numbers))
        self.scheduler.handle(Arrived(Request(request_id, self._prompt_tokens, model="m", size_bytes=500)), self.now)
        self.scheduler.next_deadline()
        return request_id


@pytest.mark.parametrize(("engines", "under_way"), [(1, 1), (1, 64), (8, 512)])
def test_request(benchmark: BenchmarkFixture, engines: int, under_way: int) -> None:
    benchmark(Traffic(engines=engines, under_way=under_way).request)


def test_request_behind_10000(benchmark: BenchmarkFixture) -> None:
    benchmark(Traffic(engines=1, under_way=10_000).request)


@pytest.mark.parametrize("streams", [1, 64])
def test_token(benchmark: BenchmarkFixture, streams: int) -> None:
    benchmark(Traffic(engines=1, under_way=streams, prompt_tokens=10).token)


def test_prompt_size(benchmark: BenchmarkFixture) -> None:
    benchmark(PromptSizes().learn, "m", PromptSize(ascii_bytes=512, messages=1), 140)
