"""Limits of lists: of each key, and of all keys together.

A list costs the interpreter more than the database, so that keys which read lists at
full speed would slow every chat and every commit down.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shoal.domain.errors import RateLimited
from shoal.gateway.http.quotas import TokenBucket
from shoal.transports.clock import Clock
from shoal.transports.loop_share import LoopShare

LISTS_PER_MINUTE = 600  # of one key
LISTS_WAITING_MAX = 8  # requests of one key for lists that wait for its own
RETRY_AFTER = 1  # seconds
LISTS_SHARE = 0.1  # of a core, for the lists of all keys together
LISTS_BURST = 0.1  # seconds of it at once: a view of the dashboard reads several
REQUEST_COST = 1e-3  # seconds, about, that a request takes beside the list
LIST_COST_MAX = 0.02  # seconds of a page; what takes longer waits for something


@dataclass(slots=True)
class _KeyLists:
    bucket: TokenBucket
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    requests: int = 0  # that read or wait


class ListLimits:
    """The lists that are being read, by the name of the key.

    A key reads one at a time, and a limited number a minute: the store has few threads
    for lists, and one that sends many requests at once leaves the threads to other
    keys.  All keys together have a share of the loop, in which they take turns.
    """

    def __init__(self, clock: Clock, per_minute: int = LISTS_PER_MINUTE) -> None:
        self._clock = clock
        self._per_minute = per_minute
        self._keys: dict[str, _KeyLists] = {}
        self._share = LoopShare(clock, LISTS_SHARE, LISTS_BURST)

    @asynccontextmanager
    async def reading(self, name: str) -> AsyncIterator[None]:
        """Let a key read a list within the block, after the lists it reads already.

        Raises RateLimited.
        """
        now = self._clock.now()
        lists = self._keys.get(name)
        if lists is None:
            bucket = TokenBucket.full(self._per_minute, now)
            lists = self._keys[name] = _KeyLists(bucket)
        _check(lists, now)
        lists.bucket.take(1)
        lists.requests += 1
        try:
            async with lists.reading, self.turn(name):
                yield
        finally:
            lists.requests -= 1

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Wait for a key's turn in the share; charge it what the block takes.

        Others read meanwhile: a list that waits for the store does not delay them.
        """
        if self._share.is_spent:
            await self._share.wait(name)
        self._share.charge(name, REQUEST_COST)
        began = self._clock.now()
        try:
            yield
        finally:
            took = self._clock.now() - began
            self._share.charge(name, min(took, LIST_COST_MAX))

    def retain(self, names: Collection[str]) -> None:
        """Forget the keys that have other names, and read nothing."""
        for name in self._keys.keys() - set(names):
            if not self._keys[name].requests:
                del self._keys[name]


def _check(lists: _KeyLists, now: float) -> None:
    if lists.requests > LISTS_WAITING_MAX:
        raise RateLimited(
            f"this key already reads {lists.requests} lists at once: read one after "
            "the other",
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
