"""Scripted workers of the Dispatch wire, and clients without a key."""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from aiohttp import ClientWebSocketResponse, WSMsgType

from gateway.serving import Pool, eventually
from protocols.dispatch.recorded import SIGNERS
from shoal.domain.ids import JobId
from shoal.ledger.keys import Signer
from shoal.pool.inputs import Cancellation

BARRIER = "Unknown type: barrier"
TASK = {"job_type": "TASK", "task_type": "classify", "input": "great"}
COMMIT: dict[str, Any] = {"job_type": "TASK", "user_id": "u1", "payload": TASK}


@dataclass(slots=True)
class Provider:
    """A scripted worker."""

    pool: Pool
    socket: ClientWebSocketResponse
    texts: list[str] = field(default_factory=list)
    closed: int | None = None
    _barriers: int = 0

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """The received jobs."""
        messages = map(json.loads, self.texts)
        return [each for each in messages if each["type"] == "job_assign"]

    async def read(self) -> None:
        """Collect texts until the connection ends."""
        while True:
            message = await self.socket.receive()
            match message.type:
                case WSMsgType.TEXT if BARRIER in message.data:
                    self._barriers += 1
                case WSMsgType.TEXT:
                    self.texts.append(message.data)
                case WSMsgType.CLOSE:
                    self.closed = message.data
                    return
                case _:
                    self.closed = self.closed or 1006
                    return

    async def send(self, text: str | bytes) -> None:
        """Send a message, and wait until the coordinator has handled it."""
        passed = self._barriers
        with suppress(ConnectionError):  # data for a closed connection is lost
            if isinstance(text, bytes):
                await self.socket.send_bytes(text)
            else:
                await self.socket.send_str(text)
            await self.socket.send_str('{"type":"barrier"}')
        await eventually(lambda: self._barriers > passed or self.closed is not None)
        await settle(self.pool)

    async def job(self, number: int = 0) -> dict[str, Any]:
        """Wait for a job, by default the first."""
        await eventually(lambda: len(self.jobs) > number)
        return self.jobs[number]

    async def complete(
        self, job_id: str, output: Any, signer: Signer = SIGNERS["A"]
    ) -> None:
        """Complete a job, with a receipt."""
        await self.send(completion(job_id, output, signer))


def to_json(value: Any) -> str:
    """Encode JSON as JavaScript does, for values that need no special case."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def receipt_of(job_id: str, output: Any, signer: Signer) -> tuple[dict[str, Any], str]:
    """Return a worker's receipt and its signature."""
    receipt = {
        "job_id": job_id,
        "provider_pubkey": signer.public_key.hex(),
        "output_hash": hashlib.sha256(to_json(output).encode()).hexdigest(),
        "completed_at": "2026-02-09T12:00:05.000Z",
        "payment_ref": None,
    }
    return receipt, signed(receipt, signer)


def signed(receipt: dict[str, Any], signer: Signer) -> str:
    return base64.b64encode(signer.sign(to_json(receipt).encode())).decode()


def completion(job_id: str, output: Any, signer: Signer) -> str:
    """Return the message that answers a job."""
    receipt, signature = receipt_of(job_id, output, signer)
    return to_json(
        {
            "type": "job_complete",
            "job_id": job_id,
            "output": output,
            "output_hash": receipt["output_hash"],
            "receipt": receipt,
            "receipt_signature": signature,
        }
    )


@asynccontextmanager
async def connect(
    pool: Pool, path: str = "/", headers: dict[str, str] | None = None
) -> AsyncIterator[Provider]:
    """Open a connection that sends nothing, within the block."""
    socket = await pool.session.ws_connect(
        pool.url + path, max_msg_size=0, headers=headers
    )
    provider = Provider(pool, socket)
    reading = asyncio.create_task(provider.read())
    try:
        yield provider
    finally:
        await socket.close()
        await reading


@asynccontextmanager
async def provider(
    pool: Pool, signer: Signer = SIGNERS["A"], *, price: str = ""
) -> AsyncIterator[Provider]:
    """Join as a worker; ``price`` is what it asks for."""
    async with connect(pool) as each:
        register: dict[str, Any] = {
            "type": "register",
            "provider_pubkey": signer.public_key.hex(),
            "provider_type": "DESKTOP",
            "capabilities": ["LLM_INFER", "TASK"],
        }
        if price:
            register["pricing_hint"] = price
        await each.send(to_json(register))
        assert json.loads(each.texts[0])["status"] == "ok", each.texts
        yield each


async def settle(pool: Pool) -> None:
    """Wait until the hub has processed all earlier inputs."""
    await pool.hub.process(Cancellation(JobId("nobody's"), ""))


async def call(
    pool: Pool, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    """Send a request without a key; return the status and the JSON of the answer."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        sent |= {"Content-Type": "application/json"}
    async with pool.session.request(
        method,
        pool.url + path,
        data=None if body is None else BytesIO(to_json(body).encode()),
        headers=sent,
    ) as response:
        text = await response.text()
        return response.status, json.loads(text) if text else None


async def committed(pool: Pool, tier: str = "cheap", **fields: Any) -> str:
    """Commit a job; return its id."""
    status, answer = await call(
        pool, "POST", f"/v1/jobs/commit/{tier}", COMMIT | fields
    )
    assert status == 201, answer
    assert answer.keys() == {"job_id"}
    return str(answer["job_id"])


async def shown(pool: Pool, job_id: str, wait: float = 0) -> Any:
    """Fetch a job."""
    status, answer = await call(pool, "GET", f"/v1/jobs/{job_id}?wait={wait}")
    assert status == 200, answer
    return answer
