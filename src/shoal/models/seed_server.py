"""Sends chunks of a model at a port of its own, while others fetch it.

The machine may have all of the model, or fetch it, too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
from shoal.models.chunk_senders import (
    ByteRate,
    ChunkedModel,
    ChunkSenders,
    Receiver,
)
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
