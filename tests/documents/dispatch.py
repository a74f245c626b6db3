"""Dispatch's worker and coordinator, from "WebSocket Protocol".

Where the document says "canonical JSON", they take that of RFC 8785: the keys are
sorted, and nothing stands between them.
"""

import asyncio
import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, web
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

HEARTBEAT = 10.0  # seconds


class Rejection(Exception):
    """A worker cannot execute a job."""


class Worker:
    """Joins a coordinator; ``run_job`` makes a job's output or raises Rejection.

    ``optional`` are the further fields of its registration and of its heartbeats.  It
    sends receipts ``apart``, in an answer (False), or none (None).
    """

    def __init__(
        self,
        coordinator: str,
        run_job: Callable[[dict[str, Any]], Any],
        *,
        optional: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
        apart: bool | None = None,
    ) -> None:
        self._url = coordinator
        self._run_job = run_job
        self._optional = optional or {}
        self._metrics = metrics
        self._apart = apart
        self._private = Ed25519PrivateKey.generate()
        self.key = self._private.public_key().public_bytes_raw().hex()
        self.received: list[dict[str, Any]] = []
        self.registered = asyncio.Event()
        self.acknowledged = asyncio.Event()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the messages of a type that the coordinator sent."""
        return [each for each in self.received if each["type"] == kind]

    async def run(self) -> None:
        """Work until the connection ends."""
        async with ClientSession() as session, session.ws_connect(self._url) as socket:
            register = {
                "type": "register",
                "provider_pubkey": self.key,
                "provider_type": "DESKTOP",
                "capabilities": ["LLM_INFER", "TASK"],
            }
            await socket.send_str(json.dumps(register | self._optional))
            beating = asyncio.create_task(self._beat(socket))
            try:
                await self._listen(socket)
            finally:
                beating.cancel()

    async def _beat(self, socket: ClientWebSocketResponse) -> None:
        await self.registered.wait()
        beat: dict[str, Any] = {"type": "heartbeat", "provider_pubkey": self.key}
        if self._metrics is not None:
            beat["metrics"] = self._metrics
        while True:
            await socket.send_str(json.dumps(beat))
            await asyncio.sleep(HEARTBEAT)

    async def _listen(self, socket: ClientWebSocketResponse) -> None:
        async for frame in socket:
            if frame.type is not WSMsgType.TEXT:
                continue
            message = json.loads(frame.data)
            self.received.append(message)
            match message["type"]:
                case "register_ack":
                    assert message["status"] == "ok", message["error"]
                    self.registered.set()
                case "heartbeat_ack":
                    assert message["status"] == "ok"
                    self.acknowledged.set()
                case "job_assign":
                    for answer in self._answers(message):
                        await socket.send_str(json.dumps(answer))
                case _:
                    pass  # kept for whoever looks

    def _answers(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        job_id = job["job_id"]
        try:
            output = self._run_job(job)
        except Rejection as rejection:
            reason = str(rejection)
            return [{"type": "job_reject", "job_id": job_id, "reason": reason}]
        complete = {
            "type": "job_complete",
            "job_id": job_id,
            "output": output,
            "output_hash": hash_of(output),
        }
        if self._apart is None:
            return [complete]
        receipt = {
            "job_id": job_id,
            "provider_pubkey": self.key,
            "output_hash": hash_of(output),
            "completed_at": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            "payment_ref": None,
        }
        signed = self._private.sign(canonical(receipt))
        signature = base64.b64encode(signed).decode()
        if not self._apart:
            return [complete | {"receipt": receipt, "receipt_signature": signature}]
        submit = {"type": "receipt_submit", "receipt": receipt, "signature": signature}
        return [complete, submit]


@dataclass(slots=True)
class Assigned:
    """A job of the coordinator; ``answer`` is what the worker sent."""

    answer: dict[str, Any] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Coordinator:
    """Gives jobs to the last worker that registered, and verifies its receipts."""

    def __init__(self) -> None:
        self.registration: dict[str, Any] = {}
        self.heartbeats: list[dict[str, Any]] = []
        self.unexpected: list[dict[str, Any]] = []
        self.registered = asyncio.Event()
        self._jobs: dict[str, Assigned] = {}
        self._socket: web.WebSocketResponse | None = None

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        """Serve a worker's connection."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for frame in socket:
            answer = self._receive(json.loads(frame.data))
            if answer is not None:
                await socket.send_str(json.dumps(answer))
                self._socket = socket
        return socket

    async def ask(self, job_id: str, **job: Any) -> dict[str, Any]:
        """Give the worker a job; return its answer."""
        assert self._socket is not None
        mine = self._jobs[job_id] = Assigned()
        message = {"type": "job_assign", "job_id": job_id, **job}
        await self._socket.send_str(json.dumps(message))
        await mine.ended.wait()
        return mine.answer

    async def complain(self, code: str, message: str) -> None:
        """Send the worker an error."""
        assert self._socket is not None
        error = {"type": "error", "code": code, "message": message}
        await self._socket.send_str(json.dumps(error))

    def verifies(self, answer: dict[str, Any]) -> bool:
        """Say whether an answer has a receipt that proves it."""
        receipt = answer["receipt"]
        key = bytes.fromhex(self.registration["provider_pubkey"])
        signature = base64.b64decode(answer["receipt_signature"])
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(
                signature, canonical(receipt)
            )
        except InvalidSignature:
            return False
        matches: bool = (
            receipt["job_id"] == answer["job_id"]
            and receipt["provider_pubkey"] == self.registration["provider_pubkey"]
            and receipt["output_hash"] == answer["output_hash"]
            and answer["output_hash"] == hash_of(answer["output"])
        )
        return matches

    def _receive(self, message: dict[str, Any]) -> dict[str, Any] | None:
        match message["type"]:
            case "register":
                self.registration = message
                self.registered.set()
                ok = {"type": "register_ack", "status": "ok"}
                return ok | {"worker_id": "worker_abc123"}
            case "heartbeat":
                self.heartbeats.append(message)
                return {"type": "heartbeat_ack", "status": "ok"}
            case "job_complete" | "job_reject":
                job = self._jobs[message["job_id"]]
                job.answer = message
                job.ended.set()
            case _:
                self.unexpected.append(message)
        return None


def hash_of(output: Any) -> str:
    """Return the hash of an output's JSON, without spaces."""
    text = json.dumps(output, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def canonical(receipt: dict[str, Any]) -> bytes:
    """Return a receipt as it is signed."""
    return json.dumps(
        receipt, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()
