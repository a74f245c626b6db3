"""A Mac on the local network: one connection, one message at a time."""

import asyncio
import base64
import hashlib
import struct
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.speed import scaled
from originals import swift

REFERENCE_DATE = 978_307_200
CHUNK = 1_048_576
HEARTBEAT = 5.0
DEAF = 0.05  # seconds after its hello in which a dialling Mac loses messages
SIZE = struct.Struct(">I")


@dataclass
class Mac:
    """A Mac with models, which all give the same answer.

    ``flat``: a program that was written from TealeNet's document instead, and therefore
    reads and writes payloads without the layer ``_0``.
    """

    models: list[str] = field(default_factory=list)
    pieces: Sequence[str] = ("Hel", "lo")
    passcode: str | None = None
    folder: Path | None = None  # of models that it shares
    device_id: str = field(default_factory=lambda: str(uuid.uuid4()).upper())
    pause: float = 0.0  # seconds between two pieces
    flat: bool = False
    received: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """The reasons for dropping messages."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @asynccontextmanager
    async def listening(self, host: str = "127.0.0.1") -> AsyncIterator[int]:
        """Accept connections within the block; yields the port."""
        server = await asyncio.start_server(self._accept, host, 0)
        async with server:
            yield server.sockets[0].getsockname()[1]
            self._close_all()

    @asynccontextmanager
    async def dialled(self, port: int, host: str = "127.0.0.1") -> AsyncIterator[None]:
        """Connect within the block, which starts after the handshake."""
        reader, writer = await asyncio.open_connection(host, port)
        self.writers.append(writer)
        self._send(writer, "hello", self._introduction())
        serving = asyncio.create_task(self._dial(reader, writer))
        try:
            await self.until("helloAck")
            yield
        finally:
            self._close_all()
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving

    async def until(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for ``count`` messages of a kind; return the last of them."""
        async with asyncio.timeout(scaled(20)):
            while True:
                payloads = [payload for each, payload in self.received if each == kind]
                if len(payloads) >= count:
                    return payloads[count - 1]
                self.changed.clear()
                await self.changed.wait()

    def send(self, kind: str, payload: dict[str, Any]) -> None:
        """Send a message to the newest peer."""
        self._send(self.writers[-1], kind, payload)

    def would_choose(self, model: str) -> bool:
        """Return whether it would submit a job for a model to the newest peer."""
        return bool(self.heartbeats) and is_eligible(self.heartbeats[-1], model)

    async def until_eligible(self, model: str) -> None:
        """Wait until it would submit a job for a model to the newest peer."""
        async with asyncio.timeout(scaled(20)):
            while not self.would_choose(model):
                self.changed.clear()
                await self.changed.wait()

    @property
    def heartbeats(self) -> list[dict[str, Any]]:
        """The heartbeats that it has received."""
        return [payload for kind, payload in self.received if kind == "heartbeat"]

    @property
    def offered(self) -> list[str]:
        """The models in the newest peer's last heartbeat."""
        names: list[str] = (
            self.heartbeats[-1]["loadedModels"] if self.heartbeats else []
        )
        return names

    def submit(self, model: str, prompt: str, **more: Any) -> str:
        """Submit a chat to the newest peer; return the request's id."""
        request_id = str(uuid.uuid4()).upper()
        messages = [{"role": "user", "content": prompt}]
        request = {"model": model, "messages": messages, "stream": True, **more}
        payload = {"requestID": request_id, "request": request, "streaming": True}
        self.send("inferenceRequest", payload)
        return request_id

    def answer_to(self, request_id: str) -> str:
        """Return the text received for a request so far."""
        text = ""
        for kind, payload in self.received:
            if kind == "inferenceChunk" and _same_id(payload["requestID"], request_id):
                for choice in payload["chunk"]["choices"]:
                    text += choice["delta"].get("content") or ""
        return text

    def _close_all(self) -> None:
        for writer in self.writers:
            writer.close()

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                kind, payload = await self._next(reader)
                if kind == "hello":
                    break
            if payload.get("clusterPasscodeHash") != self._hash():
                writer.close()
                return
            self._send(writer, "helloAck", self._introduction())
            await self._serve(reader, writer)

    async def _dial(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            with suppress(TimeoutError):
                async with asyncio.timeout(DEAF):
                    while await reader.read(CHUNK):
                        pass  # a Mac loses these bytes
            while (await self._next(reader))[0] != "helloAck":
                pass
            await self._serve(reader, writer)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        heartbeats = asyncio.create_task(self._beat(writer))
        try:
            while True:
                kind, payload = await self._next(reader)
                await self._receive(writer, kind, payload)
        finally:
            heartbeats.cancel()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            self._send(writer, "heartbeat", self._health(models=self.models))
            await asyncio.sleep(HEARTBEAT)

    async def _next(self, reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
        while True:
            (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
            raw = await reader.readexactly(size)
            try:
                kind, payload = swift.read(raw, flat=self.flat)
            except swift.Dropped as error:
                self.dropped.append(f"{error}: {raw[:200]!r}")
                self.changed.set()
                continue
            self.received.append((kind, payload))
            self.changed.set()
            return kind, payload

    async def _receive(
        self, writer: asyncio.StreamWriter, kind: str, payload: dict[str, Any]
    ) -> None:
        match kind:
            case "heartbeat":
                # A Mac sends default values, with its id and the time.
                self._send(writer, "heartbeatAck", self._health(models=[]))
            case "inferenceRequest":
                await self._infer(writer, payload)
            case "modelQuery":
                self._answer_query(writer, payload["modelID"])
            case "modelTransferRequest":
                await self._send_model(writer, payload)
            case _:
                pass  # acknowledgements, and unexpected messages

    async def _infer(
        self, writer: asyncio.StreamWriter, payload: dict[str, Any]
    ) -> None:
        request_id = str(uuid.UUID(payload["requestID"])).upper()
        model = payload["request"].get("model") or self.models[0]
        if model not in self.models:
            error = {"requestID": request_id, "errorMessage": "Model not loaded"}
            self._send(writer, "inferenceError", error)
            return
        deltas: list[dict[str, Any]] = [{"role": "assistant"}]
        deltas += [{"content": piece} for piece in self.pieces]
        for delta in deltas:
            self._chunk(writer, request_id, model, delta, None)
            await asyncio.sleep(self.pause)
        self._chunk(writer, request_id, model, {}, "stop")
        self._send(writer, "inferenceComplete", {"requestID": request_id})

    def _chunk(
        self,
        writer: asyncio.StreamWriter,
        request_id: str,
        model: str,
        delta: dict[str, Any],
        finish: str | None,
    ) -> None:
        chunk = {
            "id": "chatcmpl-mac",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }
        self._send(writer, "inferenceChunk", {"requestID": request_id, "chunk": chunk})

    def _answer_query(self, writer: asyncio.StreamWriter, model: str) -> None:
        path = None if self.folder is None else self.folder / model
        if path is None or not path.exists():
            self._send(
                writer, "modelQueryResponse", {"modelID": model, "available": False}
            )
            return
        size = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
        payload = {"modelID": model, "available": True, "totalSizeBytes": size}
        self._send(writer, "modelQueryResponse", payload)

    async def _send_model(
        self, writer: asyncio.StreamWriter, payload: dict[str, Any]
    ) -> None:
        path = None if self.folder is None else self.folder / payload["modelID"]
        if path is None or not path.exists():
            return  # a Mac does not answer
        files = [each for each in path.iterdir() if not each.name.startswith(".")]
        for file in files:
            if file.is_dir():
                return  # a Mac ends the transfer without a word
            content = file.read_bytes()
            for offset in range(0, len(content), CHUNK):
                piece = content[offset : offset + CHUNK]
                last = file is files[-1] and offset + CHUNK >= len(content)
                chunk = {
                    "transferID": payload["transferID"].upper(),
                    "fileName": file.name,
                    "offset": offset,
                    "data": base64.b64encode(piece).decode(),
                    "isLastChunk": last,
                }
                self._send(writer, "modelTransferChunk", chunk)
                await writer.drain()
        done = {"transferID": payload["transferID"], "modelID": payload["modelID"]}
        self._send(writer, "modelTransferComplete", done)

    def _send(
        self, writer: asyncio.StreamWriter, kind: str, payload: dict[str, Any]
    ) -> None:
        raw = swift.write(kind, payload, flat=self.flat)
        writer.write(SIZE.pack(len(raw)) + raw)

    def _introduction(self) -> dict[str, Any]:
        now = time.time() - REFERENCE_DATE
        return {
            "deviceInfo": {
                "id": self.device_id,
                "name": "Studio",
                "hardware": {
                    "chipFamily": "m2Pro",
                    "chipName": "Apple M2 Pro",
                    "totalRAMGB": 32.0,
                    "gpuCoreCount": 19,
                    "memoryBandwidthGBs": 200.0,
                    "tier": 2,
                },
                "registeredAt": now,
                "lastSeenAt": now,
                "isCurrentDevice": True,
                "loadedModels": [],
            },
            "protocolVersion": 1,
            "clusterPasscodeHash": self._hash(),
            "loadedModels": self.models,
        }

    def _health(self, models: list[str]) -> dict[str, Any]:
        return {
            "deviceID": self.device_id,
            "timestamp": time.time() - REFERENCE_DATE,
            "thermalLevel": "nominal",
            "throttleLevel": 100,
            "loadedModels": models,
            "isGenerating": False,
            "queueDepth": 0,
            "organizationID": self._hash(),
        }

    def _hash(self) -> str | None:
        if self.passcode is None:
            return None
        return hashlib.sha256(self.passcode.encode()).hexdigest()


def is_eligible(heartbeat: dict[str, Any], model: str) -> bool:
    """Return whether a Mac gives a job for a model to the sender of a heartbeat."""
    return (
        model in heartbeat["loadedModels"]
        and not heartbeat["isGenerating"]
        and heartbeat["throttleLevel"] > 0
        and heartbeat["thermalLevel"] in ("nominal", "fair")
    )


def _same_id(one: str, other: str) -> bool:
    return one.upper() == other.upper()
