"""``proxy.core.heap`` against a sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.heap import Heap

steps = st.lists(st.tuples(st.sampled_from(["add", "remove", "discard"]), st.integers(0, 9)), max_size=300)


@given(steps)
def test_it_holds_what_was_put_in_and_not_taken_out_smallest_first(steps: list[tuple[str, int]]) -> None:
    heap: Heap[int] = Heap(lambda number: (-number,))
    held: set[int] = set()
    for what, number in steps:
        match what:
            case "add" if number not in held:
                heap.add(number)
                held.add(number)
            case "remove" if number in held:
                heap.remove(number)
                held.remove(number)
            case "discard":
                heap.discard(number)
                held.discard(number)
        assert list(heap) == sorted(held, reverse=True)
        assert (len(heap), bool(heap), number in heap) == (len(held), bool(held), number in held)
        if held:
            assert heap.first == max(held)


def test_what_is_not_there_cannot_be_removed() -> None:
    heap: Heap[int] = Heap(lambda number: (number,))
    with pytest.raises(KeyError):
        heap.remove(1)


def test_keys_of_what_has_gone_do_not_pile_up() -> None:
    heap: Heap[int] = Heap(lambda number: (number,))
    heap.add(-1)
    for number in range(10_000):
        heap.add(number)
        heap.remove(number)
    assert len(heap._keys) < 100
