"""A priority queue from whose middle items can be taken."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Item = TypeVar("_Item")

_DEAD = 64
"""Keys without an item that are left alone, however few items there are."""


class Heap(Generic[_Item]):
    """Items by key, smallest first; O(log n) for every change, nearly all of it in C.

    Keys are distinct tuples, and stay as they are while their items are in here. The key of an item that is taken from
    the middle stays until it comes to the top or most keys are such: a sorted list would move half of its run for it.
    """

    __slots__ = ("_items", "_key", "_keys")

    def __init__(self, key: Callable[[_Item], tuple[Any, ...]]) -> None:
        self._key = key
        self._keys: list[tuple[Any, ...]] = []
        self._items: dict[tuple[Any, ...], _Item] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: _Item) -> bool:
        return self._key(item) in self._items

    def __iter__(self) -> Iterator[_Item]:
        """Give all items, smallest key first."""
        return (self._items[key] for key in sorted(self._items))

    def __repr__(self) -> str:
        return f"<Heap of {len(self)}>"

    @property
    def first(self) -> _Item:
        """The item with the smallest key; there must be one."""
        return self._items[self._keys[0]]

    def add(self, item: _Item) -> None:
        key = self._key(item)
        self._items[key] = item
        heappush(self._keys, key)

    def remove(self, item: _Item) -> None:
        """Take an item out.

        Raises:
            KeyError: it is not there.
        """
        del self._items[self._key(item)]
        self._bury()

    def discard(self, item: _Item) -> None:
        """Take an item out if it is there."""
        if self._items.pop(self._key(item), None) is not None:
            self._bury()

    def _bury(self) -> None:
        keys, items = self._keys, self._items
        while keys and keys[0] not in items:
            heappop(keys)
        if len(keys) > 2 * len(items) + _DEAD:
            keys[:] = items
            heapify(keys)
