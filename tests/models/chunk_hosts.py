"""Peers that send models in chunks: both ends are real, only the link is in memory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from protocols.contexts import protocol_context
from shoal.domain.model_messages import ChunkSent, ModelMessage
from shoal.domain.worker import ServedModel
from shoal.ledger.keys import Signer
from shoal.models.library_server import LibraryServer
from shoal.models.peer_connection import PeerConnection, over_link
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import UpgradeRequest, WebSocketRoute
from shoal.protocols.seam.peer_session import PeerLeft, PeerMessage, ToPeer
from shoal.protocols.shoal import POOL_PATH, PROTOCOL, Config
from shoal.transports.clock import LoopClock
from shoal.transports.driver import Driver
from shoal.transports.local_link import local_links

Tamper = Callable[[ModelMessage], list[ModelMessage]]


async def at_once() -> None:
    """Wait for nothing."""


@dataclass
class ChunkHost:
    """A peer with a library; ``tamper`` may change what it sends.

    ``may_send`` is awaited before each chunk.  ``chunks`` are the numbers of those that
    it has sent, and ``connections`` how often it was connected.
    """

    url: str
    sharing: LibraryServer
    tamper: Tamper = lambda message: [message]
    may_send: Callable[[], Awaitable[object]] = at_once
    chunks: list[int] = field(default_factory=list)
    connections: int = 0
    drivers: list[Driver[PeerMessage, ToPeer]] = field(default_factory=list)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[PeerConnection]:
        self.connections += 1
        clock = LoopClock()
        host_end, guest_end = local_links(self.url, "guest")
        route = next(
            each
            for each in PROTOCOL.endpoints(Config(), protocol_context())
            if isinstance(each, WebSocketRoute) and each.claims(PATH)
        )
        driver: Driver[PeerMessage, ToPeer]

        async def wait_writable() -> None:
            await self.may_send()
            await driver.wait_for_bulk_room()

        def receive(message: PeerMessage) -> None:
            if isinstance(message.message, ModelMessage):
                self.sharing.on_message(
                    f"guest {guest}",
                    message.message,
                    lambda reply: self._send(driver, message.peer, reply),
                    wait_writable,
                )
            elif isinstance(message.message, PeerLeft):
                self.sharing.on_peer_left(f"guest {guest}")

        driver = Driver(
            route.accept(PATH, clock.now()).session, host_end, clock, receive
        )
        self.drivers.append(driver)
        guest = self.connections
        profile = WorkerProfile(
            f"guest-{guest}", ServedModel(""), 0, identity=Signer.from_seed(bytes(32))
        )
        assert PROTOCOL.peering is not None
        outgoing = PROTOCOL.peering("http://127.0.0.1:4000", profile)
        running = asyncio.create_task(driver.run())
        session = outgoing.new_session(clock.now())
        try:
            async with over_link(session, guest_end, clock) as connection:
                yield connection
        finally:
            driver.disconnect("done")
            self.sharing.on_peer_left(f"guest {guest}")
            await running

    def disconnect(self) -> None:
        """End all connections, as a process that is killed."""
        for driver in self.drivers:
            driver.disconnect("killed")

    def _send(
        self, driver: Driver[PeerMessage, ToPeer], peer: str, reply: ModelMessage
    ) -> bool:
        for each in self.tamper(reply):
            if isinstance(each, ChunkSent):
                self.chunks.append(each.chunk)
            if not driver.send(ToPeer(peer, each)):
                return False
        return True


PATH = UpgradeRequest(POOL_PATH, address="127.0.0.1")
