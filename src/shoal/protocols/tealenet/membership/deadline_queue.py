"""Deadlines of many keys: finds the next one without a search."""

from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class DeadlineQueue(Generic[K]):
    """Times by key.  A key may come up too early, and has then to be set again."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._times: dict[K, float] = {}
        self._order = count()  # keys need not be comparable

    @property
    def next_due(self) -> float | None:
        """When the next key comes up."""
        return self._heap[0][0] if self._heap else None

    def set(self, key: K, when: float | None) -> None:
        """Let a key come up at ``when``, or before.

        A time that moves on costs nothing: the key comes up at the old one, once.
        """
        if when is None:
            return
        before = self._times.get(key)
        if before is None or when < before:
            self._times[key] = when
            heappush(self._heap, (when, next(self._order), key))

    def pop_due(self, now: float) -> list[K]:
        """Return the keys whose time has come, and forget them."""
        keys = []
        while self._heap and self._heap[0][0] <= now:
            when, _, key = heappop(self._heap)
            if self._times.get(key) == when:
                del self._times[key]
                keys.append(key)
        return keys
