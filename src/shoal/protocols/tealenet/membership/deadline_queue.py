"""A queue of deadlines by key, for thousands of sessions with one timer."""

from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class DeadlineQueue(Generic[K]):
    """Deadlines by key.  A key may come up too early: the caller then sets it again."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._times: dict[K, float] = {}
        self._order = count()  # keys need not be comparable

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
        before = self._times.get(key)
        if before is None or when < before:
            self._times[key] = when
            heappush(self._heap, (when, next(self._order), key))

    def pop_due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline has passed."""
        keys = []
        while self._heap and self._heap[0][0] <= now:
            when, _, key = heappop(self._heap)
            if self._times.get(key) == when:
                del self._times[key]
                keys.append(key)
        return keys
