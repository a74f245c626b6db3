"""Keeps outbound connections open: dials, and redials with backoff.

Services discovered on the local network are dialled while they are announced.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from shoal.peers.relay import ServeSession
from shoal.protocols.seam.endpoints import (
    DiscoveredService,
    OutgoingConnection,
    ServiceBrowser,
)
from shoal.protocols.seam.session import CloseCode
from shoal.transports.clock import Clock
from shoal.transports.link import Link, LinkClosed

RETRY_FIRST = 0.5  # seconds before the first redial
RETRY_MAX = 30.0  # seconds
STEADY_AFTER = 10.0  # seconds of connection after which the backoff resets

DISCOVERED_MAX = 256  # services dialled per browser; announcements can be forged

log = logging.getLogger("shoal.peers")


class Dial(Protocol):
    """Opens connections, as ``transports.dialer.dial`` does."""

    def __call__(
        self,
        url: str,
        headers: Mapping[str, str],
        message_max: int,
        *,
        fingerprint: bytes | None = None,
    ) -> AbstractAsyncContextManager[tuple[Link, Mapping[str, str]]]: ...


class DialTarget(Protocol):
    """A target to keep connected while it is ``wanted``."""

    changed: asyncio.Event
    """Set when the target changes or is no longer wanted."""

    @property
    def wanted(self) -> bool:
        """Whether to keep dialling."""

    def next_attempt(self, now: float) -> OutgoingConnection | None:
        """Return how to connect; None: not now."""


class FixedTarget:
    """A target that never changes, and is wanted until it is released."""

    def __init__(self, outgoing: OutgoingConnection) -> None:
        self.changed = asyncio.Event()
        self.wanted = True
        self._outgoing = outgoing

    def next_attempt(self, now: float) -> OutgoingConnection:
        """Return how to connect."""
        return self._outgoing

    def release(self) -> None:
        """Stop dialling; an open connection stays open."""
        self.wanted = False
        self.changed.set()


class OutboundConnections:
    """Connections that Shoal dials, and redials when they end."""

    def __init__(
        self, serve: ServeSession, dial: Dial, clock: Clock, random: Random
    ) -> None:
        self._serve = serve
        self._dial = dial
        self._clock = clock
        self._random = random
        self._targets: set[DialTarget] = set()
        self._stopping = False

    def stop(self) -> None:
        """Stop dialling; open connections stay open."""
        self._stopping = True
        for target in self._targets:
            target.changed.set()

    async def maintain(self, wire: str, target: DialTarget) -> None:
        """Keep a connection open until it is not wanted, or ``stop`` is called.

        A connection that is open by then is served until it ends.
        """
        self._targets.add(target)
        try:
            await self._maintain(wire, target)
        finally:
            self._targets.discard(target)

    async def _maintain(self, wire: str, target: DialTarget) -> None:
        delay = RETRY_FIRST
        warned = False  # log a failure once, and not for each attempt
        while target.wanted and not self._stopping:
            began = self._clock.now()
            if (outgoing := target.next_attempt(began)) is not None:
                failure = await self._connect(wire, outgoing)
                if failure is not None and not warned:
                    log.warning(
                        "unreachable wire=%s reason=%r; retrying", wire, failure
                    )
                warned = failure is not None
            if self._clock.now() - began > STEADY_AFTER:
                delay = RETRY_FIRST
            if await self._pause(target, delay):
                delay = RETRY_FIRST
                if self._stopping:
                    return
                # Limits the dial rate for a target that changes continually.
                await asyncio.sleep(delay * self._random.uniform(0.5, 1.0))
            else:
                delay = min(delay * 2, RETRY_MAX)

    async def _connect(self, wire: str, outgoing: OutgoingConnection) -> str | None:
        """Connect and serve until the end; return why dialling failed, or the peer
        was refused, if so.
        """
        try:
            async with self._dial(
                outgoing.url,
                outgoing.headers,
                outgoing.message_max,
                fingerprint=outgoing.fingerprint,
            ) as (link, _):
                if not self._stopping:
                    session = outgoing.new_session(self._clock.now())
                    end = await self._serve(wire, session, link)
                    if end.code == CloseCode.POLICY_VIOLATION:
                        return f"{link.peer}: {end.reason}"
                return None
        except LinkClosed as closed:
            return str(closed)

    async def _pause(self, target: DialTarget, delay: float) -> bool:
        """Wait for about ``delay`` seconds; return True early if the target changes."""
        if self._stopping:
            return False
        target.changed.clear()
        # Jitter: after a restart of a peer, all its peers redial it.
        pause = delay * self._random.uniform(0.5, 1.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await target.changed.wait()
                return True
        return False


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
