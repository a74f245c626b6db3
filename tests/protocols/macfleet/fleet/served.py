"""Nodes of a fleet on real sockets, and bare connections to them."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random

from gateway.serving import PATIENCE
from shoal.protocols import Endpoint
from shoal.protocols.crowd import CrowdSession, From, Outgoing, To
from shoal.protocols.macfleet.fleet.gossip import Gossip, Ways
from shoal.protocols.macfleet.fleet.limiter import Limiter
from shoal.protocols.macfleet.fleet.meeting import heartbeat_listener
from shoal.protocols.macfleet.fleet.own import Member
from shoal.protocols.macfleet.fleet.pinging import PingExchange, Pong
from shoal.protocols.macfleet.fleet.registry import Address, Fleet, Node
from shoal.protocols.session import Uncounted
from shoal.runtime.clock import LoopClock
from shoal.runtime.door import Door, token_book
from shoal.runtime.driver import Driver, End
from shoal.runtime.link import Link
from shoal.runtime.reaching import Means, reaching
from shoal.store.memory_keys import MemoryKeys

HOST = "127.0.0.1"


@dataclass
class Served:
    """A node that listens and gossips; ``secure`` says whether with TLS."""

    own: Member
    limiter: Limiter
    fleet: Fleet
    secure: bool
    port: int = 0
    ends: list[str] = field(default_factory=list)

    @property
    def address(self) -> Address:
        return Address(HOST, self.port)

    def node(self, node_id: str) -> Node | None:
        return self.fleet.get(node_id)

    def failures(self) -> int:
        """Return how many failures are counted of this machine."""
        record = self.limiter._records.get(HOST)
        return 0 if record is None else record.failures

    def undecided(self) -> int:
        return len(self.limiter._undecided.get(HOST, ()))

    async def serve(self, wire: str, session: CrowdSession, link: Link) -> End:
        def meet_nobody(said: From) -> None:
            raise AssertionError(said)

        driver = Driver[From, To](session, link, LoopClock(), meet_nobody)
        end = await driver.run()
        self.ends.append(end.reason)
        return end


@asynccontextmanager
async def served(
    own: Member, contacts: Sequence[Address] = (), port: int = 0
) -> AsyncIterator[Served]:
    """Let a node listen and gossip for the length of the block."""
    keys, clock = MemoryKeys(), LoopClock()
    door = Door(await token_book(keys), keys, clock)
    limiter, fleet = Limiter(Uncounted()), Fleet(own.node_id, own.profile)
    node = Served(own, limiter, fleet, secure=own.key is not None)
    ways = Ways(lambda node: False, _dial_nobody)
    endpoints: list[tuple[str, Endpoint]] = [
        ("macfleet", heartbeat_listener(own, limiter, port)),
        ("macfleet", Gossip(own, fleet, contacts, ways)),
    ]
    means = Means(node.serve, door, clock, Random(1), HOST)
    async with reaching(endpoints, means) as ports:
        (node.port,) = ports["macfleet"].values()
        yield node


@dataclass
class Line:
    """A bare connection to a node."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def rest(self) -> bytes:
        """Return what comes until the other end hangs up."""
        received = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while data := await self.reader.read(1 << 16):
                    received += data
        return received

    async def say(self, data: bytes) -> bytes:
        """Send something; return all that comes of it."""
        await self.send(data)
        return await self.rest()


@asynccontextmanager
async def connected(node: Served, *, secure: bool | None = None) -> AsyncIterator[Line]:
    """Connect, as the node expects it unless told otherwise."""
    tls = _trusting() if (node.secure if secure is None else secure) else None
    reader, writer = await asyncio.open_connection(HOST, node.port, ssl=tls)
    try:
        yield Line(reader, writer)
    finally:
        writer.transport.abort()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


@asynccontextmanager
async def many_connected(node: Served, number: int) -> AsyncIterator[list[Line]]:
    """Connect several times at once."""
    async with AsyncExitStack() as opened:
        enter = opened.enter_async_context
        yield [await enter(connected(node)) for _ in range(number)]


async def ping(node: Served, own: Member) -> Pong | None:
    """Ask whether a node is there, as another node does; None: no answer."""
    exchange = PingExchange(own, node.own.node_id)
    async with connected(node) as line:
        answer = await line.say(exchange.line())
    return exchange.hear(answer.partition(b"\n")[0]) if answer else None


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _dial_nobody(node: Node) -> Outgoing:
    raise AssertionError("nobody is wanted")
