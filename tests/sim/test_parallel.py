import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import Pipe, active_children

import pytest

from proxy.sim.parallel import WorkerError, run_parallel, serve, usable_cores


def _square(number: int) -> int:
    return number * number


def _end_abruptly(number: int) -> int:
    if number == 1:
        os._exit(7)
    return number


def _where(_: int) -> int:
    return os.getpid()


def _interrupt_oneself(number: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return number


def _sleep_for_an_hour(number: int) -> int:
    if number:
        time.sleep(3600)
    return number


def test_one_job_stays_in_this_process_and_in_order() -> None:
    assert list(run_parallel(_square, [3, 1, 2], 1)) == [9, 1, 4]
    assert list(run_parallel(_where, [0], 1)) == [os.getpid()]


def test_several_jobs_give_every_result_once_from_other_processes() -> None:
    assert sorted(run_parallel(_square, range(7), 2)) == [0, 1, 4, 9, 16, 25, 36]
    assert not active_children()


def test_tasks_are_drawn_only_when_a_process_is_free() -> None:
    drawn: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(50):
            drawn.append(number)
            yield number

    results = run_parallel(_square, tasks(), 2)
    next(results)
    assert len(drawn) <= 4
    results.close()


def test_leaving_early_ends_the_processes_at_once() -> None:
    results = run_parallel(_sleep_for_an_hour, [0, 1], 2)
    assert next(results) == 0
    results.close()
    assert not active_children()


def test_lost_worker_is_told_and_the_others_end() -> None:
    with pytest.raises(WorkerError, match=r"exit code 7"):
        list(run_parallel(_end_abruptly, [0, 1, 2], 2))
    assert not active_children()


def test_workers_ignore_the_interrupt_that_their_parent_handles() -> None:
    assert list(run_parallel(_interrupt_oneself, [1, 2], 2)) in ([1, 2], [2, 1])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_worker_ends_when_the_other_end_closes() -> None:
    ours, theirs = Pipe()
    ours.send(4)
    ours.send(5)

    def square_and_hang_up(number: int) -> int:
        if number == 5:
            ours.close()
        return _square(number)

    serve(theirs, square_and_hang_up)  # returns, and without an exception
    theirs.close()


def test_usable_cores_counts_at_least_one() -> None:
    assert usable_cores() >= 1
