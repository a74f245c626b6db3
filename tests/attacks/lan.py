"""Peers of a local network, played by tests on raw connections."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from attacks.raw import wire
from gateway.serving import Pool, eventually
from protocols.tealenet.peers import heartbeat, hello
from shoal.protocols.seam.framing import LENGTH
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.codec.scalars import passcode_hash
from shoal.protocols.tealenet.peer import LAN

PASSCODE = "passcode-that-no-log-may-hold"
MAC = "550E8400-E29B-41D4-A716-4466554400{:02X}"


@dataclass(slots=True)
class LanPeer:
    """A connection, and the messages received on it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    beat: bytes = b""  # the heartbeat of an admitted peer
    received: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    over: bool = False
    deaf: bool = False  # whether it leaves what is sent to it unread

    async def send_messages(self, *messages: Any) -> None:
        """Send messages: texts and bytes as they are, others as JSON."""
        for each in messages:
            data = each if isinstance(each, bytes) else json.dumps(each).encode()
            await self.send(LENGTH.pack(len(data)) + data)

    async def send(self, data: bytes) -> None:
        """Send bytes without a length before them."""
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def read(self) -> None:
        """Collect messages until the connection ends, or the peer turns deaf."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while not self.deaf:
                (size,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
                message = json.loads(await self.reader.readexactly(size))
                ((kind, payload),) = message.items()
                self.received.append((kind, payload.get("_0", payload)))
            return
        self.over = True

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the received messages of a kind."""
        return [payload for each, payload in self.received if each == kind]

    async def receive(self, kind: str, number: int = 0) -> dict[str, Any]:
        """Wait for a message of a kind, by default the first."""
        await eventually(lambda: len(self.of(kind)) > number)
        return self.of(kind)[number]

    async def hung_up(self) -> None:
        """Wait until the other end disconnects."""
        await eventually(lambda: self.over)

    async def answer(self, *texts: str, number: int = 0) -> None:
        """Wait for a request, and answer it."""
        request = await self.receive("inferenceRequest", number)
        for text in texts:
            await self.send_messages(chunk(request["requestID"], text))
        await self.send_messages(*ending(request["requestID"]))


def ending(request_id: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the messages that end an answer; ``fields`` go into the last one."""
    last = chunk(request_id, "")
    (choice,) = last["inferenceChunk"]["_0"]["chunk"]["choices"]
    choice["finish_reason"] = "stop"
    done = {"requestID": request_id, **fields}
    return [last, {"inferenceComplete": {"_0": done}}]


def chunk(request_id: Any, text: str) -> dict[str, Any]:
    """Return a chunk of an answer."""
    message = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": text}}],
    }
    return {"inferenceChunk": {"_0": {"requestID": request_id, "chunk": message}}}


@asynccontextmanager
async def dialled(pool: Pool, *, deaf: bool = False) -> AsyncIterator[LanPeer]:
    """Connect without sending anything; see ``wire`` for ``deaf``."""
    async with wire(pool, pool.ports["tealenet"]["tcp"], deaf=deaf) as bare:
        peer = LanPeer(bare.reader, bare.writer)
        reading = asyncio.create_task(peer.read())
        try:
            yield peer
        finally:
            bare.abort()
            await reading


@asynccontextmanager
async def mac(
    pool: Pool,
    number: int = 1,
    *models: str,
    passcode: str = PASSCODE,
    deaf: bool = False,
) -> AsyncIterator[LanPeer]:
    """Join as a peer of another program, with the passcode."""
    device = MAC.format(number)
    shown = passcode_hash(passcode) if passcode else None
    async with dialled(pool, deaf=deaf) as peer:
        await peer.send_messages(encode(hello(shown, models, device)))
        await peer.receive("helloAck")
        peer.beat = encode(heartbeat(models, device_id=device))
        await peer.send_messages(peer.beat)
        await peer.receive("heartbeatAck")
        yield peer


@asynccontextmanager
async def beating(*peers: LanPeer) -> AsyncIterator[None]:
    """Send the heartbeats of peers, as long as the block takes."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(LAN.heartbeat_interval)
            for each in peers:
                await each.send_messages(each.beat)

    running = asyncio.create_task(beat())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])
