"""The share of its speed that the owner of a machine lends to pools, and pauses."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakMethod

from shoal.config.throttle_file import ThrottleFile
from shoal.domain.worker import PAUSED, THROTTLE_MAX, Offer
from shoal.worker.owner_rules import OwnerPause, OwnerReadings

WATCH_INTERVAL = 1.0  # seconds between looks at the owner's file
RULES_INTERVAL = 5.0  # seconds between readings for the owner's rules


class OwnerThrottle:
    """The throttle of one worker, in percent; 0: it is paused.

    Part of a machine's speed is lent as part of its slots: see ``lent``.
    ``pause_reason`` is why the owner's rules pause the worker; empty: they do not.
    Running jobs end before a pause by the throttle, and are handed over for one by
    the rules.
    """

    def __init__(self, percent: int = THROTTLE_MAX) -> None:
        self.percent = percent
        self.pause_reason = ""
        self._share = percent or THROTTLE_MAX  # the last one above 0
        self._listeners: list[Callable[[], None]] = []
        # Of slots, which come and go with the connection to a cluster.
        self._methods: list[WeakMethod[Callable[[], None]]] = []

    @property
    def paused(self) -> bool:
        """Whether the owner lends nothing: no new job starts."""
        return bool(self.why_paused)

    @property
    def why_paused(self) -> str:
        """Why the worker gets no jobs, for its coordinator; empty: it gets some."""
        if self.percent == 0:
            return PAUSED
        return f"paused: {self.pause_reason}" if self.pause_reason else ""

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
        self._notify()

    def pause(self, reason: str) -> None:
        """Pause for a reason of the owner's rules, or end such a pause if empty."""
        self.pause_reason = reason
        self._notify()

    def _notify(self) -> None:
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

    async def watch(
        self, file: ThrottleFile, pause: OwnerPause, report: Callable[[], None]
    ) -> None:
        """Follow the owner's file until cancelled; ``report`` is called on changes.

        An order to lend something ends a ``pause`` of the rules.
        """
        while True:
            await asyncio.sleep(WATCH_INTERVAL)
            percent = file.poll()
            if percent is None:
                continue
            overridden = bool(percent and self.pause_reason)
            if overridden:
                pause.override()
                self.pause_reason = ""
            if overridden or percent != self.percent:
                self.set(percent)
                report()

    async def follow_rules(
        self,
        pause: OwnerPause,
        read: Callable[[], Awaitable[OwnerReadings]],
        now: Callable[[], float],
        report: Callable[[], None],
    ) -> None:
        """Pause by the owner's rules until cancelled.

        ``read`` reads the machine; ``report`` is called when a pause begins or ends.
        """
        while True:
            before, reason = self.paused, pause.update(await read(), now())
            if reason != self.pause_reason:
                self.pause(reason)
                if self.paused is not before:
                    report()
            await asyncio.sleep(RULES_INTERVAL)
