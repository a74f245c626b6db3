"""TealeNet's peer on the local network, from "Cluster Messages".

Payloads are flat, absent optionals are null, and dates are Apple's.
"""

import asyncio
import base64
import hashlib
import json
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeAlias
from uuid import uuid4

Message: TypeAlias = dict[str, Any]

APPLE_EPOCH = datetime(2001, 1, 1, tzinfo=UTC).timestamp()
LENGTH = struct.Struct(">I")
CHUNK = 1 << 20  # bytes of a model in one message


class Misunderstood(Exception):
    """A message of the other end is not as the document has it."""


@dataclass(eq=False)
class Peer:
    """A peer with models, and the answer that each of them gives.

    It says hello on every connection, whoever made it.  ``heartbeat`` is its interval
    in seconds; between its own it acknowledges those of the other end.  A ``strict``
    one ends a connection on which it understands a message not; others ignore it.
    """

    models: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    passcode: str | None = None
    heartbeat: float = 5.0
    strict: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    device: str = field(default_factory=lambda: str(uuid4()))
    connections: list["Connection"] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Accept connections; yield the port."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for each in self.connections:
                each.close()

    @asynccontextmanager
    async def connected(self, port: int) -> AsyncIterator["Connection"]:
        """Connect to another peer, and serve it beside the block."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connection = Connection(self, writer)
        serving = asyncio.create_task(self._serve(connection, reader))
        try:
            yield connection
        finally:
            connection.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._serve(Connection(self, writer), reader)

    async def _serve(
        self, connection: "Connection", reader: asyncio.StreamReader
    ) -> None:
        self.connections.append(connection)
        beating = asyncio.create_task(connection.beat())
        try:
            connection.send("hello", self.hello())
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                message = json.loads(await reader.readexactly(size))
                try:
                    await connection.receive(message)
                except (KeyError, Misunderstood) as fault:
                    self.faults.append(f"{fault!r}: {json.dumps(message)[:300]}")
                    if self.strict:
                        return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            beating.cancel()
            connection.ended.set()
            connection.close()

    def hello(self) -> Message:
        now = apple_time()
        hashed = None
        if self.passcode is not None:
            hashed = hashlib.sha256(self.passcode.encode()).hexdigest()
        return {
            "deviceInfo": {
                "id": self.device,
                "name": "Linux Server",
                "hardware": {
                    "chipFamily": "nvidiaGPU",
                    "chipName": "NVIDIA RTX 4090",
                    "totalRAMGB": 64.0,
                    "gpuCoreCount": 16384,
                    "memoryBandwidthGBs": 1008.0,
                    "tier": 1,
                    "gpuBackend": "cuda",
                    "platform": "linux",
                    "gpuVRAMGB": 24.0,
                },
                "registeredAt": now,
                "lastSeenAt": now,
                "isCurrentDevice": True,
                "loadedModels": [],
            },
            "protocolVersion": 1,
            "clusterPasscodeHash": hashed,
            "loadedModels": list(self.models),
            "ownerUserID": None,
        }

    def health(self) -> Message:
        return {
            "deviceID": self.device,
            "timestamp": apple_time(),
            "thermalLevel": "nominal",
            "throttleLevel": 100,
            "loadedModels": list(self.models),
            "isGenerating": False,
            "queueDepth": 0,
            "organizationID": None,
            "ownerUserID": None,
        }


class Connection:
    """A connection to another peer, of which ``theirs`` is the latest hello."""

    def __init__(self, peer: Peer, writer: asyncio.StreamWriter) -> None:
        self._peer = peer
        self._writer = writer
        self.theirs: Message = {}
        self.health: Message = {}
        self.met = asyncio.Event()
        self.well = asyncio.Event()
        self.ended = asyncio.Event()
        self._answers: dict[str, asyncio.Queue[Message]] = {}

    def close(self) -> None:
        self._writer.close()

    def send(self, kind: str, payload: Message) -> None:
        data = json.dumps({kind: payload}).encode()
        self._writer.write(LENGTH.pack(len(data)) + data)

    async def beat(self) -> None:
        """Report the peer's health, again and again."""
        await self.met.wait()
        while True:
            await asyncio.sleep(self._peer.heartbeat)
            self.send("heartbeat", self._peer.health())

    async def receive(self, message: Message) -> None:
        """Handle a message.  Raises Misunderstood, or KeyError for a missing field."""
        if len(message) != 1:
            raise Misunderstood("expected one key")
        ((kind, payload),) = message.items()
        match kind:
            case "hello" | "helloAck":
                self._meet(payload)
                if kind == "hello":
                    self.send("helloAck", self._peer.hello())
            case "heartbeat" | "heartbeatAck":
                self._hear(payload)
                if kind == "heartbeat":
                    self.send("heartbeatAck", self._peer.health())
            case "inferenceRequest":
                self._infer(payload)
            case "modelQuery":
                self._tell(payload["modelID"])
            case "modelTransferRequest":
                await self._transfer(payload["transferID"], payload["modelID"])
            case "inferenceChunk" | "inferenceComplete" | "inferenceError":
                self._answers[payload["requestID"]].put_nowait(message)
            case "modelQueryResponse":
                self._answers[payload["modelID"]].put_nowait(message)
            case "modelTransferChunk" | "modelTransferComplete":
                self._answers[payload["transferID"]].put_nowait(message)
            case _:
                raise Misunderstood("unknown message")

    async def ask(self, request: Message, *, streaming: bool = True) -> str:
        """Request an inference; return its text."""
        number = str(uuid4())
        payload = {"requestID": number, "request": request, "streaming": streaming}
        text = ""
        async for kind, answer in self._request(number, "inferenceRequest", payload):
            match kind:
                case "inferenceChunk":
                    chunk = answer["chunk"]
                    assert chunk["object"] == "chat.completion.chunk"
                    assert isinstance(chunk["created"], int)
                    assert chunk.keys() >= {"id", "model"}
                    for choice in chunk["choices"]:
                        assert choice["index"] == 0
                        assert choice["finish_reason"] in (None, "stop")
                        text += choice["delta"].get("content") or ""
                case "inferenceComplete":
                    break
                case _:
                    raise RuntimeError(answer["errorMessage"])
        return text

    async def query(self, model: str) -> Message:
        """Ask whether the other end has a model to transfer."""
        payload = {"modelID": model}
        async for _, answer in self._request(model, "modelQuery", payload):
            return answer
        raise AssertionError("it never ends without an answer")

    async def fetch(self, model: str) -> dict[str, bytes]:
        """Transfer a model; return its files."""
        files: dict[str, bytearray] = {}
        number = str(uuid4())
        payload = {"transferID": number, "modelID": model}
        async for kind, part in self._request(number, "modelTransferRequest", payload):
            if kind == "modelTransferComplete":
                assert part["modelID"] == model
                break
            data = files.setdefault(part["fileName"], bytearray())
            assert part["offset"] == len(data)
            data += base64.b64decode(part["data"])
        return {name: bytes(data) for name, data in files.items()}

    async def _request(
        self, key: str, kind: str, payload: Message
    ) -> AsyncIterator[tuple[str, Message]]:
        answers = self._answers[key] = asyncio.Queue()
        self.send(kind, payload)
        while True:
            ((answer, body),) = (await answers.get()).items()
            yield answer, body

    def _meet(self, theirs: Message) -> None:
        device = theirs["deviceInfo"]
        if not device.keys() >= {"id", "name", "hardware", "registeredAt"}:
            raise Misunderstood("no description of the device")
        if not isinstance(theirs["protocolVersion"], int):
            raise Misunderstood("no version")
        ours = self._peer.hello()["clusterPasscodeHash"]
        if theirs["clusterPasscodeHash"] != ours:
            raise Misunderstood("another passcode")
        if theirs["ownerUserID"] is not None:
            raise Misunderstood("an owner")
        self.theirs = theirs
        self.met.set()

    def _hear(self, health: Message) -> None:
        if health["thermalLevel"] not in ("nominal", "fair", "serious", "critical"):
            raise Misunderstood("no thermal level")
        if not 0 <= health["throttleLevel"] <= 100 or health["queueDepth"] < 0:
            raise Misunderstood("impossible load")
        if not isinstance(health["isGenerating"], bool):
            raise Misunderstood("no isGenerating")
        if health["ownerUserID"] is not None:
            raise Misunderstood("an owner")
        if health["organizationID"] not in (
            None,
            self._peer.hello()["clusterPasscodeHash"],
        ):
            raise Misunderstood("an organization")
        self.health = health
        self.well.set()

    def _infer(self, payload: Message) -> None:
        number, request = payload["requestID"], payload["request"]
        assert isinstance(payload["streaming"], bool)
        model = request["model"]
        if model not in self._peer.models:
            error = {"requestID": number, "errorMessage": "Model not loaded"}
            self.send("inferenceError", error)
            return
        question = request["messages"][-1]["content"]
        pieces = [*self._peer.answer, question]
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            choice = {
                "index": 0,
                "delta": {"content": piece},
                "finish_reason": "stop" if last else None,
            }
            chunk = {
                "id": "chatcmpl-xxx",
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": model,
                "choices": [choice],
            }
            self.send("inferenceChunk", {"requestID": number, "chunk": chunk})
        self.send("inferenceComplete", {"requestID": number})

    def _tell(self, model: str) -> None:
        files = self._peer.files if model in self._peer.models else {}
        answer = {
            "modelID": model,
            "available": bool(files),
            "totalSizeBytes": sum(map(len, files.values())),
        }
        self.send("modelQueryResponse", answer)

    async def _transfer(self, number: str, model: str) -> None:
        for name, data in self._peer.files.items():
            for offset in range(0, len(data), CHUNK):
                part = data[offset : offset + CHUNK]
                chunk = {
                    "transferID": number,
                    "fileName": name,
                    "offset": offset,
                    "data": base64.b64encode(part).decode(),
                    "isLastChunk": offset + CHUNK >= len(data),
                }
                self.send("modelTransferChunk", chunk)
                await self._writer.drain()
        complete = {"transferID": number, "modelID": model}
        self.send("modelTransferComplete", complete)


def apple_time() -> float:
    """Return the seconds since 2001."""
    return time.time() - APPLE_EPOCH
