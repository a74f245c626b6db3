"""Bounds the lists that one key reads: one at a time, and so many a minute.

The store has few threads for lists.  A key that sends many requests at once waits for
its own, and leaves the threads to other keys.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shoal.domain.errors import RateLimited
from shoal.gateway.http.quotas import TokenBucket

LISTS_PER_MINUTE = 600  # of one key: a page takes up to 20 ms of a core
LISTS_WAITING_MAX = 8  # requests of one key for lists that wait for its own
RETRY_AFTER = 1  # seconds


@dataclass(slots=True)
class _KeyLists:
    bucket: TokenBucket
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    requests: int = 0  # that read or wait


@dataclass(slots=True)
class ListLimits:
    """The lists that are being read, by the name of the key."""

    per_minute: int = LISTS_PER_MINUTE
    _keys: dict[str, _KeyLists] = field(default_factory=dict)

    @asynccontextmanager
    async def reading(self, name: str, now: float) -> AsyncIterator[None]:
        """Let a key read a list within the block, after the lists it reads already.

        ``now`` is in monotonic seconds.  Raises RateLimited.
        """
        lists = self._keys.get(name)
        if lists is None:
            bucket = TokenBucket.full(self.per_minute, now)
            lists = self._keys[name] = _KeyLists(bucket)
        _check(lists, now)
        lists.bucket.take(1)
        lists.requests += 1
        try:
            async with lists.reading:
                yield
        finally:
            lists.requests -= 1

    def retain(self, names: Collection[str]) -> None:
        """Forget the keys that have other names, and read nothing."""
        for name in self._keys.keys() - set(names):
            if not self._keys[name].requests:
                del self._keys[name]


def _check(lists: _KeyLists, now: float) -> None:
    if lists.requests > LISTS_WAITING_MAX:
        raise RateLimited(
            f"this key reads {lists.requests} lists at once: read one after the other",
            RETRY_AFTER,
        )
    lists.bucket.refill(now)
    if wait := lists.bucket.seconds_until(1):
        seconds = math.ceil(wait)
        raise RateLimited(
            f"this key may read {lists.bucket.limit} lists a minute: try again in "
            f"{seconds} s",
            seconds,
        )
