"""A Dispatch worker that is done at once, and signs if it is to, over bare bytes."""

import asyncio
import base64
import hashlib
import json

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node import TEXT, frame, receive, upgrade

OUTPUT = '{"sentiment":"positive","confidence":0.5}'
DIGEST = hashlib.sha256(OUTPUT.encode()).hexdigest()


class Provider:
    """A worker with a key of its own; ``signs`` says whether it gives receipts."""

    def __init__(self, number: int, *, signs: bool) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))
        self._public = self._key.public_key().public_bytes_raw().hex()
        self._signs = signs

    async def join(
        self, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Register.  Raises RuntimeError if that is refused."""
        reader, writer = await upgrade(port, "/")
        registration = {
            "type": "register",
            "provider_pubkey": self._public,
            "provider_type": "DESKTOP",
            "capabilities": ["LLM_INFER", "TASK"],
        }
        writer.write(frame(TEXT, json.dumps(registration).encode()))
        _, answer = await receive(reader)
        if json.loads(answer)["status"] != "ok":
            raise RuntimeError(f"not registered: {answer!r}")
        return reader, writer

    async def work(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Do what comes, until cancelled."""
        try:
            while True:
                _, payload = await receive(reader)
                job = json.loads(payload)
                if job["type"] == "job_assign":
                    writer.write(frame(TEXT, self._completion(job["job_id"])))
        finally:
            writer.close()

    def _completion(self, job_id: str) -> bytes:
        head = f'{{"type":"job_complete","job_id":"{job_id}","output":{OUTPUT},'
        if not self._signs:
            return f'{head}"output_hash":"{DIGEST}"}}'.encode()
        receipt = (
            f'{{"job_id":"{job_id}","provider_pubkey":"{self._public}",'
            f'"output_hash":"{DIGEST}","completed_at":"2026-02-09T12:00:05.000Z",'
            '"payment_ref":null}'
        )
        signature = base64.b64encode(self._key.sign(receipt.encode())).decode()
        return (
            f'{head}"output_hash":"{DIGEST}","receipt":{receipt},'
            f'"receipt_signature":"{signature}"}}'
        ).encode()
