"""Sends requested chunks of models to peers, at their pace and within a rate."""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from shoal.domain.errors import ShoalError
from shoal.domain.model_messages import (
    ChunkSent,
    ChunksRefused,
    SendModelMessage,
    WaitUntilWritable,
)
from shoal.models.bulk_connection import BulkSenders, ReadInto
from shoal.models.manifest import Manifest
from shoal.transports.clock import LoopClock
from shoal.transports.link import LinkClosed

REQUESTED_MAX = 256  # chunks that a peer may have requested
AT_ONCE = 3  # chunks that are read for one peer
STALL_TIMEOUT = 60.0  # seconds for a peer to read a chunk

log = logging.getLogger("shoal.models")


@dataclass(frozen=True, slots=True)
class Receiver:
    """The peer that gets a model, with its connection."""

    name: str
    send: SendModelMessage
    wait_writable: WaitUntilWritable


class ChunkedModel(Protocol):
    """A model whose chunks can be read."""

    @property
    def manifest(self) -> Manifest: ...

    async def reader(self, chunk: int) -> ReadInto:
        """Return what reads a chunk; both raise ShoalError."""


@dataclass(slots=True)
class ByteRate:
    """A limit in bytes a second for all peers together; 0: none."""

    limit: int = 0
    clock: LoopClock = field(default_factory=LoopClock)
    _free_at: float = 0.0

    async def take(self, size: int) -> None:
        """Wait until so many bytes may be sent."""
        if not self.limit:
            return
        now = self.clock.now()
        begin = max(now, self._free_at)
        self._free_at = begin + size / self.limit
        if begin > now:
            await asyncio.sleep(begin - now)


@dataclass(slots=True)
class _Peer:
    """What one peer has requested."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


class ChunkSenders:
    """The chunks that are being sent; they are sent by ``tasks``."""

    def __init__(self, tasks: asyncio.TaskGroup, rate: ByteRate) -> None:
        self._tasks = tasks
        self._rate = rate
        self.bulk = BulkSenders()
        self._peers: dict[str, _Peer] = {}
        self.sent: Counter[str] = Counter()  # chunks, by peer that is connected

    def request(
        self, receiver: Receiver, model: ChunkedModel, chunks: list[int]
    ) -> str | None:
        """Send chunks to a peer; return why they are refused, or None."""
        peer = self._peers.setdefault(receiver.name, _Peer())
        if len(peer.tasks) + len(chunks) > REQUESTED_MAX:
            return f"more than {REQUESTED_MAX} chunks are requested"
        if not all(0 <= each < model.manifest.chunks for each in chunks):
            return "the model has no such chunk"
        for each in chunks:
            task = self._tasks.create_task(self._send(receiver, peer, model, each))
            peer.tasks.add(task)
            task.add_done_callback(peer.tasks.discard)
        return None

    def on_peer_left(self, name: str) -> None:
        """Send nothing more to a peer."""
        self.sent.pop(name, None)
        self.bulk.on_peer_left(name)
        if (peer := self._peers.pop(name, None)) is not None:
            for task in [*peer.tasks]:
                task.cancel()

    def close(self) -> None:
        """Send nothing more."""
        for name in [*self._peers]:
            self.on_peer_left(name)

    async def _send(
        self, receiver: Receiver, peer: _Peer, model: ChunkedModel, chunk: int
    ) -> None:
        root = model.manifest.root
        async with peer.turns:
            try:
                read = await model.reader(chunk)
                size = model.manifest.place(chunk).size
                await self._rate.take(size)
                if (bulk := self.bulk.of(receiver.name, root)) is None:
                    data = memoryview(bytearray(size))
                    await asyncio.to_thread(read, data)
                async with asyncio.timeout(STALL_TIMEOUT):
                    if bulk is None:
                        await receiver.wait_writable()
                    else:
                        await bulk.send(chunk, read)
            except LinkClosed:
                return  # the receiver connects again
            except TimeoutError:
                log.warning("stopped peer=%r reason='it reads nothing'", receiver.name)
                return
            except ShoalError as error:
                receiver.send(ChunksRefused(root, str(error)))
                return
            if bulk is None:
                receiver.send(ChunkSent(root, chunk, data))
            self.sent[receiver.name] += 1
