"""Keeps outbound connections open: dials, and dials again with backoff."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from random import Random
from typing import Protocol

from shoal.peers.relay import ServeSession
from shoal.protocols.seam.endpoints import OutgoingConnection
from shoal.transports.clock import Clock
from shoal.transports.link import Link, LinkClosed

RETRY_FIRST = 0.5  # seconds before a peer is called again
RETRY_MAX = 30.0
STEADY_AFTER = 10.0  # seconds of connection after which retries begin anew

log = logging.getLogger("shoal.calling")


class Dial(Protocol):
    """Opens connections, as ``transports.dialling.dial`` does."""

    def __call__(
        self,
        url: str,
        headers: Mapping[str, str],
        message_max: int,
        *,
        fingerprint: bytes | None = None,
    ) -> AbstractAsyncContextManager[tuple[Link, Mapping[str, str]]]: ...


class DialTarget(Protocol):
    """What is to be connected to, for as long as it is ``wanted``."""

    changed: asyncio.Event
    """Set when that has become something else, or nothing."""

    @property
    def wanted(self) -> bool:
        """Whether there is still a point in it."""
        ...

    def next_attempt(self, now: float) -> OutgoingConnection | None:
        """Return how to connect; None: for now not at all."""
        ...


class FixedTarget:
    """An aim that stays as it is."""

    wanted = True

    def __init__(self, outgoing: OutgoingConnection) -> None:
        self.changed = asyncio.Event()
        self._outgoing = outgoing

    def next_attempt(self, now: float) -> OutgoingConnection:
        """Return how to connect."""
        return self._outgoing


class OutboundConnections:
    """Connections that we open, and open again when they end."""

    def __init__(
        self, serve: ServeSession, dial: Dial, clock: Clock, random: Random
    ) -> None:
        self._serve = serve
        self._dial = dial
        self._clock = clock
        self._random = random
        self._aims: set[DialTarget] = set()
        self._stopping = False

    def stop(self) -> None:
        """Call nobody any more."""
        self._stopping = True
        for aim in self._aims:
            aim.changed.set()

    async def maintain(self, wire: str, aim: DialTarget) -> None:
        """Keep a connection up until that is not wanted, or ``stop`` is called.

        One that is there then goes on until it ends by itself.
        """
        self._aims.add(aim)
        try:
            await self._keep_up(wire, aim)
        finally:
            self._aims.discard(aim)

    async def _keep_up(self, wire: str, aim: DialTarget) -> None:
        delay = RETRY_FIRST
        told = False  # that nobody answers, which is said once and not for each try
        while aim.wanted and not self._stopping:
            began = self._clock.now()
            if (outgoing := aim.next_attempt(began)) is not None:
                failure = await self._connect(wire, outgoing)
                if failure is not None and not told:
                    log.warning(
                        "unreached wire=%s reason=%r; trying again", wire, failure
                    )
                told = failure is not None
            if self._clock.now() - began > STEADY_AFTER:
                delay = RETRY_FIRST
            if await self._pause(aim, delay):
                delay = RETRY_FIRST
                if self._stopping:
                    return
                # Who changes all the time is not called all the time.
                await asyncio.sleep(delay * self._random.uniform(0.5, 1.0))
            else:
                delay = min(delay * 2, RETRY_MAX)

    async def _connect(self, wire: str, outgoing: OutgoingConnection) -> str | None:
        """Connect, and serve until the end; say why it did not come about, if so."""
        try:
            async with self._dial(
                outgoing.url,
                outgoing.headers,
                outgoing.message_max,
                fingerprint=outgoing.fingerprint,
            ) as (link, _):
                if not self._stopping:
                    await self._serve(
                        wire, outgoing.new_session(self._clock.now()), link
                    )
                return None
        except LinkClosed as closed:
            return str(closed)

    async def _pause(self, aim: DialTarget, delay: float) -> bool:
        """Wait about so many seconds; return early with True if the aim changes."""
        if self._stopping:
            return False
        aim.changed.clear()
        # Spread out, for a peer that restarts sees all the others at once.
        pause = delay * self._random.uniform(0.5, 1.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await aim.changed.wait()
                return True
        return False
