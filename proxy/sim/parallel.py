"""Many independent computations over a few processes, stopped cleanly when the user has seen enough."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerError(RuntimeError):
    """A worker process ended before its task; what went wrong is on its stderr, unless it was killed."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_parallel(call: Callable[[Task], Result], tasks: Iterable[Task], jobs: int) -> Generator[Result, None, None]:
    """Yield ``call(task)`` of every task as they come to an end, with ``jobs`` processes at work.

    ``call``, tasks and results must be picklable. One job needs no other process and keeps the order. Tasks are drawn
    when a process is free for them. Leaving the iterator early, be it by an exception, stops the processes at once.

    Raises:
        WorkerError: a process ended in the middle of a task.
    """
    if jobs == 1:
        yield from map(call, tasks)
        return
    tasks = iter(tasks)
    workers: dict[Connection, SpawnProcess] = {}
    try:
        for task in islice(tasks, jobs):
            _hire(workers, call).send(task)
        while workers:
            for ready in wait(list(workers)):
                connection = cast("Connection", ready)
                result: Result = _receive(connection, workers[connection])
                for task in islice(tasks, 1):
                    connection.send(task)
                    break
                else:
                    connection.close()
                    workers.pop(connection).join()
                yield result
    finally:
        for worker in workers.values():
            worker.terminate()
        for connection, worker in workers.items():
            worker.join()
            connection.close()


def serve(connection: Connection, call: Callable[[Any], Any]) -> None:
    """Answer tasks until the other end closes, which it also does by dying: no worker outlives its parent for long."""
    try:
        while True:
            connection.send(call(connection.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _hire(workers: dict[Connection, SpawnProcess], call: Callable[[Any], Any]) -> Connection:
    # Spawned, not forked: this process may have threads (a progress display), and theirs would be copied half-way.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=serve, args=(theirs, call), daemon=True)
    with _ignored_interrupts():
        worker.start()
    theirs.close()
    workers[ours] = worker
    return ours


def _receive(connection: Connection, worker: SpawnProcess) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        worker.join()
        raise WorkerError(f"a worker process ended too early (exit code {worker.exitcode})") from None


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Let a process start so that Ctrl-C, which goes to all processes of a terminal, does not reach it.

    It inherits that from us, hence the moment in which we do not hear it either.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say how signals are handled
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
