"""``proxy.core.heap`` against a sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.heap import Heap, Ranking

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


moves = st.lists(
    st.tuples(st.sampled_from(["put", "put", "remove", "ask"]), st.integers(0, 5), st.integers(0, 9)), max_size=300
)


@given(moves)
def test_a_ranking_gives_the_smallest_of_keys_that_change(moves: list[tuple[str, int, int]]) -> None:
    held: dict[int, int] = {}
    ranking: Ranking[int, int] = Ranking(lambda name: (held[name], name))
    for what, name, key in moves:
        match what:
            case "put":
                if name in held:
                    ranking.change(name)
                else:
                    ranking.add(name, name)
                held[name] = key
            case "remove" if name in held:
                ranking.remove(name)
                del held[name]
            case "ask" if held:
                assert ranking.first == min(held, key=lambda name: (held[name], name))
        assert sorted(ranking) == sorted(held)
        assert len(ranking) == len(held)


def test_what_is_not_in_a_ranking_cannot_be_removed() -> None:
    ranking: Ranking[int, int] = Ranking(lambda name: (name,))
    with pytest.raises(KeyError):
        ranking.remove(1)


def test_a_ranking_keeps_nothing_of_keys_that_were_before() -> None:
    keys = {"a": 0, "b": 1}
    ranking: Ranking[str, str] = Ranking(lambda name: (keys[name], name))
    for name in keys:
        ranking.add(name, name)
    for number in range(2000):
        keys["ab"[number % 2]] += 3
        ranking.change("ab"[number % 2])
        assert ranking.first == min(keys, key=lambda name: keys[name])
    assert len(ranking._heap) < 200
