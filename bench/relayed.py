"""TealeNet's nodes as a relay sees them: prepared messages, and bytes that are counted.

As a program: ``relayed.py PORT SEED SECONDS`` has two nodes talk for so long, a message
every millisecond, prints a line when they begin, and in the end one with the seconds
that the slowest message took.
"""

import asyncio
import base64
import json
import struct
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from node import TEXT, upgrade
from shoal.ledger.keys import Signer

TALK_EVERY = 0.001  # seconds
READ_MAX = 1 << 20  # bytes of one read
SLOTS = 8  # requests that a node takes at a time, unless it says otherwise
CAPABILITIES = {
    "hardware": {
        "chipFamily": "nvidiaGPU",
        "chipName": "GPU",
        "totalRAMGB": 64,
        "gpuCoreCount": 1,
        "memoryBandwidthGBs": 100,
        "tier": 1,
    },
    "maxModelSizeGB": 60,
}
CHUNK = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": "token"}, "finish_reason": "stop"}],
}
MARK = b'{"relayData"'
MASK = bytes(4)  # which changes nothing


@dataclass(frozen=True, slots=True)
class RelayNode:
    """A node that is registered."""

    id: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def until(self, mark: bytes) -> None:
        """Read up to something, and drop that and all that came with it.

        Raises RuntimeError if the relay hangs up, or says what went wrong.
        """
        received = b""
        while mark not in received:
            received = received[-256:] + await self.read()
            if b'"error"' in received:
                raise RuntimeError(f"the relay says {received!r}")

    async def count(self, size: int) -> None:
        """Read so many bytes.  Raises RuntimeError if the relay hangs up."""
        while size > 0:
            size -= len(await self.read())

    async def read(self) -> bytes:
        """Return what has come.  Raises RuntimeError if the relay hangs up."""
        data = await self.reader.read(READ_MAX)
        if not data:
            raise RuntimeError("the relay hung up")
        return data


def frame(payload: bytes, *, masked: bool = True) -> bytes:
    """Return the frame of a text, as a client or a server writes it."""
    size, flag = len(payload), 0x80 * masked
    if size < 126:
        head = bytes((0x80 | TEXT, flag | size))
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x80 | TEXT, flag | 126, size)
    else:
        head = struct.pack("!BBQ", 0x80 | TEXT, flag | 127, size)
    return head + MASK * masked + payload


def message(kind: str, **fields: object) -> bytes:
    """Return a relay message as the compact text that relays write."""
    return json.dumps({kind: fields}, separators=(",", ":")).encode()


def registration(seed: int, *models: str, slots: int = SLOTS) -> tuple[str, bytes]:
    """Return the id of the node of that number, and what registers it.

    Without models it is not available, and left in peace by the coordinator.
    """
    signer = Signer.from_seed(seed.to_bytes(32))
    node_id = signer.public_key.hex()
    text = message(
        "register",
        nodeID=node_id,
        publicKey=node_id,
        displayName=f"node {seed}",
        capabilities=CAPABILITIES
        | {"loadedModels": models, "isAvailable": bool(models)}
        | {"maxConcurrentRequests": slots},
        signature=signer.sign(node_id.encode()).hex(),
    )
    return node_id, frame(text)


async def registered(
    port: int, seed: int, *models: str, slots: int = SLOTS
) -> RelayNode:
    """Connect and register."""
    node_id, text = registration(seed, *models, slots=slots)
    reader, writer = await upgrade(port, f"/ws?node={node_id}")
    node = RelayNode(node_id, reader, writer)
    writer.write(text)
    await node.until(b'"registerAck"')
    return node


async def opened(sender: RelayNode, receiver: RelayNode) -> str:
    """Open a session; return its id."""
    session = str(uuid.uuid4())
    ends = {"fromNodeID": sender.id, "toNodeID": receiver.id, "sessionID": session}
    sender.writer.write(frame(message("relayOpen", **ends)))
    await receiver.until(b'"relayOpen"')
    return session


def data(sender: RelayNode, receiver: RelayNode, session: str, size: int) -> bytes:
    """Return a relayData whose text stands for ``size`` bytes."""
    return message(
        "relayData",
        fromNodeID=sender.id,
        toNodeID=receiver.id,
        sessionID=session,
        data=base64.b64encode(b"{" * size).decode(),
    )


async def serve(node: RelayNode) -> None:
    """Answer everything that is asked of a node, as one of Rust's does."""
    async for ends, content in requests(node):
        request = {"requestID": content["requestID"]}
        answer = {"inferenceChunk": {"_0": request | {"chunk": CHUNK}}}
        last = {"inferenceComplete": {"_0": request}}
        texts = (
            base64.b64encode(json.dumps(each).encode()).decode()
            for each in (answer, last)
        )
        frames = (frame(message("relayData", **ends, data=each)) for each in texts)
        node.writer.write(b"".join(frames))  # to be read together at any pace


async def requests(
    node: RelayNode,
) -> AsyncIterator[tuple[dict[str, str], dict[str, Any]]]:
    """Yield what is asked of a node, and the two ends of what answers it."""
    while True:
        ((kind, payload),) = json.loads(await _receive(node.reader)).items()
        if kind not in ("relayOpen", "relayData"):
            continue
        ends = {
            "fromNodeID": node.id,
            "toNodeID": payload["fromNodeID"],
            "sessionID": payload["sessionID"],
        }
        if kind == "relayOpen":
            node.writer.write(frame(message("relayReady", **ends)))
            continue
        ((kind, content),) = json.loads(base64.b64decode(payload["data"])).items()
        if kind == "inferenceRequest":
            yield ends, content["_0"]


async def _receive(reader: asyncio.StreamReader) -> bytes:
    _, size = await reader.readexactly(2)
    if size >= 126:
        size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8))
    return await reader.readexactly(size)


async def _standstill(port: int, seed: int, lasting: float) -> float:
    """Return the seconds that the slowest message took."""
    receiver = await registered(port, seed)
    sender = await registered(port, seed + 1)
    session = await opened(sender, receiver)
    text = frame(data(sender, receiver, session, 64))
    sent: list[float] = []
    longest = 0.0
    answered = 0
    tail = b""
    print(json.dumps({"talking": True}), flush=True)

    async def talk() -> None:
        end = time.perf_counter() + lasting
        while time.perf_counter() < end:
            say()
            await asyncio.sleep(TALK_EVERY)

    def say() -> None:
        sent.append(time.perf_counter())
        sender.writer.write(text)

    talking = asyncio.create_task(talk())
    # The last is sent when all else was, so that there is something to wait for.
    talking.add_done_callback(lambda _: say())
    while not talking.done() or answered < len(sent):
        tail += await receiver.read()
        now = time.perf_counter()
        # There may be news between what the two say.
        for _ in range(tail.count(MARK)):
            longest = max(longest, now - sent[answered])
            answered += 1
        tail = tail[1 - len(MARK) :]
    return longest


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        longest = runner.run(
            _standstill(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
        )
    print(json.dumps({"longest": longest}), flush=True)
