"""Sends chunks of a model at a port of its own, while others fetch it.

The machine may have all of the model, or fetch it, too.  Its coordinator tells those
that fetch one model of each other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias
from uuid import uuid4

from shoal.domain.model_messages import (
    ChunksHeld,
    ChunksRefused,
    ChunksRequest,
    ManifestAnswer,
    ManifestRequest,
    ModelMessage,
    SeederAt,
    refusal,
)
from shoal.domain.vocabulary import Rejected, RunJob
from shoal.models.chunk_senders import ByteRate, ChunkedModel, ChunkSenders, Receiver
from shoal.models.peer_connection import NOT_SERVING
from shoal.peers.relay import ServeSession
from shoal.protocols.seam.peer_session import (
    PeerJoined,
    PeerMessage,
    PeerSession,
    ToPeer,
)
from shoal.transports.clock import LoopClock
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import Link

LINGER = 10.0  # seconds for which others get what only this end may have
NAMED_MAX = 30  # peers that one hears of for a model
URL_MAX = 256  # characters, also of a passcode

OpenPort: TypeAlias = Callable[[str, ServeSession], AbstractAsyncContextManager[str]]
"""Opens a port, for a block, to peers that prove a passcode; yields its URL.

Takes the passcode, and what serves a connection.
"""


class SeededModel(ChunkedModel, Protocol):
    """A model of which some chunks are held, or all."""

    @property
    def held(self) -> bytes:
        """A bit for each chunk, as in ``ManifestAnswer``; empty: it has all."""


@asynccontextmanager
async def seeding(
    model: str,
    content: SeededModel,
    open_port: OpenPort,
    tasks: asyncio.TaskGroup,
    rate: ByteRate,
) -> AsyncIterator[tuple["SeedServer", SeederAt]]:
    """Serve a model at a port for a block, and say where.  Raises ConfigError."""
    server, passcode = SeedServer(model, content, tasks, rate), uuid4().hex
    async with open_port(passcode, server.serve) as url:
        try:
            yield server, SeederAt(content.manifest.root, url, passcode)
        finally:
            server.close()


class SeedServer:
    """Sends any number of peers what is held of a model."""

    def __init__(
        self,
        model: str,
        content: SeededModel,
        tasks: asyncio.TaskGroup,
        rate: ByteRate,
    ) -> None:
        self._model = model
        self._content = content
        self._root = content.manifest.root
        self._senders = ChunkSenders(tasks, rate)
        self._drivers: dict[str, Driver[PeerMessage, ToPeer]] = {}
        self._informed: dict[str, str] = {}  # connections, and their peers
        self._count = 0
        self._changed = asyncio.Event()  # the connections

    async def serve(self, wire: str, session: PeerSession, link: Link) -> ConnectionEnd:
        """Serve a connection until it ends."""
        self._count += 1
        name = str(self._count)
        receive = partial(self._receive, name)
        driver = Driver(session, link, LoopClock(), receive)
        self._drivers[name] = driver
        self._changed.set()
        try:
            return await driver.run()
        finally:
            del self._drivers[name]
            self._informed.pop(name, None)
            self._senders.on_peer_left(name)
            self._changed.set()

    def on_held(self, chunk: int) -> None:
        """Tell peers about another chunk that is held."""
        for name, peer in self._informed.items():
            held = ChunksHeld(self._root, [chunk])
            self._drivers[name].send(ToPeer(peer, held))

    async def wait_for_others(self, *, new: bool = False) -> None:
        """Wait until no receiver needs a chunk any more, or for ``LINGER``.

        ``new``: wait for further receivers, until none has come for ``LINGER``.
        """
        limit = asyncio.get_running_loop().time() + LINGER
        while self._drivers or new:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(None if new and self._drivers else limit):
                    await self._changed.wait()
            except TimeoutError:
                return
            if new:
                limit = asyncio.get_running_loop().time() + LINGER

    def close(self) -> None:
        """Disconnect all peers."""
        for driver in self._drivers.values():
            driver.disconnect("done")

    def _receive(self, name: str, message: PeerMessage) -> None:
        driver, peer = self._drivers[name], message.peer

        def send(reply: ModelMessage) -> bool:
            return driver.send(ToPeer(peer, reply))

        match message.message:
            case PeerJoined():
                driver.admit()
            case ManifestRequest(model=self._model):
                encoded, held = self._content.manifest.encoded, self._content.held
                send(ManifestAnswer(self._model, encoded, held=held))
                self._informed[name] = peer
            case ChunksRequest(root, chunks):
                why: str | None = "it is not this model"
                if root == self._root:
                    receiver = Receiver(name, send, driver.wait_for_bulk_room)
                    why = self._senders.request(receiver, self._content, chunks)
                if why is not None:
                    send(ChunksRefused(root, why))
            case ModelMessage() as asked if (refused := refusal(asked)) is not None:
                send(refused)
            case RunJob(job_id, lease):
                driver.send(ToPeer(peer, Rejected(job_id, lease, NOT_SERVING)))
            case _:
                pass  # offers and health reports


@dataclass(slots=True)
class Seeders:
    """Tells the peers that fetch one model of each other."""

    _seeders: dict[str, tuple[Receiver, SeederAt]] = field(default_factory=dict)
    # The peer that got each chunk first, by the model's address.
    _first: dict[bytes, dict[int, str]] = field(default_factory=dict)
    _deferred: dict[str, set[int]] = field(default_factory=dict)  # by peer

    def add(self, peer: Receiver, seeder: SeederAt) -> bool:
        """Tell a peer of others, and others of it; return False if it is too long."""
        if max(map(len, (seeder.url, seeder.passcode, seeder.root))) > URL_MAX:
            return False
        if self._seeders.get(peer.name, (peer, None))[1] == seeder:
            return True  # a peer that repeats itself costs nothing
        others = [
            each
            for name, each in self._seeders.items()
            if each[1].root == seeder.root and name != peer.name
        ]
        self._seeders[peer.name] = (peer, seeder)
        for receiver, other in others[-NAMED_MAX:]:
            if other.url:
                peer.send(other)
            if seeder.url:
                receiver.send(seeder)
        return True

    def elsewhere(self, name: str, root: bytes, chunks: list[int]) -> set[int]:
        """Return those of the requested chunks that the peer can get from others.

        So a chunk is sent once while there are others to send, however many want it.
        """
        if name not in self._seeders:
            return set()
        serves = bool(self._seeders[name][1].url)
        first = self._first.setdefault(root, {})
        deferred = self._deferred.setdefault(name, set())
        found = set()
        for chunk in chunks:
            holder = first.get(chunk, name)
            if holder == name or holder not in self._seeders:
                if serves:
                    first[chunk] = name
            elif chunk not in deferred:
                deferred.add(chunk)
                found.add(chunk)
        return found

    def remove(self, name: str) -> None:
        """Forget a peer that left."""
        self._deferred.pop(name, None)
        if self._seeders.pop(name, None) is not None:
            left = {seeder.root for _, seeder in self._seeders.values()}
            for root in self._first.keys() - left:
                del self._first[root]
