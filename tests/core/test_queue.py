import random
from typing import ClassVar

from builders import make_request

from proxy.core.lane import Waiting
from proxy.core.queue import Backlog, WaitingQueue


def waiting(name: str, key: float, *, arrived_at: float = 0.0, number: int = 0) -> Waiting:
    return Waiting(make_request(name), arrived_at, key, number)


def queue_of(*items: Waiting, max_wait_seconds: float = 60.0) -> WaitingQueue:
    queue = WaitingQueue(max_wait_seconds)
    for item in items:
        queue.push(item)
    return queue


def drained(queue: WaitingQueue, now: float) -> list[str]:
    names = []
    while queue:
        head = queue.head(now)
        names.append(head.request.id)
        queue.remove(head)
    return names


def test_the_smallest_key_is_released_first() -> None:
    queue = queue_of(waiting("b", 2.0, number=1), waiting("a", 1.0, number=2), waiting("c", 3.0, number=3))
    assert drained(queue, now=0.0) == ["a", "b", "c"]


def test_equal_keys_are_released_in_the_order_of_arrival() -> None:
    queue = queue_of(*(waiting(str(n), 1.0, number=n) for n in (3, 1, 2)))
    assert drained(queue, now=0.0) == ["1", "2", "3"]


def test_who_has_waited_for_the_longest_allowed_time_goes_before_every_key() -> None:
    queue = queue_of(waiting("old", 99.0, arrived_at=0.0), waiting("short", 1.0, arrived_at=50.0, number=1))
    assert queue.head(59.999).request.id == "short"
    assert queue.head(60.0).request.id == "old"


def test_of_several_that_waited_too_long_the_oldest_goes_first_and_then_the_rest_by_key() -> None:
    queue = queue_of(
        waiting("fresh", 0.0, arrived_at=55.0, number=4),
        waiting("older", 9.0, arrived_at=1.0, number=2),
        waiting("oldest", 10.0, arrived_at=0.0, number=1),
        waiting("fresher", 5.0, arrived_at=56.0, number=5),
    )
    assert drained(queue, now=61.0) == ["oldest", "older", "fresh", "fresher"]


def test_the_oldest_is_found_whatever_its_key_and_its_number() -> None:
    """One taken back by an engine, or slow to upload, has an old arrival under a young number."""
    queue = queue_of(waiting("a", 1.0, arrived_at=5.0, number=1), waiting("b", 2.0, arrived_at=4.0, number=2))
    assert queue.oldest.request.id == "b"


def test_the_longest_wait_is_that_of_the_oldest_of_all_queues() -> None:
    backlog = Backlog(60.0)
    assert backlog.longest_wait(9.0) == 0.0
    for name, key, arrived_at, engine in (("a", 1.0, 4.0, "x"), ("b", 9.0, 3.0, "y"), ("c", 5.0, 5.0, "y")):
        backlog.push(waiting(name, key, arrived_at=arrived_at), frozenset({engine}))
    assert backlog.longest_wait(9.0) == 6.0


def test_one_is_removed_from_the_middle_and_the_others_keep_their_order() -> None:
    middle = waiting("b", 2.0, number=2)
    queue = queue_of(waiting("a", 1.0, number=1), middle, waiting("c", 3.0, number=3))
    queue.remove(middle)
    assert len(queue) == 2
    assert drained(queue, now=0.0) == ["a", "c"]


def test_a_removed_one_can_come_back_to_its_old_place() -> None:
    first = waiting("a", 1.0, number=1)
    queue = queue_of(first, waiting("b", 2.0, number=2))
    queue.remove(first)
    queue.push(first)
    assert drained(queue, now=0.0) == ["a", "b"]


class CountedKey(float):
    """A key that counts how often it is compared."""

    comparisons: ClassVar[int] = 0

    def __lt__(self, other: float) -> bool:
        CountedKey.comparisons += 1
        return float(self) < float(other)

    def __eq__(self, other: object) -> bool:
        CountedKey.comparisons += 1
        return isinstance(other, float) and float(self) == float(other)

    def __hash__(self) -> int:
        return hash(float(self))


def test_a_change_costs_some_tens_of_comparisons_among_twenty_thousand() -> None:
    rng = random.Random(0)
    items = [waiting(str(n), CountedKey(rng.random()), arrived_at=rng.random(), number=n) for n in range(20_000)]
    queue = queue_of(*items)
    for item in rng.sample(items, 200):
        CountedKey.comparisons = 0
        queue.remove(item)
        queue.push(item)
        assert CountedKey.comparisons < 150
    assert len(queue) == 20_000
