"""MacFleet's node of an open pool, from its two protocols' document.

Of the document's handshakes only that of a pool with a token is described, and that not
completely: how the token becomes the fleet's key, how long a challenge is and what
``response_b_to_a_ack`` is, it does not say.  A node of an open pool has no key and so
nothing to prove: it sends its id, in a CONTROL message of the second version.
"""

import asyncio
import struct
import traceback
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

import msgpack

HEADER = struct.Struct("!IHHIIII")
CONTROL, HEARTBEAT, TASK, RESULT = 0x01, 0x03, 0x08, 0x09
CHUNKED, LAST_CHUNK, HANDSHAKE_V2 = 2, 4, 8


class Frame(NamedTuple):
    """A frame without its size and checksum."""

    kind: int
    payload: bytes
    stream: int = 0
    flags: int = 0
    sequence: int = 0

    def packed(self) -> bytes:
        checksum = zlib.crc32(self.payload)
        size = len(self.payload)
        return (
            HEADER.pack(
                self.stream, self.kind, self.flags, size, self.sequence, checksum, 0
            )
            + self.payload
        )


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Read a frame.  Raises ValueError if its checksum is wrong."""
    head = await reader.readexactly(HEADER.size)
    stream, kind, flags, size, sequence, checksum, _ = HEADER.unpack(head)
    payload = await reader.readexactly(size)
    if zlib.crc32(payload) != checksum:
        raise ValueError("wrong checksum")
    return Frame(kind, payload, stream, flags, sequence)


@dataclass(eq=False)
class Node:
    """A node with a registry of tasks, which also dispatches tasks to others.

    ``keepalive`` is the interval of its transport's heartbeats in seconds; 0: none.
    """

    name: str
    registry: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    keepalive: float = 0.0
    pings: list[str] = field(default_factory=list)
    links: list["Link"] = field(default_factory=list)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[tuple[int, int]]:
        """Open both ports, the transport's after the heartbeat's; yield them."""
        while True:
            heartbeat = await asyncio.start_server(self._pong, "127.0.0.1", 0)
            port = heartbeat.sockets[0].getsockname()[1]
            try:
                transport = await asyncio.start_server(
                    self._accept, "127.0.0.1", port + 1
                )
                break
            except OSError:
                heartbeat.close()
        try:
            yield port, port + 1
        finally:
            heartbeat.close()
            transport.close()
            for link in self.links:
                link.close()

    async def ping(self, port: int) -> str:
        """Ping another node; return its id."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"PING {self.name}\n".encode())
        word, name = (await reader.readline()).decode().split()
        assert word == "PONG"
        writer.close()
        return name

    @asynccontextmanager
    async def connected(self, port: int) -> AsyncIterator["Link"]:
        """Connect to another node's transport, and serve it beside the block."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        link = Link(self, reader, writer)
        await link.introduce()
        await link.hear_introduction()
        self.links.append(link)
        serving = asyncio.create_task(link.serve())
        try:
            yield link
        finally:
            link.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _pong(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        words = (await reader.readline()).decode().split()
        if len(words) == 2 and words[0] == "PING":
            self.pings.append(words[1])
            writer.write(f"PONG {self.name}\n".encode())
        writer.close()

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        link = Link(self, reader, writer)
        await link.hear_introduction()
        await link.introduce()
        self.links.append(link)
        await link.serve()


class Link:
    """A connection of two nodes' transports."""

    def __init__(
        self, node: Node, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._node = node
        self._reader = reader
        self._writer = writer
        self._results: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._streams = 0
        self.peer = b""
        self.ended = asyncio.Event()

    async def introduce(self) -> None:
        flags = HANDSHAKE_V2
        self._send(Frame(CONTROL, self._node.name.encode(), flags=flags))

    async def hear_introduction(self) -> None:
        frame = await read_frame(self._reader)
        assert frame.kind == CONTROL
        self.peer = frame.payload

    def close(self) -> None:
        self._writer.close()

    async def serve(self) -> None:
        """Run tasks and hear results until the connection ends."""
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                frame = await read_frame(self._reader)
                if frame.kind == TASK:
                    self._run(frame)
                elif frame.kind == RESULT:
                    result = msgpack.unpackb(frame.payload)
                    self._results[result["task_id"]].set_result(result)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            beating.cancel()
            self.ended.set()
            self.close()

    async def submit(
        self, name: str, *args: Any, size: int = 0, **kwargs: Any
    ) -> dict[str, Any]:
        """Dispatch a task, in chunks of ``size`` bytes unless 0; return its result."""
        task = {
            "task_id": uuid4().hex,
            "name": name,
            "args": list(args),
            "kwargs": kwargs,
            "timeout": 60.0,
        }
        self._streams += 1
        payload: bytes = msgpack.packb(task, use_bin_type=True)
        result = self._results[str(task["task_id"])] = (
            asyncio.get_running_loop().create_future()
        )
        for frame in in_chunks(TASK, payload, self._streams, size):
            self._send(frame)
        ended: dict[str, Any] = await result
        return ended

    def _run(self, frame: Frame) -> None:
        task = msgpack.unpackb(frame.payload)
        assert isinstance(task["timeout"], float)
        result = {"task_id": task["task_id"], "ok": True, "value": None, "error": None}
        try:
            function = self._node.registry[task["name"]]
            result["value"] = function(*task["args"], **task["kwargs"])
        except Exception:
            result |= {"ok": False, "error": traceback.format_exc()}
        payload: bytes = msgpack.packb(result, use_bin_type=True)
        self._send(Frame(RESULT, payload, frame.stream))

    def _send(self, frame: Frame) -> None:
        self._writer.write(frame.packed())

    async def _beat(self) -> None:
        while self._node.keepalive:
            self._send(Frame(HEARTBEAT, b""))
            await asyncio.sleep(self._node.keepalive)


def in_chunks(kind: int, payload: bytes, stream: int, size: int) -> list[Frame]:
    """Return the frames of a payload; ``size`` 0: one."""
    if not size:
        return [Frame(kind, payload, stream)]
    parts = [payload[at : at + size] for at in range(0, len(payload), size)]
    last = len(parts) - 1
    return [
        Frame(kind, part, stream, CHUNKED | (LAST_CHUNK if at == last else 0), at)
        for at, part in enumerate(parts)
    ]
