"""Clients of the job interface that behave well, and remember all they were told."""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

TIMEOUT = ClientTimeout(total=20.0)  # seconds for one request
AGAIN = (0.05, 0.2)  # seconds until a request that came to nothing is sent again
WAIT = 5  # seconds that the coordinator is asked to wait for the end of a job
TRIES_MAX = 20  # jobs that are asked for under one key until one is done
STEADY = frozenset({200, 201, 402, 422, 429})
"""Statuses that say something final, and not that somebody has just been killed."""


@dataclass(slots=True)
class History:
    """What clients were told: the side of the story that the database cannot know.

    ``accepted`` has the ids that were answered with 201, by idempotency key; ``done``
    the job that was done for each key; ``read`` the different results that were read of
    each job, and ``failed`` how jobs ended that were not done.
    """

    accepted: dict[str, list[str]] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    read: dict[str, set[str]] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    broken: int = 0  # requests that came to nothing
    readings: int = 0

    @property
    def jobs(self) -> set[str]:
        """All jobs that were accepted."""
        return {job_id for ids in self.accepted.values() for job_id in ids}


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
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        data: bytes = b"",
        **headers: str,
    ) -> tuple[int, bytes]:
        """Return the status of an answer and what it says, however often it takes."""
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        named |= self._headers
        if body is not None:
            data, named["Content-Type"] = json.dumps(body).encode(), "application/json"
        while True:
            try:
                async with self._session.request(
                    method,
                    self._url + path,
                    data=data or None,
                    headers=named,
                    timeout=TIMEOUT,
                ) as answer:
                    said = await answer.read()
                    if answer.status < 500:
                        return answer.status, said
            except (ClientError, OSError, TimeoutError):
                pass
            self.history.broken += 1
            await asyncio.sleep(self._chance.uniform(*AGAIN))

    async def commit(self, key: str, job: dict[str, Any], tier: str = "cheap") -> Any:
        """Commit a job under an idempotency key; return its id, or None if refused."""
        path = f"/v1/jobs/commit/{tier}"
        status, said = await self.request("POST", path, job, Idempotency_Key=key)
        if status == 429:
            return None
        assert status == 201, f"{status}: {said!r}"
        job_id: str = json.loads(said)["job_id"]
        known = self.history.accepted.setdefault(key, [])
        if job_id not in known:
            known.append(job_id)
        return job_id

    async def ended(self, job_id: str) -> dict[str, Any]:
        """Wait for the end of a job; return how it is shown then."""
        while True:
            job = await self.shown(job_id, wait=WAIT)
            if job["status"] in ("completed", "failed"):
                return job

    async def shown(self, job_id: str, wait: float = 0) -> dict[str, Any]:
        """Return how a job is shown, and remember the result that is read."""
        status, said = await self.request("GET", f"/v1/jobs/{job_id}?wait={wait}")
        assert status == 200, f"{status}: {said!r}"
        job: dict[str, Any] = json.loads(said)
        if job["status"] == "completed":
            self.history.readings += 1
            # As it came: the result is followed by the receipt.
            result = said[said.index(b'"result":') + 9 : said.index(b',"receipt":')]
            digest = hashlib.sha256(result).hexdigest()
            self.history.read.setdefault(job_id, set()).add(digest)
        return job

    async def have_done(self, key: str, job: dict[str, Any]) -> None:
        """Commit a job under one key until it is done, then ask for it once more."""
        for _ in range(TRIES_MAX):
            job_id = await self.commit(key, job)
            if job_id is None:  # the queue is full
                await asyncio.sleep(self._chance.uniform(*AGAIN))
                continue
            ended = await self.ended(job_id)
            if ended["status"] == "completed":
                self.history.done[key] = job_id
                assert await self.commit(key, job) == job_id
                await self.shown(job_id)
                return
            self.history.failed[str(ended["result"]["error"])] += 1
        raise AssertionError(f"{key}: {TRIES_MAX} jobs, and none of them was done")

    async def work(
        self, name: str, until: asyncio.Event, make: Callable[[str], dict[str, Any]]
    ) -> None:
        """Have one job after the other done, until told to stop."""
        number = 0
        while not until.is_set():
            key = f"{name}-{number}"
            await self.have_done(key, make(key))
            number += 1
            await asyncio.sleep(self._chance.uniform(0, 0.05))
            if self.history.done and self._chance.random() < 0.2:
                earlier = self._chance.choice(list(self.history.done.values()))
                await self.shown(earlier)
