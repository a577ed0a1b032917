"""Priority queues: one from whose middle items can be taken, and one whose items' keys change."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

_Item = TypeVar("_Item")
_Name = TypeVar("_Name", bound="Hashable")

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
        keys, items = self._keys, self._items
        while keys and keys[0] not in items:
            heappop(keys)
        if len(keys) > 2 * len(items) + _DEAD:
            keys[:] = items
            heapify(keys)

    def discard(self, item: _Item) -> None:
        """Take an item out if it is there."""
        if self._key(item) in self._items:
            self.remove(item)


class Ranking(Generic[_Name, _Item]):
    """Named items by keys that change, smallest first; sorted only when somebody asks.

    A change costs next to nothing however often it comes; asking costs O(log n) for each item that has changed since it
    was asked last, and nothing where there is but one. Keys of different items are distinct.
    """

    __slots__ = ("_changed", "_heap", "_items", "_key", "_keys")

    def __init__(self, key: Callable[[_Item], tuple[Any, ...]]) -> None:
        self._key = key
        self._items: dict[_Name, _Item] = {}
        self._changed: dict[_Name, None] = {}
        self._keys: dict[_Name, tuple[Any, ...]] = {}  # as sorted
        self._heap: list[tuple[tuple[Any, ...], _Name]] = []  # with what has changed or gone since

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[_Item]:
        """Give all items, in no order."""
        return iter(self._items.values())

    def __repr__(self) -> str:
        return f"<Ranking of {len(self)}>"

    def add(self, name: _Name, item: _Item) -> None:
        self._items[name] = item
        self._changed[name] = None

    def change(self, name: _Name) -> None:
        """Note that the key of an item has changed."""
        self._changed[name] = None

    def remove(self, name: _Name) -> None:
        """Take an item out.

        Raises:
            KeyError: it is not there.
        """
        del self._items[name]
        self._changed.pop(name, None)
        self._keys.pop(name, None)

    @property
    def first(self) -> _Item:
        """The item with the smallest key; there must be one."""
        items, heap, keys = self._items, self._heap, self._keys
        if len(items) == 1:
            return next(iter(items.values()))
        for name in self._changed:
            keys[name] = key = self._key(items[name])
            heappush(heap, (key, name))
        self._changed.clear()
        if len(heap) > 2 * len(items) + _DEAD:
            heap[:] = [(key, name) for name, key in keys.items()]
            heapify(heap)
        while keys.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return items[heap[0][1]]
