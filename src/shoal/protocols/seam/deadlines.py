"""A queue of deadlines by key: thousands of sessions or tasks with one timer."""

from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

UNUSED_MAX = 64  # entries of the heap without a key, beside one for each key


class DeadlineQueue(Generic[K]):
    """Deadlines by key.  A key may come up too early: the caller then sets it again.

    A key is held until it comes up or is discarded.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # deadlines, with their numbers
        self._keys: dict[int, K] = {}  # by the number of the earliest deadline
        self._earliest: dict[K, tuple[float, int]] = {}
        self._numbers = count()

    @property
    def next_due(self) -> float | None:
        """The earliest deadline."""
        return self._heap[0][0] if self._heap else None

    def set(self, key: K, when: float | None) -> None:
        """Set a key's deadline; None is ignored.

        A later deadline costs nothing: the key comes up once at the old one.
        """
        if when is None:
            return
        before = self._earliest.get(key)
        if before is None or when < before[0]:
            if before is not None:
                del self._keys[before[1]]
            self._earliest[key] = entry = (when, next(self._numbers))
            self._keys[entry[1]] = key
            heappush(self._heap, entry)
            self._drop_unused()

    def discard(self, key: K) -> None:
        """Remove a key, if it has a deadline."""
        entry = self._earliest.pop(key, None)
        if entry is not None:
            del self._keys[entry[1]]
            self._drop_unused()

    def pop_due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline has passed."""
        keys = []
        while self._heap and self._heap[0][0] <= now:
            _, number = heappop(self._heap)
            if number in self._keys:
                key = self._keys.pop(number)
                del self._earliest[key]
                keys.append(key)
        self._drop_unused()
        return keys

    def _drop_unused(self) -> None:
        """Drop the first entries without a key, or all if there are many."""
        if len(self._heap) > 2 * len(self._keys) + UNUSED_MAX:
            self._heap = sorted(self._earliest.values())  # which is a heap
        while self._heap and self._heap[0][1] not in self._keys:
            heappop(self._heap)
