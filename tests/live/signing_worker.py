"""A worker of the Dispatch wire that shares no code with Shoal, to be killed in tests.

``python -m live.signing_worker URL SEED`` does TASKs after a moment.  It refuses a few,
answers some twice, and gives some receipts apart.
What it answered last it presents again whenever it comes back: it cannot know what was
heard.  On standard output it says what becomes of it, one JSON object a line.
"""

import argparse
import asyncio
import base64
import hashlib
import json
import sys
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from random import Random
from secrets import token_hex
from typing import Any

from aiohttp import ClientError, ClientSession, ClientWebSocketResponse, WSMsgType
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

REPLACED = 4000  # close code
HEARTBEAT = 2.0  # seconds
AWAY = (0.05, 0.2)  # seconds until it dials again, from and to
WORK = (0.0, 0.08)  # seconds that a job takes, from and to
PRESENTED_MAX = 16  # answers of late that are presented again
SHOWN_MAX = 100  # characters of the input that the output repeats

REFUSES = 0.05  # shares of the jobs
ANSWERS_TWICE = 0.05
SIGNS_APART = 0.1


def written(value: Any) -> str:
    """Write JSON as JavaScript does, for values that it writes as Python does."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def key_of(seed: str) -> Ed25519PrivateKey:
    """Return the key of the worker with this seed."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(seed.encode()).digest())


def public_hex(key: Ed25519PrivateKey) -> str:
    """Return the public key as it stands in messages."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


class SigningWorker:
    """Joins a coordinator again and again, until it is told that another has its place.

    One that is ``honest`` answers each job once, with its receipt; one that is
    ``silent`` takes jobs and never answers.
    """

    def __init__(self, url: str, seed: str, token: str, mood: str) -> None:
        self._url = url
        self._key = key_of(seed)
        self._name = public_hex(self._key)
        self._token = token
        self._mood = mood
        self._chance = Random(seed)
        self._socket: ClientWebSocketResponse | None = None
        self._answers: deque[list[str]] = deque(maxlen=PRESENTED_MAX)

    async def run(self) -> int:
        """Run until replaced or refused; return the exit status."""
        async with ClientSession() as session, asyncio.TaskGroup() as jobs:
            while True:
                with suppress(ClientError, OSError):
                    if (end := await self._serve(session, jobs)) is not None:
                        report("left", reason=end)
                        return 1
                await asyncio.sleep(self._chance.uniform(*AWAY))

    async def _serve(self, session: ClientSession, jobs: asyncio.TaskGroup) -> Any:
        """Serve one connection; return why not to reconnect, if final."""
        headers = {"Authorization": f"Bearer {self._token}"}
        async with session.ws_connect(
            self._url, headers=headers, max_msg_size=0, autoping=True
        ) as socket:
            await socket.send_str(self._registration())
            frame = await socket.receive()
            if frame.type is not WSMsgType.TEXT:
                return None  # it was killed meanwhile
            acknowledged = json.loads(frame.data)
            if acknowledged["status"] != "ok":
                return acknowledged["error"]
            report("joined", worker=acknowledged["worker_id"])
            self._socket = socket
            for each in [text for answer in self._answers for text in answer]:
                await socket.send_str(each)
            beating = jobs.create_task(self._beat(socket))
            try:
                return await self._listen(socket, jobs)
            finally:
                self._socket = None
                beating.cancel()

    def _registration(self) -> str:
        return written(
            {
                "type": "register",
                "provider_pubkey": self._name,
                "provider_type": "DESKTOP",
                "capabilities": ["TASK"],
            }
        )

    async def _beat(self, socket: ClientWebSocketResponse) -> None:
        beat = written({"type": "heartbeat", "provider_pubkey": self._name})
        with suppress(ClientError, OSError):
            while True:
                await socket.send_str(beat)
                await asyncio.sleep(HEARTBEAT)

    async def _listen(
        self, socket: ClientWebSocketResponse, jobs: asyncio.TaskGroup
    ) -> Any:
        replaced = None
        async for frame in socket:
            if frame.type is not WSMsgType.TEXT:
                continue
            message = json.loads(frame.data)
            if message["type"] == "job_assign":
                report("given", job=message["job_id"])
                if self._mood != "silent":
                    jobs.create_task(self._do(message))
            elif message["type"] == "error" and message["code"] == "REPLACED":
                replaced = message["message"]
        return replaced if socket.close_code == REPLACED else None

    async def _do(self, job: dict[str, Any]) -> None:
        await asyncio.sleep(self._chance.uniform(*WORK))
        chance = 0.5 if self._mood == "honest" else self._chance.random()
        if chance < REFUSES:
            reject = {"type": "job_reject", "job_id": job["job_id"], "reason": "busy"}
            await self._send(written(reject))
        else:
            answer = self._answer(job, apart=chance > 1 - SIGNS_APART)
            self._answers.append(answer)
            twice = chance < REFUSES + ANSWERS_TWICE
            for text in answer * 2 if twice else answer:
                await self._send(text)
                await asyncio.sleep(self._chance.uniform(*WORK))

    def _answer(self, job: dict[str, Any], *, apart: bool) -> list[str]:
        """Return the messages of an answer; no two answers are the same."""
        given = job["payload"].get("input", "")
        output = {
            "said": given[:SHOWN_MAX],
            "size": len(given),
            "by": self._name,
            "nonce": token_hex(16),
        }
        digest = hashlib.sha256(written(output).encode()).hexdigest()
        receipt = {
            "job_id": job["job_id"],
            "provider_pubkey": self._name,
            "output_hash": digest,  # as original workers write it
            "completed_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "payment_ref": None,
        }
        signature = self._sign(written(receipt).encode())
        answer: dict[str, Any] = {
            "type": "job_complete",
            "job_id": job["job_id"],
            "output": output,
            "output_hash": digest,
        }
        if apart:
            submit = {"type": "receipt_submit", "receipt": receipt}
            return [written(answer), written(submit | {"signature": signature})]
        bundled = {"receipt": receipt, "receipt_signature": signature}
        return [written(answer | bundled)]

    async def _send(self, text: str) -> None:
        if self._socket is not None:
            # What is lost with a connection is presented on the next one.
            with suppress(ClientError, OSError):
                await self._socket.send_str(text)

    def _sign(self, data: bytes) -> str:
        return base64.b64encode(self._key.sign(data)).decode()


def report(event: str, **more: Any) -> None:
    """Print an event."""
    print(written({"event": event, **more}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("seed")
    parser.add_argument("--token", default="")
    parser.add_argument(
        "--mood", default="busy", choices=("busy", "honest", "silent"), help="see above"
    )
    given = parser.parse_args()
    worker = SigningWorker(given.url, given.seed, given.token, given.mood)
    sys.exit(asyncio.run(worker.run()))
