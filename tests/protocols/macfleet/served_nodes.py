"""Nodes of a fleet on real sockets, and bare connections to them."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random

from gateway.serving import WAIT_MAX
from shoal.app.network import NetworkContext, open_network
from shoal.coordinator.admission import WorkerAdmission, load_join_tokens
from shoal.protocols.macfleet.discovery import heartbeat_listener
from shoal.protocols.macfleet.gossip import FleetGossip, TransportDialer
from shoal.protocols.macfleet.heartbeat import PingExchange, Pong
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.membership import FleetNode, FleetRegistry, NodeAddress
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter
from shoal.protocols.seam.admission import NoThrottle
from shoal.protocols.seam.endpoints import OutgoingConnection
from shoal.protocols.seam.peer_session import PeerMessage, PeerSession, ToPeer
from shoal.protocols.seam.protocol import Endpoint
from shoal.transports.clock import LoopClock
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import Link
from store.in_memory import memory_store

HOST = "127.0.0.1"


@dataclass
class ServedNode:
    """A node that listens and gossips; ``secure``: with TLS."""

    own: FleetMember
    limiter: FleetRateLimiter
    fleet: FleetRegistry
    secure: bool
    port: int = 0
    ends: list[str] = field(default_factory=list)

    @property
    def address(self) -> NodeAddress:
        return NodeAddress(HOST, self.port)

    def node(self, node_id: str) -> FleetNode | None:
        return self.fleet.get(node_id)

    def failures(self) -> int:
        """Return the number of failures counted for this machine."""
        record = self.limiter._records.get(HOST)
        return 0 if record is None else record.failures

    def undecided(self) -> int:
        return len(self.limiter._pending.get(HOST, ()))

    async def serve(self, wire: str, session: PeerSession, link: Link) -> ConnectionEnd:
        def meet_nobody(said: PeerMessage) -> None:
            raise AssertionError(said)

        driver = Driver[PeerMessage, ToPeer](session, link, LoopClock(), meet_nobody)
        end = await driver.run()
        self.ends.append(end.reason)
        return end


@asynccontextmanager
async def served(
    own: FleetMember,
    contacts: Sequence[NodeAddress] = (),
    port: int = 0,
    *,
    spares_loopback: bool = False,
) -> AsyncIterator[ServedNode]:
    """Serve a node for the duration of the block."""
    clock = LoopClock()
    async with memory_store() as store:  # nothing is written to it
        admission = WorkerAdmission(
            await load_join_tokens(store.keys), store.keys, clock
        )
    limiter = FleetRateLimiter(NoThrottle(), spares_loopback=spares_loopback)
    fleet = FleetRegistry(own.node_id, own.profile)
    node = ServedNode(own, limiter, fleet, secure=own.key is not None)
    ways = TransportDialer(lambda node: False, _dial_nobody)
    endpoints: list[tuple[str, Endpoint]] = [
        ("macfleet", heartbeat_listener(own, limiter, fleet, port)),
        ("macfleet", FleetGossip(own, fleet, contacts, ways)),
    ]
    means = NetworkContext(node.serve, admission, clock, Random(1), HOST)
    async with open_network(endpoints, means) as ports:
        (node.port,) = ports["macfleet"].values()
        yield node


@dataclass
class HeartbeatConnection:
    """A bare connection to a node."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def rest(self) -> bytes:
        """Return everything received until the peer disconnects."""
        received = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(WAIT_MAX):
                while data := await self.reader.read(1 << 16):
                    received += data
        return received

    async def say(self, data: bytes) -> bytes:
        """Send bytes; return everything received."""
        await self.send(data)
        return await self.rest()


@asynccontextmanager
async def connected(
    node: ServedNode, *, secure: bool | None = None
) -> AsyncIterator[HeartbeatConnection]:
    """Connect as the node expects, unless told otherwise."""
    tls = _trusting() if (node.secure if secure is None else secure) else None
    reader, writer = await asyncio.open_connection(HOST, node.port, ssl=tls)
    try:
        yield HeartbeatConnection(reader, writer)
    finally:
        writer.transport.abort()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


@asynccontextmanager
async def many_connected(
    node: ServedNode, number: int
) -> AsyncIterator[list[HeartbeatConnection]]:
    """Open several connections at once."""
    async with AsyncExitStack() as opened:
        enter = opened.enter_async_context
        yield [await enter(connected(node)) for _ in range(number)]


async def ping(node: ServedNode, own: FleetMember) -> Pong | None:
    """Ping a node as another node does; None: no pong."""
    exchange = PingExchange(own, node.own.node_id)
    async with connected(node) as line:
        answer = await line.say(exchange.ping())
    return exchange.receive_pong(answer.partition(b"\n")[0]) if answer else None


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _dial_nobody(node: FleetNode) -> OutgoingConnection:
    raise AssertionError("nobody is wanted")
