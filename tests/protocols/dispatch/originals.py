"""A worker and a coordinator as the original ones are, as far as their wire goes."""

import base64
import hashlib
import json
from typing import Any

from protocols.dispatch.recorded import SIGNERS
from shoal.ledger.keys import Signer, verify
from shoal.protocols.dispatch.codec.ecmascript_json import canonical


class OriginalWorker:
    """The desktop worker: it registers, does what it is told, and signs it.

    Without a model it answers as that one does: the words are others.
    """

    def __init__(self, signer: Signer = SIGNERS["A"]) -> None:
        self._signer = signer
        self.key = signer.public_key.hex()
        self.worker_id = ""

    def register(self) -> str:
        return _dump(
            {
                "type": "register",
                "provider_pubkey": self.key,
                "provider_type": "DESKTOP",
                "capabilities": ["LLM_INFER", "TASK"],
            }
        )

    def heartbeat(self) -> str:
        return _dump({"type": "heartbeat", "provider_pubkey": self.key})

    def receive(self, text: str) -> list[str]:
        """Take a message; return the answers."""
        message = json.loads(text)
        match message["type"]:
            case "register_ack":
                assert message["status"] == "ok"
                self.worker_id = message["worker_id"]
            case "job_assign":
                return [self._complete(message["job_id"], self._do(message))]
            case _:
                pass  # it knows no other types
        return []

    def _do(self, job: dict[str, Any]) -> dict[str, Any]:
        payload = job["payload"]
        if job["job_type"] == "LLM_INFER" and payload.get("prompt"):
            text = f"[stub] {len(payload['prompt'])} characters"
            return {"text": text, "model": "stub-v1", "stub": True}
        if job["job_type"] == "TASK" and payload.get("task_type") == "classify":
            return {"sentiment": "neutral", "confidence": 0.9000000000000001}
        return {"error": "Unsupported job payload"}

    def _complete(self, job_id: str, output: dict[str, Any]) -> str:
        digest = hashlib.sha256(canonical(_dump(output))).hexdigest()
        receipt = {
            "job_id": job_id,
            "provider_pubkey": self.key,
            "output_hash": digest,
            "completed_at": "2026-02-09T12:00:05.000Z",
            "payment_ref": None,
        }
        signature = self._signer.sign(canonical(_dump(receipt)))
        return _dump(
            {
                "type": "job_complete",
                "job_id": job_id,
                "output": output,
                "output_hash": digest,
                "receipt": receipt,
                "receipt_signature": base64.b64encode(signature).decode(),
            }
        )


class OriginalCoordinator:
    """The original coordinator, with one worker.

    It acknowledges whatever registers, believes whatever it is told, and says nothing
    of what it does not understand but that.
    """

    def __init__(self) -> None:
        self.key = ""
        self.done: dict[str, tuple[Any, bool | None]] = {}  # output, verified
        self.forgotten: list[str] = []  # rejected jobs, which hang for ever
        self.beats: list[Any] = []  # the metrics, which it does not look at
        self._active: set[str] = set()

    def receive(self, text: str) -> list[str]:
        message = json.loads(text)
        match message.get("type"):
            case "register":
                self.key = message["provider_pubkey"]
                ack = {"type": "register_ack", "status": "ok", "worker_id": "uuid"}
                return [_dump(ack)]
            case "heartbeat":
                self.beats.append(message.get("metrics"))
                return [_dump({"type": "heartbeat_ack", "status": "ok"})]
            case "job_complete":
                if message["job_id"] in self._active:
                    self._active.discard(message["job_id"])
                    found = message.get("output"), self._verified(message)
                    self.done[message["job_id"]] = found
                return []
            case "job_reject":
                self.forgotten.append(message["job_id"])
                return []
            case other:
                text = f"Unknown type: {other}"
                error = {"type": "error", "code": "UNKNOWN_MSG", "message": text}
                return [_dump(error)]

    def assign(self, job_id: str, job_type: str, payload: Any) -> str:
        self._active.add(job_id)
        return _dump(
            {
                "type": "job_assign",
                "job_id": job_id,
                "job_type": job_type,
                "payload": payload,
                "policy": "FAST",
                "privacy_class": "PUBLIC",
                "user_id": 42,
            }
        )

    def _verified(self, message: dict[str, Any]) -> bool | None:
        receipt, signature = message.get("receipt"), message.get("receipt_signature")
        if not receipt or not signature:
            return None
        body = canonical(_dump(receipt))
        return verify(bytes.fromhex(self.key), base64.b64decode(signature), body)


def _dump(value: object) -> str:
    # Halves of characters are passed on escaped, as there.
    return json.dumps(value, separators=(",", ":"))
