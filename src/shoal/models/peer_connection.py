"""A connection to a peer, over which nothing but a model is copied."""

import asyncio
import secrets  # noqa: TID251  # a connection has a key of its own
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain.errors import ShoalError, TimedOut, Unavailable
from shoal.domain.model_messages import ManifestAnswer, ModelMessage, refusal
from shoal.domain.vocabulary import Rejected, RunJob
from shoal.domain.worker import ServedModel
from shoal.ledger.keys import Signer
from shoal.models import bulk_connection
from shoal.protocols import discover, own_wire
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import OutgoingConnection
from shoal.protocols.seam.peer_session import (
    PeerJoined,
    PeerLeft,
    PeerMessage,
    PeerSession,
    ToPeer,
)
from shoal.protocols.seam.session import Batch, CloseCode
from shoal.transports import dialer
from shoal.transports.blocking.bulk_socket import BulkSocket
from shoal.transports.clock import Clock, LoopClock
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import EncryptedLink, Link, LinkClosed

HANDSHAKE_TIMEOUT = 20.0  # seconds for the handshake
NOT_SERVING = "this peer only copies a model"
WEB = ("http", "https")


@dataclass(frozen=True, slots=True)
class DialledPeer:
    """Where a model is copied from: the URL of a coordinator, or of another peer.

    ``token`` is a join token, ``passcode`` that of its pools, and ``fingerprint`` that
    of its certificate.  ``plain``: the connection is not encrypted, as to peers of
    other programs.  ``signer`` is a key that it has admitted; by default a new one.
    ``advice`` follows the reason if it cannot be reached.
    """

    url: str
    token: str = field(default="", repr=False)
    passcode: str = field(default="", repr=False)
    plain: bool = False
    fingerprint: bytes | None = None
    signer: Signer | None = None
    advice: str = ""

    def connect(self) -> AbstractAsyncContextManager["PeerConnection"]:
        """Return a connection to it, once it has admitted this peer, for a block.

        Raises TimedOut and Unavailable, and ConfigError if it cannot be dialled.
        """
        return _connect(self)


DialBulk: TypeAlias = Callable[[str], BulkSocket]
"""Takes the name of a bulk connection that the peer offered."""


async def _no_wait() -> None:
    pass


class PeerConnection:
    """One connection to one peer; what arrives goes to ``receive``.

    ``sends_chunks``: the peer knows the messages about models in chunks.  ``on_lost``
    is called once, with the reason.  Reading waits for ``wait_for_room``.
    """

    def __init__(
        self,
        session: PeerSession,
        link: Link,
        clock: Clock,
        dial_bulk: DialBulk | None = None,
    ) -> None:
        link = _PacedLink(link, self)
        self._driver = Driver(session, link, clock, self._receive)
        self._peer = ""
        self._admitted = asyncio.Event()  # or ended before that
        self._ended: ConnectionEnd | None = None
        self.sends_chunks = False
        self.receive: Callable[[ModelMessage], None] = lambda message: None
        self.on_lost: Callable[[ShoalError], None] = lambda error: None
        self.wait_for_room: Callable[[], Awaitable[None]] = _no_wait
        self.wait_writable = self._driver.wait_for_bulk_room
        self._dial_bulk = dial_bulk
        self._offered = b""  # the name and the key of a bulk connection
        self._bulk: bulk_connection.BulkReceiver | None = None

    async def run(self) -> None:
        """Run the connection until it ends."""
        try:
            self._ended = await self._driver.run()
        finally:
            if self._bulk is not None:
                await self._bulk.close()
        self._admitted.set()
        self.on_lost(Unavailable(f"the connection ended: {self._ended.reason}"))

    async def admitted(self) -> None:
        """Wait for the peer to admit this one.  Raises TimedOut and Unavailable."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                await self._admitted.wait()
        except TimeoutError as error:
            raise TimedOut(
                f"no handshake within {HANDSHAKE_TIMEOUT:g} s: the peer speaks another "
                "protocol, or requires a passcode"
            ) from error
        if self._ended is not None and not self._peer:
            raise Unavailable(
                f"the peer did not admit this one: {_end_reason(self._ended)}"
            )

    def send(self, message: ModelMessage) -> bool:
        """Send a message; return False if the connection is closed."""
        return self._driver.send(ToPeer(self._peer, message))

    def speed_up(
        self,
        is_right: Callable[[int, memoryview], bool],
        on_chunk: Callable[[bulk_connection.BulkChunk], None],
    ) -> None:
        """Use a bulk connection for the chunks, if the peer offered one."""
        offered, self._offered = self._offered, b""
        if self._dial_bulk is None or len(offered) != bulk_connection.SECRET_SIZE:
            return

        dialled = self._dial_bulk(bulk_connection.name_in(offered))
        self._bulk = bulk_connection.BulkReceiver(
            *(dialled, offered[bulk_connection.NUMBER_SIZE :], is_right, on_chunk),
            self._driver.disconnect,
        )

    def leave(self) -> None:
        """Disconnect."""
        self._driver.disconnect("done")

    def _receive(self, message: PeerMessage) -> None:
        match message.message:
            case PeerJoined(sends_chunks=sends_chunks):
                # On a link to several peers, the first is the one that was dialled.
                if not self._peer:
                    self._peer, self.sends_chunks = message.peer, sends_chunks
                self._admitted.set()
            case PeerLeft(reason) if message.peer == self._peer:
                self.on_lost(Unavailable(f"the peer has left: {reason}"))
            case ModelMessage() as asked if (refused := refusal(asked)) is not None:
                self._driver.send(ToPeer(message.peer, refused))
            case ModelMessage() as model_message if message.peer == self._peer:
                if isinstance(model_message, ManifestAnswer):
                    self._offered = model_message.bulk
                self.receive(model_message)
            case RunJob(job_id, lease):
                self._driver.send(
                    ToPeer(message.peer, Rejected(job_id, lease, NOT_SERVING))
                )
            case _:
                pass  # offers and health reports


@asynccontextmanager
async def _connect(peer: DialledPeer) -> AsyncIterator[PeerConnection]:
    outgoing = _outgoing(peer)
    clock = LoopClock()
    fingerprint = peer.fingerprint or outgoing.fingerprint

    def dial_bulk(name: str) -> BulkSocket:
        return BulkSocket(f"{outgoing.bulk_url}?{name}", fingerprint)

    try:
        async with (
            dialer.dial(
                outgoing.url,
                outgoing.headers,
                outgoing.message_max,
                fingerprint=fingerprint,
            ) as (link, _),
            over_link(
                *(outgoing.new_session(clock.now()), link, clock),
                dial_bulk if outgoing.bulk_url else None,
            ) as it,
        ):
            yield it
    except LinkClosed as closed:
        raise Unavailable(f"{closed}{peer.advice}") from closed


@asynccontextmanager
async def over_link(
    session: PeerSession,
    link: Link,
    clock: Clock,
    dial_bulk: DialBulk | None = None,
) -> AsyncIterator[PeerConnection]:
    """Yield a connection over a link, once the peer has admitted this one.

    Raises TimedOut and Unavailable.
    """
    connection = PeerConnection(session, link, clock, dial_bulk)
    failed: ShoalError | None = None
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(connection.run())
        try:
            await connection.admitted()
            yield connection
        except ShoalError as error:
            failed = error  # not in a group of errors
        finally:
            connection.leave()
    if failed is not None:
        raise failed


def _outgoing(peer: DialledPeer) -> OutgoingConnection:
    """Return how to connect, by the wire of the other end."""
    # A name of its own: others may copy at the same time.
    signer = Signer.from_seed(secrets.token_bytes(32))
    profile = WorkerProfile(
        f"models-{signer.public_key.hex()[:8]}",
        ServedModel(""),
        0,
        peer.token,
        identity=peer.signer or signer,
        random_bytes=secrets.token_bytes,
        passcode=peer.passcode,
        plain=peer.plain,
    )
    if peer.url.partition("://")[0] in WEB:
        connect = own_wire().peering
    else:
        others = (each for each in discover().values() if not each.preferred)
        connect = next(each.peering for each in others if each.peering is not None)
    assert connect is not None, "Shoal's own wire copies models"
    return connect(peer.url, profile)


def _end_reason(end: ConnectionEnd) -> str:
    """Return why a connection ended during the handshake, with advice."""
    if end.by_peer:
        # Other programs give no reason.
        return f"{end.reason}; the peer may require a passcode"
    if end.code == CloseCode.PROTOCOL_ERROR:
        return (
            f"{end.reason}; the port serves another protocol: give the URL of a "
            "coordinator, http://HOST:PORT, or the port of another peer"
        )
    return end.reason


class _PacedLink:
    """A link that is read no faster than its data is written to disk."""

    def __init__(self, link: Link, connection: PeerConnection) -> None:
        self._link = link
        self._connection = connection
        self.peer = link.peer
        self.binding = link.binding if isinstance(link, EncryptedLink) else b""
        self.send = link.send
        self.close = link.close

    async def receive(self) -> Batch:
        await self._connection.wait_for_room()
        return await self._link.receive()
