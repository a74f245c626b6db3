"""Who was seen on the local network: each is called while it is there."""

import asyncio
import logging
from dataclasses import replace

from shoal.protocols.crowd import Browser, Outgoing, Sighting
from shoal.runtime.calling import Calls

MET_MAX = 256  # services of one browser that are called; anybody can invent more

log = logging.getLogger("shoal.calling")


class Sighted:
    """A service as it was seen last, as something to be called: an ``Aim``."""

    def __init__(self, browser: Browser, sighting: Sighting) -> None:
        self.changed = asyncio.Event()
        self._browser = browser
        self._sighting: Sighting | None = sighting
        self._tries = 0

    @property
    def wanted(self) -> bool:
        """Whether it is there."""
        return self._sighting is not None

    def next(self, now: float) -> Outgoing | None:
        """Return how to connect, with another of its addresses first each time."""
        sighting = self._sighting
        if sighting is None or not sighting.addresses:
            return None
        first = self._tries % len(sighting.addresses)
        self._tries += 1
        addresses = sighting.addresses[first:] + sighting.addresses[:first]
        return self._browser.meet(replace(sighting, addresses=addresses), now)

    def see(self, sighting: Sighting | None) -> None:
        """Take note of how it is now; None: it has gone."""
        self._sighting = sighting
        self._tries = 0
        self.changed.set()


class Meetings:
    """The services that one browser has seen, by name."""

    def __init__(
        self, wire: str, browser: Browser, calls: Calls, tasks: asyncio.TaskGroup
    ) -> None:
        self.wire = wire
        self.browser = browser
        self._calls = calls
        self._tasks = tasks
        self._seen: dict[str, Sighted] = {}
        self.calling: set[asyncio.Task[None]] = set()

    def saw(self, sighting: Sighting) -> None:
        """Call a service that has come, and take note of one that has changed."""
        known = self._seen.get(sighting.name)
        if known is not None:
            known.see(sighting)
        elif len(self._seen) < MET_MAX:
            task = self._tasks.create_task(self._meet(sighting))
            self.calling.add(task)
            task.add_done_callback(self.calling.discard)

    def lost(self, name: str) -> None:
        """Call a service no more.  A connection that is there goes on."""
        if (known := self._seen.get(name)) is not None:
            known.see(None)

    def lose_all(self) -> None:
        """Take note that nothing is seen any more."""
        for known in self._seen.values():
            known.see(None)

    async def _meet(self, sighting: Sighting) -> None:
        aim = self._seen[sighting.name] = Sighted(self.browser, sighting)
        try:
            await self._calls.keep_up(self.wire, aim)
        finally:
            del self._seen[sighting.name]
