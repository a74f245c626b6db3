"""A node and a gateway on a relay, like the Rust programs."""

import asyncio
import base64
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from harness.speed import scaled

REFERENCE_DATE = 978_307_200


@dataclass
class RustPeer:
    """A peer on a relay: its key, its connection, and the other peers.

    ``flat``: a program that was written from TealeNet's document instead, and therefore
    reads and writes payloads without the layer ``_0``.
    """

    seed: bytes
    models: list[str] = field(default_factory=list)
    flat: bool = False
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    received: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    socket: ClientWebSocketResponse | None = None

    @property
    def node_id(self) -> str:
        return self._key.public_key().public_bytes_raw().hex()

    @property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.seed)

    @asynccontextmanager
    async def joined(self, url: str) -> AsyncIterator[None]:
        """Connect and register within the block."""
        async with (
            ClientSession() as session,
            session.ws_connect(f"{url}?node={self.node_id}", max_msg_size=0) as socket,
        ):
            self.socket = socket
            await self._introduce()
            serving = asyncio.create_task(self._serve(socket))
            try:
                await self.until("registerAck")
                yield
            finally:
                serving.cancel()
                with suppress(asyncio.CancelledError):
                    await serving

    async def _introduce(self) -> None:
        await self.send("register", self._registration())

    async def until(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for ``count`` messages of a kind; return the last of them."""
        async with asyncio.timeout(scaled(20)):
            while True:
                payloads = [payload for each, payload in self.received if each == kind]
                if len(payloads) >= count:
                    return payloads[count - 1]
                self.changed.clear()
                await self.changed.wait()

    async def send(self, kind: str, payload: dict[str, Any]) -> None:
        assert self.socket is not None
        text = json.dumps({kind: payload}, sort_keys=True, separators=(",", ":"))
        await self.socket.send_str(text)

    async def send_cluster(
        self, to: str, session_id: str, kind: str, payload: dict[str, Any]
    ) -> None:
        """Send a cluster message in a session."""
        layered = payload if self.flat else {"_0": payload}
        raw = json.dumps({kind: layered}, sort_keys=True).encode()
        await self.send(
            "relayData",
            self._addresses(to, session_id) | {"data": base64.b64encode(raw).decode()},
        )

    def _addresses(self, to: str, session_id: str) -> dict[str, Any]:
        return {"fromNodeID": self.node_id, "toNodeID": to, "sessionID": session_id}

    def _registration(self) -> dict[str, Any]:
        return {
            "nodeID": self.node_id,
            "publicKey": self.node_id,
            "displayName": "a Rust node",
            "capabilities": {
                "hardware": {
                    "chipFamily": "amdCPU",
                    "chipName": "g",
                    "totalRAMGB": 64.0,
                    "gpuCoreCount": 0,
                    "memoryBandwidthGBs": 50.0,
                    "tier": 2,
                },
                "loadedModels": self.models,
                "maxModelSizeGB": 28.0,
                "isAvailable": bool(self.models),
                "maxConcurrentRequests": 2,
                "effectiveContext": 8192,
                "onACPower": True,
            },
            "signature": self._key.sign(self.node_id.encode()).hex(),
        }

    async def _serve(self, socket: ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                continue
            ((kind, payload),) = json.loads(message.data).items()
            self.received.append((kind, payload))
            self.changed.set()
            await self._receive(kind, payload)
        self.received.append(("closed", {"code": socket.close_code}))
        self.changed.set()

    async def _receive(self, kind: str, payload: dict[str, Any]) -> None:
        if kind == "discoverResponse":
            self.peers = {each["nodeID"]: each for each in payload["peers"]}


@dataclass
class ForgedPeer(RustPeer):
    """A peer that registers under another node's id, with an invalid signature."""

    victim: str = ""

    @property
    def node_id(self) -> str:
        return self.victim


@dataclass
class RustNode(RustPeer):
    """A node that processes one message at a time, without cancellation."""

    pieces: Sequence[str] = ("Hel", "lo")
    pause: float = 0.0  # seconds between two pieces
    server_dies_after: int | None = None
    """Pieces after which its model server dies: the answer then ends as if whole."""

    server_refuses: tuple[int, str] | None = None
    """The status and the body of its model server's response to every request."""

    server_down: bool = False
    """Whether its model server cannot be reached."""

    served: list[dict[str, Any]] = field(default_factory=list)
    """The received requests."""

    unknown: list[bytes] = field(default_factory=list)
    """Data that it ignored."""

    device_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    async def _receive(self, kind: str, payload: dict[str, Any]) -> None:
        await super()._receive(kind, payload)
        if kind == "relayOpen":
            session = self._addresses(payload["fromNodeID"], payload["sessionID"])
            await self.send("relayReady", session)
        elif kind == "relayData":
            raw = base64.b64decode(payload["data"])
            await self._receive_cluster(
                payload["fromNodeID"], payload["sessionID"], raw
            )

    async def _receive_cluster(self, peer: str, session_id: str, raw: bytes) -> None:
        try:
            ((kind, payload),) = json.loads(raw).items()
        except ValueError:
            self.unknown.append(raw)
            return
        if self.flat and "_0" in payload:
            self.unknown.append(raw)
            return
        payload = payload.get("_0", payload)
        match kind:
            case "hello":
                payload = {
                    "deviceInfo": {"id": self.device_id},
                    "protocolVersion": 1,
                    "loadedModels": self.models,
                }
                await self.send_cluster(peer, session_id, "helloAck", payload)
            case "heartbeat":
                health = {
                    "deviceID": str(uuid.uuid4()),
                    "timestamp": time.time() - REFERENCE_DATE,
                    "thermalLevel": "nominal",
                    "throttleLevel": 100,
                    "loadedModels": self.models,
                    "isGenerating": False,
                    "queueDepth": 0,
                    "ewmaTokensPerSecond": 18.3,
                }
                await self.send_cluster(peer, session_id, "heartbeatAck", health)
            case "inferenceRequest":
                await self._infer(peer, session_id, payload)
            case _:
                self.unknown.append(raw)

    async def _infer(self, peer: str, session_id: str, message: dict[str, Any]) -> None:
        if not _is_decodable(message["request"]):
            self.unknown.append(json.dumps(message).encode())
            return  # without a word: the consumer waits for its time-out
        self.served.append(message)
        request_id, request = message["requestID"], message["request"]
        if request.get("model") not in self.models:
            error = {
                "requestID": request_id,
                "errorMessage": "model not loaded",
                "code": "model_not_loaded",
            }
            await self.send_cluster(peer, session_id, "inferenceError", error)
            return
        if (failure := self._server_failure()) is not None:
            # Whatever the server says goes into the text, under this one code.
            error = {
                "requestID": request_id,
                "errorMessage": failure,
                "code": "internal_error",
            }
            await self.send_cluster(peer, session_id, "inferenceError", error)
            return
        deltas: list[tuple[dict[str, Any], str | None]] = [
            ({"role": "assistant"}, None)
        ]
        deltas += [({"content": piece}, None) for piece in self.pieces]
        deltas += [({}, "stop")]
        dies_after = self.server_dies_after
        if dies_after is not None:
            del deltas[1 + dies_after :]
        for delta, finish in deltas:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            await self._chunk(peer, session_id, request_id, {"choices": [choice]})
            await asyncio.sleep(self.pause)
        wants_usage = (request.get("stream_options") or {}).get("include_usage")
        if wants_usage and dies_after is None:
            count = len(self.pieces)
            usage = {
                "prompt_tokens": 5,
                "completion_tokens": count,
                "total_tokens": 5 + count,
            }
            await self._chunk(
                peer, session_id, request_id, {"choices": [], "usage": usage}
            )
        done = {"requestID": request_id, "tokensOut": len(deltas)}
        await self.send_cluster(peer, session_id, "inferenceComplete", done)

    def _server_failure(self) -> str | None:
        if self.server_down:
            return (
                "backend request failed: error sending request for url "
                "(http://127.0.0.1:8400/v1/chat/completions)"
            )
        if self.server_refuses is not None:
            status, body = self.server_refuses
            return f"backend returned {status} {HTTPStatus(status).phrase}: {body}"
        return None

    async def _chunk(
        self, peer: str, session_id: str, request_id: str, fields: dict[str, Any]
    ) -> None:
        chunk = {
            "id": "chatcmpl-x",
            "object": "chat.completion.chunk",
            "created": 1_713_100_000,
            "model": "/models/weights.gguf",
            **fields,
        }
        await self.send_cluster(
            peer,
            session_id,
            "inferenceChunk",
            {"requestID": request_id, "chunk": chunk},
        )


def _is_decodable(request: dict[str, Any]) -> bool:
    return (
        all("role" in each and "content" in each for each in request["messages"])
        and (request.get("max_tokens") or 0) >= 0
        and isinstance(request.get("stop") or [], list)
    )


@dataclass
class RustGateway(RustPeer):
    """A gateway, which opens a session for each request.

    It discovers the peers at once, so that the relay may get that before its
    registration.
    """

    async def _introduce(self) -> None:
        await self.send("discover", {"requestingNodeID": self.node_id})
        await super()._introduce()

    async def discover(self) -> dict[str, dict[str, Any]]:
        """Discover the peers; return them by their ids."""
        count = sum(kind == "discoverResponse" for kind, _ in self.received)
        await self.send("discover", {"requestingNodeID": self.node_id})
        await self.until("discoverResponse", count + 1)
        return self.peers

    async def chat(self, to: str, model: str, prompt: str) -> list[dict[str, Any]]:
        """Submit a chat to a peer; return the messages of its answer, unwrapped."""
        session_id = str(uuid.uuid4())
        await self.send("relayOpen", self._addresses(to, session_id))
        async with asyncio.timeout(scaled(4)):
            await self._in_session("relayReady", session_id, 1)
        request = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        message = {
            "requestID": str(uuid.uuid4()),
            "request": request,
            "streaming": True,
        }
        await self.send_cluster(to, session_id, "inferenceRequest", message)
        answer: list[dict[str, Any]] = []
        async with asyncio.timeout(scaled(20)):
            while True:
                data = await self._in_session("relayData", session_id, len(answer) + 1)
                ((kind, payload),) = json.loads(base64.b64decode(data["data"])).items()
                assert not (self.flat and "_0" in payload), "it cannot be read"
                answer.append({kind: payload.get("_0", payload)})
                for choice in answer[-1][kind].get("chunk", {}).get("choices", []):
                    # It passes choices on as they are; strict clients need the field.
                    assert "finish_reason" in choice
                if kind in ("inferenceComplete", "inferenceError"):
                    break
        await self.send("relayClose", self._addresses(to, session_id))
        return answer

    async def _in_session(
        self, kind: str, session_id: str, count: int
    ) -> dict[str, Any]:
        while True:
            payloads = [
                payload
                for each, payload in self.received
                if each == kind and payload["sessionID"] == session_id
            ]
            if len(payloads) >= count:
                return payloads[count - 1]
            self.changed.clear()
            await self.changed.wait()
