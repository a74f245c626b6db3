"""Private jobs are hidden in every response, log and file."""

import logging
from pathlib import Path

import pytest

from gateway.keys import make_key, request
from gateway.providers import call, provider
from gateway.serving import Pool, eventually, serving
from gateway.shoal_worker import ONE_TASK, shoal_worker
from protocols.dispatch.recorded import SIGNERS
from shoal.domain.work import Task
from shoal.pool.inputs import WorkerPaired
from shoal.protocols.dispatch import Config

PROMPT = "prompt-of-a-private-job"
ANSWER = "answer-to-a-private-job"
SECRET = "secret-that-signs-webhooks"
USER = "user-of-a-private-job"
A = SIGNERS["A"].public_key.hex()

ELSEWHERE = (
    "/admin/jobs",
    "/admin/workers",
    "/admin/accounts",
    "/v1/jobs",
    "/v1/receipts",
    "/v1/log",
    "/v1/jobs/{id}",
    "/v1/jobs/{id}/events",
    "/v1/receipts/{id}",
    "/admin/jobs/{id}",
    "/admin/jobs/{id}/explain",
    "/metrics",
)


async def test_private_job_is_visible_only_to_worker_and_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wires = {"dispatch": Config(open=True)}
    async with serving(tmp_path, wires=wires) as pool:
        mallory = await make_key(pool, "mallory")
        await pool.hub.process(WorkerPaired("default", USER, A))
        async with (
            provider(pool, SIGNERS["A"]) as impostor,  # names the key, no more
            shoal_worker(pool, ONE_TASK, name="n2", signer=SIGNERS["B"]) as other,
            shoal_worker(pool, ONE_TASK, signer=SIGNERS["A"]) as trusted,
        ):
            await pool.wait_joined(3)
            job_id = await private_job(pool)
            work = (await trusted.job()).work
            assert work == Task("classify", {"task_type": "classify", "input": PROMPT})
            await trusted.answer(f'{{"answer":"{ANSWER}"}}')

            found = [await seen(pool, path, job_id, mallory) for path in ELSEWHERE]
            mine = await seen(pool, "/v1/jobs/{id}", job_id)
            explained = await seen(pool, "/admin/jobs/{id}/explain", job_id)
            assert (impostor.jobs, other.jobs) == ([], [])

    assert ANSWER in mine
    for text in [*found, caplog.text]:
        assert not any(word in text for word in (PROMPT, ANSWER, SECRET))
    assert not any(USER in text for text in found)
    assert not any(word in explained for word in (PROMPT, ANSWER, SECRET))
    assert SECRET not in mine


async def test_anonymous_clients_see_no_jobs_of_keys(
    tmp_path: Path,
) -> None:
    wires = {"dispatch": Config(open=True)}
    async with serving(tmp_path, wires=wires) as pool:
        await pool.hub.process(WorkerPaired("default", USER, A))
        async with shoal_worker(pool, ONE_TASK, signer=SIGNERS["A"]):
            await pool.wait_joined()
            job_id = await private_job(pool)

            for method in ("GET", "DELETE"):
                status, answer = await call(pool, method, f"/v1/jobs/{job_id}")
                assert (status, answer) == (404, {"error": "Job not found"})
            assert await call(pool, "GET", "/v1/jobs") == (
                200,
                {"jobs": [], "next": None},
            )
            await eventually(lambda: job_id in pool.hub.pool.jobs)


async def private_job(pool: Pool) -> str:
    """Commit a private job with a webhook; return its id."""
    body = {
        "job_type": "TASK",
        "user_id": USER,
        "privacy_class": "PRIVATE",
        "payload": {"task_type": "classify", "input": PROMPT},
        "webhook": {"url": "https://hooks.example/x", "secret": SECRET},
    }
    status, answer = await request(pool, "POST", "/v1/jobs/commit/fast", body)
    assert status == 201, answer
    return str(answer["job_id"])


async def seen(pool: Pool, path: str, job_id: str, key: str = "") -> str:
    """Return everything that a path shows to any key."""
    headers = pool.headers(key) if key else pool.headers()
    url = pool.url + path.format(id=job_id)
    async with pool.session.get(url, headers=headers) as response:
        return await response.text()
