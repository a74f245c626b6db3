"""The share of its speed that the owner of a machine lends to pools."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakMethod

from shoal.config.throttle_file import ThrottleFile
from shoal.domain.worker import THROTTLE_MAX, Offer

WATCH_INTERVAL = 1.0  # seconds between looks at the owner's file


class OwnerThrottle:
    """The throttle of one worker, in percent; 0: it is paused.

    Part of a machine's speed is lent as part of its slots: see ``lent``.
    """

    def __init__(self, percent: int = THROTTLE_MAX) -> None:
        self.percent = percent
        self._share = percent or THROTTLE_MAX  # the last one above 0
        self._listeners: list[Callable[[], None]] = []
        # Of slots, which come and go with the connection to a cluster.
        self._methods: list[WeakMethod[Callable[[], None]]] = []

    @property
    def paused(self) -> bool:
        """Whether the owner lends nothing: no new job starts."""
        return self.percent == 0

    def lent(self, slots: int) -> int:
        """Return how many of some slots are lent, rounded up.

        A paused worker keeps its slots: its running jobs go on.
        """
        return -(-slots * self._share // THROTTLE_MAX)

    def limit(self, offers: Sequence[Offer]) -> tuple[Offer, ...]:
        """Return offers with the slots that are lent."""
        return tuple(replace(each, slots=self.lent(each.slots)) for each in offers)

    def set(self, percent: int) -> None:
        """Change the throttle."""
        self.percent = percent
        self._share = percent or self._share
        for method in [*self._methods]:
            if (listener := method()) is not None:
                listener()
        for listener in [*self._listeners]:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call a bound method after each change, for as long as its object exists."""
        self._methods.append(WeakMethod(listener, self._methods.remove))

    @contextmanager
    def observed(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call a function after each change, within the block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def watch(self, file: ThrottleFile, report: Callable[[], None]) -> None:
        """Follow the owner's file until cancelled; ``report`` is called on changes."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL)
            percent = file.poll()
            if percent is not None and percent != self.percent:
                self.set(percent)
                report()
