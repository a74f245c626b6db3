"""Dials services discovered on the local network while they are announced."""

import asyncio
import logging
from dataclasses import dataclass, field, replace

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

    def __init__(self, browser: ServiceBrowser, service: DiscoveredService) -> None:
        self.changed = asyncio.Event()
        self._browser = browser
        self._service: DiscoveredService | None = service
        self._tries = 0

    @property
    def wanted(self) -> bool:
        """Whether the service is announced."""
        return self._service is not None

    def next_attempt(self, now: float) -> OutgoingConnection | None:
        """Return how to connect; each attempt starts with the next address."""
        service = self._service
        if service is None or not service.addresses:
            return None
        first = self._tries % len(service.addresses)
        self._tries += 1
        addresses = service.addresses[first:] + service.addresses[:first]
        return self._browser.on_found(replace(service, addresses=addresses), now)

    def update(self, service: DiscoveredService | None) -> None:
        """Replace the announcement; None: the service is gone."""
        self._service = service
        self._tries = 0
        self.changed.set()


@dataclass(slots=True, eq=False)
class DiscoveredPeers:
    """The services that one browser discovered, by name."""

    wire: str
    browser: ServiceBrowser
    _outbound: OutboundConnections
    _tasks: asyncio.TaskGroup
    _seen: dict[str, DiscoveryTarget] = field(default_factory=dict)
    connections: set[asyncio.Task[None]] = field(default_factory=set)

    def on_found(self, service: DiscoveredService) -> None:
        """Dial a new service, or update a known one."""
        known = self._seen.get(service.name)
        if known is not None:
            known.update(service)
        elif len(self._seen) < DISCOVERED_MAX:
            task = self._tasks.create_task(self._connect(service))
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

    async def _connect(self, service: DiscoveredService) -> None:
        target = self._seen[service.name] = DiscoveryTarget(self.browser, service)
        try:
            await self._outbound.maintain(self.wire, target)
        finally:
            del self._seen[service.name]
