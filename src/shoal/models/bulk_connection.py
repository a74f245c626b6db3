"""Connections that carry nothing but the chunks of one model, past their session.

A source names one in the session, with a key; the receiver dials it once the source is
fast.  Each message is the number of a chunk in 32 bits, and its bytes under AES-256-GCM
(NIST SP 800-38D): messages are numbered from 0, which is the nonce, and the number of
the chunk is authenticated, too.  Requests, and all else, stay in the session.
"""

import asyncio
import secrets  # noqa: TID251  # a connection has a key of its own
import struct
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple, TypeAlias, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.domain.errors import PeerError
from shoal.models.manifest import CHUNK
from shoal.protocols.seam.noise import TAG_SIZE
from shoal.transports.blocking.bulk_socket import BulkSocket
from shoal.transports.link import LinkClosed
from shoal.transports.websocket import WebSocketLink

T = TypeVar("T")

KEY_SIZE = 32  # bytes
NUMBER_SIZE = 16  # bytes: the name of a connection, which is no secret
SECRET_SIZE = NUMBER_SIZE + KEY_SIZE
BUFFERS = 10  # chunks that may have arrived and are not on disk
OPEN_MAX = 8  # connections of one source, each with some MB of memory

_CHUNK = struct.Struct(">I")
_NONCE = struct.Struct(">4xQ")
MESSAGE_MAX = _CHUNK.size + CHUNK + TAG_SIZE  # bytes


ReadInto: TypeAlias = Callable[[memoryview], int]
"""Reads a chunk into memory of its size or more, and returns its size; it blocks."""


class BulkChunk(NamedTuple):
    """A chunk that has arrived, and whether it is right.

    ``release`` frees its memory for another one.
    """

    chunk: int
    data: memoryview
    is_right: bool
    release: Callable[[], None]


class BulkSender:
    """A source's end."""

    def __init__(self, name: str, key: bytes) -> None:
        self.name = name
        self._cipher = AESGCM(key)
        self._sealed = self._sent = 0  # messages, and their bytes
        self._sealing, self._sending = asyncio.Lock(), asyncio.Lock()
        self._link: WebSocketLink | None = None
        self._plain = memoryview(b"")
        # The bytes that had been sent with each message.
        self._messages: list[tuple[int, bytearray]] = []

    @property
    def is_open(self) -> bool:
        return self._link is not None

    async def serve(self, link: WebSocketLink) -> None:
        """Send over a link from now on; wait for its end."""
        link.admit()
        self._link = link
        try:
            await link.receive()  # the other end sends nothing
        except LinkClosed:
            pass
        finally:
            self.close()

    async def send(self, chunk: int, read: ReadInto) -> None:
        """Send a chunk, as fast as the other end reads.

        Raises LinkClosed, and what ``read`` raises.
        """
        try:
            async with self._sealing:
                message = self._free_message()
                sealed = await asyncio.to_thread(self._seal, chunk, read, message)
            async with self._sending:
                await asyncio.sleep(0)  # a thread seals the next one meanwhile
                if self._link is None:
                    raise LinkClosed("the bulk connection has ended")
                self._sent += len(sealed)
                self._messages.append((self._sent, message))
                await self._link.send(sealed)
        except asyncio.CancelledError:
            self.close()  # the next one would have the wrong number
            raise

    def close(self) -> None:
        """Send nothing more."""
        link, self._link = self._link, None
        if link is not None:
            link.abort()

    def _free_message(self) -> bytearray:
        """Return memory for a message, of which nothing is to be sent any more.

        New memory for each would take most of the time.
        """
        if self._messages and self._link is not None:
            end, message = self._messages[0]
            if end <= self._sent - self._link.unread:
                del self._messages[0]
                return message
        return bytearray(MESSAGE_MAX)

    def _seal(self, chunk: int, read: ReadInto, message: bytearray) -> memoryview:
        if not self._plain:
            self._plain = memoryview(bytearray(CHUNK))
        size = read(self._plain)
        number, self._sealed = self._sealed, self._sealed + 1
        head = _CHUNK.pack(chunk)
        sealed = memoryview(message)[: _CHUNK.size + size + TAG_SIZE]
        sealed[: _CHUNK.size] = head
        body = sealed[_CHUNK.size :]
        self._cipher.encrypt_into(_NONCE.pack(number), self._plain[:size], head, body)
        return sealed


class BulkSenders:
    """The connections of all receivers, by peer and by the model's address."""

    def __init__(self) -> None:
        self._senders: dict[tuple[str, bytes], BulkSender] = {}
        self._offered: dict[str, BulkSender] = {}  # by name, until it is opened

    def offer(self, peer: str, root: bytes) -> bytes:
        """Return the name and the key of a connection that the peer may open."""
        self._remove((peer, root))
        secret = secrets.token_bytes(SECRET_SIZE)
        sender = BulkSender(name_in(secret), secret[NUMBER_SIZE:])
        self._senders[peer, root] = self._offered[sender.name] = sender
        return secret

    def open(self, name: str) -> BulkSender | None:
        """Return a sender that was offered, once; None: there is none, or too many."""
        if sum(each.is_open for each in self._senders.values()) >= OPEN_MAX:
            return None
        return self._offered.pop(name, None)

    def of(self, peer: str, root: bytes) -> BulkSender | None:
        """Return the sender of a peer that has opened it."""
        sender = self._senders.get((peer, root))
        return sender if sender is not None and sender.is_open else None

    def on_peer_left(self, peer: str) -> None:
        """Close what a peer has opened."""
        for key in [each for each in self._senders if each[0] == peer]:
            self._remove(key)

    def _remove(self, key: tuple[str, bytes]) -> None:
        if (sender := self._senders.pop(key, None)) is not None:
            self._offered.pop(sender.name, None)
            sender.close()


def name_in(secret: bytes) -> str:
    """Return the name of a connection that was offered."""
    return secret[:NUMBER_SIZE].hex()


class BulkReceiver:
    """A receiver's end, whose thread runs from the start until ``close``.

    ``is_right`` checks the bytes of a chunk, in that thread.  ``on_chunk`` gets each,
    and ``on_lost`` the reason of an end, after which chunks may be lost; both are
    called by the event loop.
    """

    def __init__(
        self,
        dialled: BulkSocket,
        key: bytes,
        is_right: Callable[[int, memoryview], bool],
        on_chunk: Callable[[BulkChunk], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._socket = dialled
        self._cipher = AESGCM(key)
        self._is_right = is_right
        self._on_chunk = on_chunk
        self._on_lost = on_lost
        self._free: SimpleQueue[bytearray] = SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(bytearray(CHUNK))
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._thread = Thread(target=self._run, name="bulk")
        self._thread.start()

    async def close(self) -> None:
        """Receive nothing more."""
        self._closed = True
        self._socket.close()
        self._free.put(bytearray(CHUNK))  # the thread may wait for one
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        received = 0
        buffer = memoryview(bytearray(MESSAGE_MAX))
        try:
            if not self._socket.connect():
                return  # such as by a proxy: the session goes on with them
            while not self._closed:
                message = buffer[: self._socket.receive_into(buffer)]
                arrived = self._opened(message, received, self._free.get())
                received += 1
                self._call_in_loop(self._handle, arrived)
        except (LinkClosed, PeerError, ValueError) as error:
            # A ValueError: of a host's name that no request can have.
            self._call_in_loop(self._on_end, str(error))
        finally:
            self._socket.end()

    def _call_in_loop(self, call: Callable[[T], None], what: T) -> None:
        """Call in the event loop, which may have ended once this is closed."""
        if not self._closed:
            self._loop.call_soon_threadsafe(call, what)

    def _opened(self, message: memoryview, number: int, into: bytearray) -> BulkChunk:
        """Decrypt a chunk.  Raises PeerError."""
        head, sealed = bytes(message[: _CHUNK.size]), message[_CHUNK.size :]
        try:
            data = memoryview(into)[: len(sealed) - TAG_SIZE]
            self._cipher.decrypt_into(_NONCE.pack(number), sealed, head, data)
        except (InvalidTag, ValueError) as error:
            raise PeerError(f"bulk message {number} is not genuine") from error
        chunk = int.from_bytes(head)
        is_right = self._is_right(chunk, data)
        return BulkChunk(chunk, data, is_right, lambda: self._free.put(into))

    def _handle(self, arrived: BulkChunk) -> None:
        if not self._closed:
            self._on_chunk(arrived)

    def _on_end(self, reason: str) -> None:
        if not self._closed:
            self._on_lost(reason)
