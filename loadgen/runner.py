"""The open loop: every request leaves at its own time, whatever became of the others."""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from array import array
from collections import defaultdict
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import aiohttp

from loadgen.client import Api, Client
from loadgen.results import Result
from loadgen.texts import TextLengths
from proxy.upstream.client import EngineClient, Timeouts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from proxy.sim.workload import ScheduledRequest

# Of requests that are due (or late already) so many leave before the streams have their turn again.
_MOST_AT_ONCE = 16

# The event loop's timers wake up to a millisecond late, which is ten at a time scale of ten; the last one is spent
# going round the loop instead.
_TIMER_SECONDS = 0.001

_POLL_SECONDS = 0.5
_WANTS_KEY = "GET /v1/models answered 401: put an API key into an environment variable and name it with --api-key-env"

_SHOWN_GAPS = 32


class NotReadyError(Exception):
    """A server did not answer ``GET /v1/models`` as expected; the message names it and says why."""


@dataclass(slots=True)
class Counts:
    """How far a run has come; for a display."""

    total: int
    sent: int = 0
    completed: int = 0
    failed: int = 0
    seconds: float = 0.0
    """Since the run's start, in the run's own time."""
    ttfts: array[float] = field(default_factory=lambda: array("d"))
    """Of the requests that have ended, in seconds."""
    gaps: array[float] = field(default_factory=lambda: array("d"))
    """Between tokens: up to 32 of each of those requests, evenly picked, which is enough to look at."""

    @property
    def running(self) -> int:
        return self.sent - self.completed - self.failed


def shown_gaps(gaps: array[float]) -> array[float]:
    """Return the gaps of a request that a display gets to see."""
    return gaps[:: -(-len(gaps) // _SHOWN_GAPS) or 1]


class Display(Protocol):
    """Shows the progress of a run; ``show`` is called every ``interval_seconds``, and once more at the end."""

    @property
    def interval_seconds(self) -> float: ...

    def show(self, counts: Counts) -> None: ...


async def run_workload(
    workload: Sequence[ScheduledRequest],
    urls: Sequence[str],
    *,
    model: str,
    api: Api = Api.COMPLETIONS,
    time_scale: float = 1.0,
    timeout_seconds: float = 600.0,
    send_class: bool = False,
    nonce: int | None = None,
    api_key: str | None = None,
    standard: bool = False,
    texts: TextLengths | None = None,
    progress: Display | None = None,
    stop: asyncio.Event | None = None,
    start_at: float | None = None,
    records: list[Result] | None = None,
) -> list[Result]:
    """Send ``workload`` to the base ``urls`` in turn and return a record of each request that was sent.

    A request with ``after`` is sent when that one has ended, however it has, and its user has thought; the time at
    which it became due is its record's ``request.at_seconds``.

    ``time_scale`` is for a simulated engine that runs that many times faster than a real one: requests leave that
    much closer together, and every time on the records is multiplied back. Setting ``stop`` ends the run at once;
    what had not finished is marked so. ``start_at`` is the run's time zero on the monotonic clock, by default now;
    ``records`` is a list to put the records into, for who wants to see them grow. ``standard`` and ``texts`` are as in
    ``Client``; ``api_key`` goes along as a bearer token.
    """
    # What is there now stays: the garbage collector need not look at it again and again, each time a pause.
    gc.collect()
    gc.freeze()
    records = [] if records is None else records
    started_at = time.monotonic() if start_at is None else start_at
    run = _Run(Counts(len(workload)), stop or asyncio.Event(), time_scale, started_at, records)
    for scheduled in workload:
        if scheduled.after is not None:
            run.followers[scheduled.after].append(scheduled)
    nonce = secrets.randbits(53) if nonce is None else nonce
    async with _connections(timeout_seconds / time_scale) as servers, asyncio.TaskGroup() as group:
        client = Client(
            servers,
            run.now,
            model,
            nonce,
            api,
            time_scale,
            timeout_seconds,
            send_class,
            standard,
            texts or TextLengths(),
        )
        if api_key is not None:
            client = replace(client, headers=(*client.headers, ("Authorization", f"Bearer {api_key}")))
        helpers = [group.create_task(run.cancel_on_stop(), name="cancel on stop")]
        if progress is not None:
            helpers.append(group.create_task(run.keep_showing(progress), name="progress"))

        def send(scheduled: ScheduledRequest, body: bytes) -> None:
            record = Result(scheduled)
            run.records.append(record)
            url = urls[scheduled.index % len(urls)]
            task = group.create_task(client.send(url, record, body), name=f"request {scheduled.index}")
            run.watch(task, record)

        async def follow(scheduled: ScheduledRequest, answered_at: float) -> None:
            due = max(scheduled.at_seconds, answered_at + scheduled.think_seconds)
            body = client.prepare(scheduled)
            if await run.rest_until(due):
                send(replace(scheduled, at_seconds=due), body)

        def follow_up(index: int, answered_at: float) -> None:
            for scheduled in run.followers.pop(index, ()):
                task = group.create_task(follow(scheduled, answered_at), name=f"before request {scheduled.index}")
                run.waiting.add(task)
                task.add_done_callback(run.waiting.discard)

        run.on_end = follow_up
        for scheduled in workload:
            if scheduled.after is not None:
                continue
            if run.seconds_until(scheduled.at_seconds) > 0:
                await asyncio.sleep(0)  # The request before this one leaves first.
            body = client.prepare(scheduled)
            if not await run.sleep_until(scheduled.at_seconds):
                break
            send(scheduled, body)
        while run.tasks or run.waiting:
            await asyncio.wait(frozenset(run.tasks | run.waiting))
        for helper in helpers:
            helper.cancel()
    if progress is not None:
        run.counts.seconds = run.now()
        progress.show(run.counts)
    return run.records


@asynccontextmanager
async def _connections(limit_seconds: float) -> AsyncIterator[EngineClient]:
    # The limit on a whole request is the client's own, and a server may be silent for all of it.
    servers = EngineClient(Timeouts(connect=limit_seconds, idle=2 * limit_seconds))
    try:
        yield servers
    finally:
        await servers.close()


@dataclass(slots=True)
class _Run:
    counts: Counts
    stop: asyncio.Event
    time_scale: float
    started_at: float
    records: list[Result] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    waiting: set[asyncio.Task[None]] = field(default_factory=set)
    """One for each request whose user thinks."""
    followers: defaultdict[int, list[ScheduledRequest]] = field(default_factory=lambda: defaultdict(list))
    """By the index of the request whose answer they wait for."""
    on_end: Callable[[int, float], None] = lambda _index, _at: None
    """Told of each request that has ended, and when."""

    def now(self) -> float:
        return (time.monotonic() - self.started_at) * self.time_scale

    def seconds_until(self, at_seconds: float) -> float:
        """Return how long, on the wall clock, a time of the run is still away."""
        return self.started_at + at_seconds / self.time_scale - time.monotonic()

    async def sleep_until(self, at_seconds: float) -> bool:
        """Sleep until a time of the run; return whether it still goes on then."""
        left = self.seconds_until(at_seconds)
        if left <= 0 and len(self.records) % _MOST_AT_ONCE == 0:
            await asyncio.sleep(0)
        while left > 0 and not self.stop.is_set():
            if left > _TIMER_SECONDS:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left - _TIMER_SECONDS):
                        await self.stop.wait()
            else:
                await asyncio.sleep(0)
            left = self.seconds_until(at_seconds)
        return not self.stop.is_set()

    async def rest_until(self, at_seconds: float) -> bool:
        """Sleep as ``sleep_until``, for one of many that sleep at a time: it may be a millisecond or two late."""
        while (left := self.seconds_until(at_seconds)) > 0 and not self.stop.is_set():
            # A timer of uvloop's may go off a millisecond early.
            with suppress(TimeoutError):
                async with asyncio.timeout(max(left, _TIMER_SECONDS)):
                    await self.stop.wait()
        return not self.stop.is_set()

    def watch(self, task: asyncio.Task[None], record: Result) -> None:
        self.counts.sent += 1
        self.tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, record))

    def _ended(self, task: asyncio.Task[None], record: Result) -> None:
        self.tasks.discard(task)
        if record.finished_at is None:  # Cancelled before its first step.
            record.finished_at, record.error = self.now(), "unfinished"
        if record.completed:
            self.counts.completed += 1
        else:
            self.counts.failed += 1
        if (ttft := record.ttft_seconds) is not None:
            self.counts.ttfts.append(ttft)
        self.counts.gaps.extend(shown_gaps(record.gaps))
        if not self.stop.is_set():
            self.on_end(record.request.index, record.finished_at)

    async def cancel_on_stop(self) -> None:
        await self.stop.wait()
        for task in self.tasks:
            task.cancel()

    async def keep_showing(self, progress: Display) -> None:
        while True:
            await asyncio.sleep(progress.interval_seconds)
            self.counts.seconds = self.now()
            progress.show(self.counts)


async def wait_until_ready(
    urls: Sequence[str],
    *,
    patience_seconds: float,
    model: str | None = None,
    api_key: str | None = None,
    on_wait: Callable[[str], None] = lambda _: None,
) -> str:
    """Wait until every server answers ``GET /v1/models``; return ``model``, or else the name that they list first.

    ``on_wait`` is told once of each server that does not answer at once, and why.

    Raises:
        NotReadyError: one did not in time, or two name different models.
    """
    names: dict[str, str] = {}
    give_up_at = time.monotonic() + patience_seconds
    headers = None if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0), headers=headers) as session:
        for url in urls:
            waiting = False
            while url not in names:
                found, answer = await _first_model(session, url)
                if found:
                    names[url] = answer
                elif answer == _WANTS_KEY:  # waiting does not help
                    raise NotReadyError(f"{url}: {answer}")
                elif time.monotonic() + _POLL_SECONDS > give_up_at:
                    raise NotReadyError(f"{url} is not ready after {patience_seconds:g} s: {answer}")
                else:
                    if not waiting:
                        on_wait(f"{url}: {answer}")
                    waiting = True
                    await asyncio.sleep(_POLL_SECONDS)
    if model is not None:
        return model
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{url} has {name}" for url, name in names.items())
        raise NotReadyError(f"the servers name different models ({listed}); choose one with --model")
    return names[urls[0]]


async def _first_model(session: aiohttp.ClientSession, url: str) -> tuple[bool, str]:
    """Return whether the server named a model, and its name or the reason."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            if response.status == 401:
                return False, _WANTS_KEY
            if response.status != 200:
                return False, f"GET /v1/models answered {response.status}"
            answer = await response.json(content_type=None)
            return True, str(answer["data"][0]["id"])
    except TimeoutError:
        return False, "no answer to GET /v1/models"
    except aiohttp.ClientConnectorError as error:
        return False, f"cannot connect ({error.os_error.strerror or error.os_error})"
    except (aiohttp.ClientError, OSError) as error:
        return False, f"{type(error).__name__} {error}".strip()
    except (ValueError, LookupError, TypeError):
        return False, "its /v1/models lists no model"
