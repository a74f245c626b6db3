"""Connections that take time, and that can be cut and stalled."""

import asyncio
from collections import deque
from random import Random

from shoal.protocols.seam.session import Batch, Data
from shoal.transports.link import LinkClosed

BINDING_SIZE = 32  # bytes


class Pipe:
    """One direction of a connection: what is sent arrives later, in order."""

    def __init__(self, latency: float) -> None:
        self._latency = latency
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[Data] = deque()
        self._arrived: deque[Data] = deque()
        self._wake = asyncio.Event()
        self.closed: LinkClosed | None = None
        self.stalled = False  # nothing gets through, and nobody is told

    def send(self, data: Data) -> None:
        if self.closed is not None:
            raise self.closed
        if not self.stalled:
            # Timers of the same moment fire in any order, so they carry no data.
            self._under_way.append(data)
            self._loop.call_later(self._latency, self._arrive)

    async def receive(self) -> Batch:
        while not self._arrived:
            if self.closed is not None:
                raise self.closed
            self._wake.clear()
            await self._wake.wait()
        batch = list(self._arrived)
        self._arrived.clear()
        return batch

    def close(self, reason: LinkClosed, *, at_once: bool) -> None:
        """Let the receiver find the end, after what was sent unless ``at_once``."""
        if self.stalled:
            return
        if at_once:
            self._arrived.clear()
            self._end(reason)
        else:
            late = self._latency + 0.001  # after what is under way
            self._loop.call_later(late, self._end, reason)

    def _arrive(self) -> None:
        data = self._under_way.popleft()
        if self.closed is None:
            self._arrived.append(data)
            self._wake.set()

    def _end(self, reason: LinkClosed) -> None:
        self.closed = self.closed or reason
        self._wake.set()


class Ends:
    """One end of a connection; ``binding`` is as in ``EncryptedLink``."""

    def __init__(
        self, peer: str, incoming: Pipe, outgoing: Pipe, binding: bytes
    ) -> None:
        self.peer = peer
        self.binding = binding
        self._incoming = incoming
        self._outgoing = outgoing

    async def receive(self) -> Batch:
        return await self._incoming.receive()

    async def send(self, data: Data) -> None:
        self._outgoing.send(data)

    async def close(self, code: int, text: str) -> None:
        ours = LinkClosed("closed here", 1000)
        self._incoming.close(ours, at_once=True)
        self._outgoing.close(
            LinkClosed(f"closed by peer: {code} {text}", code, text), at_once=False
        )


class Wire:
    """A connection that faults can be done to.

    An encrypted one has a binding, for the sessions prove tokens and keys by it; nobody
    listens in between, so the bytes are not encrypted.
    """

    def __init__(self, random: Random, *, encrypted: bool) -> None:
        latency = random.uniform(0.001, 0.08)
        self._up, self._down = Pipe(latency), Pipe(latency)
        binding = random.randbytes(BINDING_SIZE) if encrypted else b""
        self.coordinator = Ends("sim", self._up, self._down, binding)
        self.worker = Ends("sim", self._down, self._up, binding)

    def cut(self) -> None:
        """Lose what is on the way, and tell both ends."""
        for pipe in (self._up, self._down):
            pipe.stalled = False
            pipe.close(LinkClosed("connection reset"), at_once=True)

    def stall(self) -> None:
        """Lose everything from now on, and tell nobody."""
        self._up.stalled = self._down.stalled = True
