"""Sends chunks of a model that is being fetched to others that fetch it, too."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import TypeAlias

import numpy as np

from shoal.domain.errors import Unavailable
from shoal.domain.model_messages import (
    ChunksHeld,
    ChunksRefused,
    ChunksRequest,
    ManifestAnswer,
    ManifestRequest,
    ModelMessage,
    refusal,
)
from shoal.domain.vocabulary import Rejected, RunJob
from shoal.models.bulk_connection import ReadInto
from shoal.models.chunk_selection import ChunkSelection
from shoal.models.chunk_senders import ByteRate, ChunkSenders, Receiver
from shoal.models.manifest import Manifest
from shoal.models.partial_model import PartialModel
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


class PartialServer:
    """Serves any number of peers at a port, as long as the model is fetched."""

    def __init__(
        self,
        model: str,
        partial_model: PartialModel,
        selection: ChunkSelection,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._model = model
        self._partial = partial_model
        self._selection = selection
        self._senders = ChunkSenders(tasks, ByteRate())
        self._drivers: dict[str, Driver[PeerMessage, ToPeer]] = {}
        self._informed: dict[str, str] = {}  # connections, and their peers
        self._count = 0
        self._left = asyncio.Event()

    @property
    def manifest(self) -> Manifest:
        return self._partial.manifest

    async def reader(self, chunk: int) -> ReadInto:
        """Return what reads a chunk that is held.  Raises Unavailable."""
        if not self._selection.held[chunk]:
            raise Unavailable("it has no such chunk yet")
        return partial(self._partial.read, chunk)

    async def serve(self, wire: str, session: PeerSession, link: Link) -> ConnectionEnd:
        """Serve a connection until it ends."""
        self._count += 1
        name = str(self._count)
        receive = partial(self._receive, name)
        driver = Driver(session, link, LoopClock(), receive)
        self._drivers[name] = driver
        try:
            return await driver.run()
        finally:
            del self._drivers[name]
            self._informed.pop(name, None)
            self._senders.on_peer_left(name)
            self._left.set()

    def on_held(self, chunk: int) -> None:
        """Tell peers about another chunk that is held."""
        for name, peer in self._informed.items():
            held = ChunksHeld(self.manifest.root, [chunk])
            self._drivers[name].send(ToPeer(peer, held))

    async def wait_for_others(self) -> None:
        """Wait until no receiver needs a chunk any more, or for ``LINGER``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while self._drivers:
                    self._left.clear()
                    await self._left.wait()

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
                bits = np.packbits(self._selection.held, bitorder="little")
                encoded = self.manifest.encoded
                send(ManifestAnswer(self._model, encoded, held=bits.tobytes()))
                self._informed[name] = peer
            case ChunksRequest(root, chunks):
                why: str | None = "it is not this model"
                if root == self.manifest.root:
                    receiver = Receiver(name, send, driver.wait_for_bulk_room)
                    why = self._senders.request(receiver, self, chunks)
                if why is not None:
                    send(ChunksRefused(root, why))
            case ModelMessage() as asked if (refused := refusal(asked)) is not None:
                send(refused)
            case RunJob(job_id, lease):
                driver.send(ToPeer(peer, Rejected(job_id, lease, NOT_SERVING)))
            case _:
                pass  # offers and health reports
