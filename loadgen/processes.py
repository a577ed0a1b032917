"""One run from several processes, for loads that are too much for one.

Each process has its part of the schedule, conversations whole, and all count from the same instant of the system's
monotonic clock. What the run is told of (progress, results, the wish to stop) goes over one pipe for each.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadgen import eventloop
from loadgen.runner import Counts, run_workload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from loadgen.results import Result
    from loadgen.runner import Display
    from proxy.sim.workload import ScheduledRequest

_READY, _PROGRESS, _DONE = "ready", "progress", "done"

# From "go" to the first request: all processes must have heard of it by then.
_LEAD_SECONDS = 0.25


class ProcessError(Exception):
    """A process of the run has ended before its time."""


def shards(workload: Sequence[ScheduledRequest], parts: int) -> list[list[ScheduledRequest]]:
    """Share the requests out in turn; one that waits for another's answer goes where that one goes."""
    found: list[list[ScheduledRequest]] = [[] for _ in range(parts)]
    places: dict[int, int] = {}
    roots = 0
    for request in workload:
        if request.after is None:
            place, roots = roots % parts, roots + 1
        else:
            place = places[request.after]
        places[request.index] = place
        found[place].append(request)
    return [part for part in found if part]


async def run_in_processes(
    workload: Sequence[ScheduledRequest],
    urls: Sequence[str],
    *,
    processes: int,
    progress: Display | None = None,
    stop: asyncio.Event | None = None,
    **how: Any,
) -> list[Result]:
    """Do as ``run_workload`` does, whose other arguments are ``how``, in so many processes.

    Raises:
        ProcessError: one has ended before its time; the others are ended, too.
    """
    context = multiprocessing.get_context("spawn")
    interval = progress.interval_seconds if progress else 3600.0
    workers: list[_Worker] = []
    try:
        for part in shards(workload, processes):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, part, list(urls), interval, how), daemon=True)
            process.start()
            there.close()
            workers.append(_Worker(process, here, Counts(len(part))))
        return await _oversee(workers, len(workload), progress, stop or asyncio.Event())
    finally:
        for worker in workers:
            worker.connection.close()
            if worker.process.is_alive():
                worker.process.terminate()
        for worker in workers:
            await asyncio.to_thread(worker.process.join, 5.0)


@dataclass(slots=True)
class _Worker:
    process: Any
    connection: Connection
    counts: Counts
    results: list[Result] = field(default_factory=list)

    def hear(self) -> tuple[str, Any]:
        """Wait for what the process says next; blocks.

        Raises:
            ProcessError: it has ended.
        """
        try:
            kind, what = self.connection.recv()
        except (EOFError, OSError) as error:
            raise ProcessError("a process of the run has ended before its time") from error
        return kind, what

    def follow(self) -> None:
        """Take note of what the process says until it is done; blocks."""
        while True:
            kind, what = self.hear()
            if kind == _DONE:
                self.results = what
                return
            sent, completed, failed, seconds, ttfts, gaps = what
            counts = self.counts
            counts.sent, counts.completed, counts.failed, counts.seconds = sent, completed, failed, seconds
            counts.ttfts.extend(ttfts)
            counts.gaps.extend(gaps)


async def _oversee(
    workers: Sequence[_Worker], total: int, progress: Display | None, stop: asyncio.Event
) -> list[Result]:
    for worker in workers:
        await asyncio.to_thread(worker.hear)  # that it is ready
    start_at = time.monotonic() + _LEAD_SECONDS
    for worker in workers:
        worker.connection.send(start_at)
    loop = asyncio.get_running_loop()
    ends = asyncio.gather(*(asyncio.to_thread(worker.follow) for worker in workers))
    stopped = loop.create_task(stop.wait(), name="stop")
    try:
        told = False
        while not ends.done():
            waits: list[asyncio.Future[Any]] = [ends] if told else [ends, stopped]
            await asyncio.wait(
                waits,
                timeout=progress.interval_seconds if progress else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if stop.is_set() and not told:
                told = True
                for worker in workers:
                    worker.connection.send("stop")
            if progress is not None:
                progress.show(_sum(workers, total))
        await ends
    finally:
        stopped.cancel()
    return sorted((r for worker in workers for r in worker.results), key=lambda r: r.request.index)


def _sum(workers: Sequence[_Worker], total: int) -> Counts:
    counts = [worker.counts for worker in workers]
    return Counts(
        total,
        sum(c.sent for c in counts),
        sum(c.completed for c in counts),
        sum(c.failed for c in counts),
        max(c.seconds for c in counts),
        sum((c.ttfts for c in counts), array("d")),
        sum((c.gaps for c in counts), array("d")),
    )


# -- in each process --


def _work(
    pipe: Connection, workload: list[ScheduledRequest], urls: list[str], interval: float, how: dict[str, Any]
) -> None:
    # Ctrl-C in a terminal reaches every process; only the first decides what comes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send((_READY, None))
    try:
        start_at = pipe.recv()
        results = eventloop.run(_run(pipe, workload, urls, interval, how | {"start_at": start_at}))
        pipe.send((_DONE, results))
    except (EOFError, OSError):
        pass  # whoever wanted to know is gone


async def _run(
    pipe: Connection, workload: list[ScheduledRequest], urls: list[str], interval: float, how: dict[str, Any]
) -> list[Result]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hear() -> None:
        # "stop", or the end of the process that would say so.
        loop.remove_reader(pipe.fileno())
        stop.set()

    loop.add_reader(pipe.fileno(), hear)
    try:
        return await run_workload(workload, urls, progress=_Told(pipe, interval), stop=stop, **how)
    finally:
        loop.remove_reader(pipe.fileno())


class _Told:
    """A display that tells another process."""

    def __init__(self, pipe: Connection, interval: float) -> None:
        self._pipe = pipe
        self._told = self._told_gaps = 0
        self._interval = interval

    @property
    def interval_seconds(self) -> float:
        return self._interval

    def show(self, counts: Counts) -> None:
        ttfts, gaps = counts.ttfts[self._told :], counts.gaps[self._told_gaps :]
        self._told, self._told_gaps = len(counts.ttfts), len(counts.gaps)
        self._pipe.send((_PROGRESS, (counts.sent, counts.completed, counts.failed, counts.seconds, ttfts, gaps)))
