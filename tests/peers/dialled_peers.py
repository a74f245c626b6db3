"""Peers in memory that can be dialled, with a record of the attempts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from shoal.peers.outbound import OutboundConnections
from shoal.protocols.seam.endpoints import OutgoingConnection
from shoal.protocols.seam.peer_session import PeerSession
from shoal.transports.clock import LoopClock
from shoal.transports.driver import ConnectionEnd
from shoal.transports.link import Link, LinkClosed
from transports.memory_links import MemoryLink, ScriptedSession

REFUSED: Callable[[], float] = lambda: -1.0  # noqa: E731  # reads as a constant


OVER = ConnectionEnd("over")


@dataclass
class DialledPeers:
    """Accepts connections, each for ``lifetime`` seconds.

    A negative lifetime refuses the connection.
    """

    lifetime: Callable[[], float] = REFUSED
    calls: list[tuple[float, str]] = field(default_factory=list)  # when, whom
    fingerprints: list[bytes | None] = field(default_factory=list)
    end: ConnectionEnd = OVER
    served: int = 0
    open: int = 0

    @asynccontextmanager
    async def dial(
        self,
        url: str,
        headers: Mapping[str, str],
        message_max: int,
        *,
        fingerprint: bytes | None = None,
    ) -> AsyncIterator[tuple[Link, Mapping[str, str]]]:
        self.calls.append((asyncio.get_running_loop().time(), url))
        self.fingerprints.append(fingerprint)
        self._lifetime = self.lifetime()
        if self._lifetime < 0:
            raise LinkClosed(f"cannot connect to {url}: connection refused")
        yield MemoryLink(), {}

    async def serve(self, wire: str, session: PeerSession, link: Link) -> ConnectionEnd:
        self.served += 1
        self.open += 1
        try:
            await asyncio.sleep(self._lifetime)
        finally:
            self.open -= 1
        return self.end

    def connections(self) -> OutboundConnections:
        return OutboundConnections(self.serve, self.dial, LoopClock(), Random(1))


def open_session(now: float) -> Any:
    """Open a session that sends nothing."""
    return ScriptedSession()


def target(url: str, fingerprint: bytes | None = None) -> OutgoingConnection:
    return OutgoingConnection(url, open_session, fingerprint=fingerprint)
