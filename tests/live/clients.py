"""Clients of the job interface that behave well, and remember all they were told."""

import asyncio
import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

from harness.speed import scaled

TIMEOUT = ClientTimeout(total=scaled(20.0))  # seconds for one request
AGAIN = (0.05, 0.2)  # seconds until a request that came to nothing is sent again
WAIT = 5  # seconds that the coordinator is asked to wait for the end of a job
TRIES_MAX = 20  # jobs that are asked for under one key until one is done
SOON = (0.0, 0.05)  # seconds until a client wants something else, from and to
WANTS = (90, 5, 5)  # how often, of a hundred: have done, cancel, be impatient
READS_AGAIN = 0.2  # share of the jobs after which an earlier one is read again
ENDS = frozenset({"completed", "failed"})


@dataclass(slots=True)
class History:
    """What clients were told: the side of the story that the database cannot know.

    ``accepted`` has the ids that were answered with 201, by idempotency key, and
    ``done`` the job that was done for each key that was not given up.  ``ends`` and
    ``read`` have what was read of each job that had ended: how, and with which results.
    """

    accepted: dict[str, list[str]] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    ends: dict[str, set[str]] = field(default_factory=dict)
    read: dict[str, set[str]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    broken: int = 0  # requests that came to nothing


class Clients:
    """Sends requests again, under the same key, until they are answered."""

    def __init__(
        self, session: ClientSession, url: str, key: str, seed: str, history: History
    ) -> None:
        self.history = history
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self._chance = Random(seed)

    async def request(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, bytes]:
        """Return the status of an answer and what it says, however often it takes."""
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        named |= self._headers
        if body is not None:
            named["Content-Type"] = "application/json"
        data = None if body is None else json.dumps(body).encode()
        while True:
            try:
                async with self._session.request(
                    method, self._url + path, data=data, headers=named, timeout=TIMEOUT
                ) as answer:
                    body = await answer.read()
                    if answer.status < 500:
                        return answer.status, body
            except (ClientError, OSError, TimeoutError):
                pass
            self.history.broken += 1
            await asyncio.sleep(self._chance.uniform(*AGAIN))

    async def commit(self, key: str, job: object, **headers: str) -> str | None:
        """Commit a job under an idempotency key; return its id, or None if refused."""
        named = {"Idempotency_Key": key, **headers}
        status, body = await self.request("POST", "/v1/jobs/commit/cheap", job, **named)
        if status == 429:
            return None
        assert status == 201, f"{status}: {body!r}"
        job_id: str = json.loads(body)["job_id"]
        jobs = self.history.accepted.setdefault(key, [])
        if job_id not in jobs:
            jobs.append(job_id)
        return job_id

    async def ended(self, job_id: str) -> dict[str, Any]:
        """Wait for the end of a job; return how it is shown then."""
        while True:
            job = await self.shown(job_id, wait=WAIT)
            if job["status"] in ENDS:
                return job

    async def shown(self, job_id: str, wait: float = 0) -> dict[str, Any]:
        """Return how a job is shown, and remember how it ended."""
        status, body = await self.request("GET", f"/v1/jobs/{job_id}?wait={wait}")
        assert status == 200, f"{status}: {body!r}"
        job: dict[str, Any] = json.loads(body)
        if job["status"] in ENDS:
            self.history.ends.setdefault(job_id, set()).add(job["status"])
            self.history.read.setdefault(job_id, set()).add(digest_of_result(body))
        return job

    async def have_done(self, key: str, job: object) -> None:
        """Commit a job under one key until it is done, then ask for it once more."""
        for _ in range(TRIES_MAX):
            job_id = await self.commit(key, job)
            assert job_id is not None, "there is room in the queue"
            ended = await self.ended(job_id)
            if ended["status"] == "completed":
                self.history.done[key] = job_id
                assert await self.commit(key, job) == job_id
                await self.shown(job_id)
                return
        raise AssertionError(f"{key}: {TRIES_MAX} jobs, and none of them was done")

    async def cancel(self, key: str, job: object) -> None:
        """Commit a job, and soon want it no more."""
        job_id = await self.commit(key, job)
        await asyncio.sleep(self._chance.uniform(*SOON))
        status, body = await self.request("DELETE", f"/v1/jobs/{job_id}")
        assert status in (200, 409), f"{status}: {body!r}"  # 409: it had ended before
        if status == 200:
            self.history.cancelled.add(str(job_id))
        await self.ended(str(job_id))

    async def be_impatient(self, key: str, job: object) -> None:
        """Commit a job, and want it within less time than it may take."""
        job_id = await self.commit(key, job, X_Shoal_First_Output_Seconds="0.04")
        await self.ended(str(job_id))

    async def work(
        self, name: str, until: asyncio.Event, make: Callable[[str], object]
    ) -> None:
        """Commit one job after the other, until told to stop."""
        for number in itertools.count():
            if until.is_set():
                return
            key = f"{name}-{number}"
            (want,) = self._chance.choices(
                (self.have_done, self.cancel, self.be_impatient), WANTS
            )
            await want(key, make(key))
            await asyncio.sleep(self._chance.uniform(*SOON))
            if self.history.ends and self._chance.random() < READS_AGAIN:
                await self.shown(self._chance.choice(list(self.history.ends)))


def digest_of_result(body: bytes) -> str:
    """Return the hash of a result as it came; the receipt follows it."""
    result = body[body.index(b'"result":') + 9 : body.index(b',"receipt":')]
    return hashlib.sha256(result).hexdigest()
