"""Dials services discovered on the local network while they are announced."""

import asyncio
import logging
from dataclasses import replace

from shoal.peers.outbound import OutboundConnections
from shoal.protocols.seam.endpoints import (
    DiscoveredService,
    OutgoingConnection,
    ServiceBrowser,
)

DISCOVERED_MAX = 256  # services dialled per browser; announcements can be forged

log = logging.getLogger("shoal.peers")


class DiscoveryTarget:
    """The last announcement of a service, as a ``DialTarget``."""

    def __init__(self, browser: ServiceBrowser, sighting: DiscoveredService) -> None:
        self.changed = asyncio.Event()
        self._browser = browser
        self._sighting: DiscoveredService | None = sighting
        self._tries = 0

    @property
    def wanted(self) -> bool:
        """Whether the service is announced."""
        return self._sighting is not None

    def next_attempt(self, now: float) -> OutgoingConnection | None:
        """Return how to connect; each attempt starts with the next address."""
        sighting = self._sighting
        if sighting is None or not sighting.addresses:
            return None
        first = self._tries % len(sighting.addresses)
        self._tries += 1
        addresses = sighting.addresses[first:] + sighting.addresses[:first]
        return self._browser.on_found(replace(sighting, addresses=addresses), now)

    def update(self, sighting: DiscoveredService | None) -> None:
        """Replace the announcement; None: the service is gone."""
        self._sighting = sighting
        self._tries = 0
        self.changed.set()


class DiscoveredPeers:
    """The services that one browser discovered, by name."""

    def __init__(
        self,
        wire: str,
        browser: ServiceBrowser,
        calls: OutboundConnections,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.wire = wire
        self.browser = browser
        self._outbound = calls
        self._tasks = tasks
        self._seen: dict[str, DiscoveryTarget] = {}
        self.connections: set[asyncio.Task[None]] = set()

    def on_found(self, sighting: DiscoveredService) -> None:
        """Dial a new service, or update a known one."""
        known = self._seen.get(sighting.name)
        if known is not None:
            known.update(sighting)
        elif len(self._seen) < DISCOVERED_MAX:
            task = self._tasks.create_task(self._meet(sighting))
            self.connections.add(task)
            task.add_done_callback(self.connections.discard)

    def on_lost(self, name: str) -> None:
        """Stop dialling a service; an open connection stays open."""
        if (known := self._seen.get(name)) is not None:
            known.update(None)

    def on_all_lost(self) -> None:
        """Stop dialling every service; open connections stay open."""
        for known in self._seen.values():
            known.update(None)

    async def _meet(self, sighting: DiscoveredService) -> None:
        target = self._seen[sighting.name] = DiscoveryTarget(self.browser, sighting)
        try:
            await self._outbound.maintain(self.wire, target)
        finally:
            del self._seen[sighting.name]
