"""The credentials of running calls: what they open, and when they end."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import WSMsgType

from calls.function_workers import FunctionWorker
from gateway.keys import CHAT, make_key, request
from gateway.serving import Pool, eventually
from gateway.test_calls import CallClient, caller
from shoal.domain.credentials import call_credential, lease_grant
from shoal.domain.vocabulary import CallResult, CallsReturned, RunJob
from shoal.gateway.http import access

pytestmark = pytest.mark.own_pool

JOB = "/v1/jobs/commit/fast"
TASK = {
    "job_type": "TASK",
    "user_id": "u",
    "payload": {"task_type": "add", "args": [1, 2]},
}


@pytest_asyncio.fixture
async def worker(pool: Pool) -> AsyncIterator[FunctionWorker]:
    worker = FunctionWorker(pool.hub, {"add": lambda a, b: a + b}, slots=2, holds=True)
    await pool.wait_joined()
    yield worker
    worker.drop()


@pytest_asyncio.fixture
async def alice(pool: Pool) -> AsyncIterator[CallClient]:
    key = await make_key(pool, priority_max="normal", requests_per_minute=6)
    async with caller(pool, key) as client:
        yield client


async def credential_of(worker: FunctionWorker, calls: int = 1) -> str:
    """Return the credential of the call that the worker was given last."""
    await eventually(lambda: len(worker.calls) + len(worker.runs) == calls)
    run = worker.received(RunJob)[-1]
    assert "sk-shoal" not in repr(run)
    return call_credential(run.grant, worker.calls[-1][2].number if worker.calls else 0)


async def status(pool: Pool, credential: str, path: str = "/v1/models") -> int:
    return (await request(pool, "GET", path, key=credential))[0]


@pytest.mark.parametrize("how", [{"kept": True}, {"kept": False}, {"progress": True}])
async def test_it_is_its_callers_and_ends_with_the_call(
    pool: Pool, worker: FunctionWorker, alice: CallClient, how: dict[str, bool]
) -> None:
    await alice.call(1, "add", 2, 3, **how)
    credential = await credential_of(worker)

    assert await status(pool, credential) == 200
    code, answer = await request(pool, "POST", JOB, TASK, credential)
    assert code == 201
    job = f"/v1/jobs/{answer['job_id']}"
    assert await status(pool, credential, job) == 200
    _, shown = await request(pool, "GET", f"/admin{job.removeprefix('/v1')}")
    assert (shown["owner"], shown["priority"]) == ("alice", "normal")
    assert (await request(pool, "DELETE", job, key=credential))[0] == 200
    async with caller(pool, credential) as own:
        await own.call(1, "add", 1, 1, priority="high", kept=False)
        await eventually(lambda: len(worker.calls) + len(worker.runs) == 2)

        if worker.runs:
            worker.finish(value=5)
        else:
            job_id, lease, (number, *_) = worker.calls[0]
            result = CallResult(number, b"\5")
            worker.port.on_event(CallsReturned(job_id, lease, [result]))
        assert await alice.value(1) == 5

        await own.ask([2, 1])
        assert (await own.socket.receive()).type is WSMsgType.CLOSE
    assert await status(pool, credential) == 401


async def test_it_reads_the_newest_jobs_that_it_submitted(
    pool: Pool,
    worker: FunctionWorker,
    alice: CallClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "SUBMITTED_MAX", 2)
    await alice.call(1, "add", 2, 3)
    credential = await credential_of(worker)

    jobs = []
    for _ in range(3):
        _, answer = await request(pool, "POST", JOB, TASK, credential)
        jobs.append(f"/v1/jobs/{answer['job_id']}")

    assert [await status(pool, credential, each) for each in jobs] == [404, 200, 200]


async def test_quota_is_that_of_the_caller(
    pool: Pool, worker: FunctionWorker, alice: CallClient
) -> None:
    await alice.call(1, "add", 2, 3)
    credential = await credential_of(worker)

    codes = [(await request(pool, "POST", JOB, TASK, credential))[0] for _ in range(6)]

    assert codes == [201] * 5 + [429]


async def test_it_opens_nothing_else(
    pool: Pool, worker: FunctionWorker, alice: CallClient
) -> None:
    async with caller(pool) as other:
        await other.call(1, "add", 2, 3, progress=True)  # the operator's: scope admin
        credential = await credential_of(worker)
        _, before = await request(pool, "POST", JOB, TASK)

        for path in ("/v1/jobs", "/admin/jobs", "/admin/keys", "/v1/files", "/metrics"):
            assert await status(pool, credential, path) == 403
        assert await status(pool, credential, f"/v1/jobs/{before['job_id']}") == 404
        body = {"name": "eve"}
        code, _ = await request(pool, "POST", "/admin/keys", body, credential)
        assert code == 403
        _, listed = await request(pool, "GET", "/admin/keys")
        assert credential[:20] not in str(listed)


async def test_stranger_guesses_in_vain(
    pool: Pool, worker: FunctionWorker, alice: CallClient
) -> None:
    await alice.call(1, "add", 2, 3, progress=True)
    right = await credential_of(worker)
    run = worker.received(RunJob)[-1]
    guesses = [
        run.grant,
        right[:-1] + ("0" if right[-1] != "0" else "1"),
        call_credential(lease_grant(b"", run.job_id, run.lease), 0),
        call_credential(run.grant, 1),  # it is no call of that lease
        right.replace(f".{run.lease}.", f".{run.lease + 1}."),
    ]

    assert [await status(pool, each) for each in guesses] == [401] * len(guesses)
    assert await status(pool, right) == 200


@pytest.mark.parametrize("how", [{"kept": True}, {"progress": True}])
async def test_second_attempt_has_another(
    pool: Pool, worker: FunctionWorker, alice: CallClient, how: dict[str, bool]
) -> None:
    await alice.call(1, "add", 2, 3, **how)
    first = await credential_of(worker)
    second_worker = FunctionWorker(pool.hub, {"add": min}, "w2", holds=True)
    await pool.wait_joined(2)
    worker.drop()

    second = await credential_of(second_worker)

    assert [await status(pool, each) for each in (first, second)] == [401, 200]
    await alice.ask([2, 1])
    await alice.end(1)
    assert await status(pool, second) == 401


async def test_call_of_a_revoked_key_is_refused(
    pool: Pool, worker: FunctionWorker, alice: CallClient
) -> None:
    await alice.call(1, "add", 2, 3, kept=False)
    credential = await credential_of(worker)

    await request(pool, "DELETE", "/admin/keys/alice")

    code, _ = await request(pool, "POST", "/v1/chat/completions", CHAT, credential)
    assert code == 401


async def test_calls_of_a_stream_have_one_each(
    pool: Pool, worker: FunctionWorker, alice: CallClient
) -> None:
    await alice.call(1, "add", 2, 3, kept=False)
    first = await credential_of(worker)
    (job_id, lease, made) = worker.calls.pop()
    worker.port.on_event(CallsReturned(job_id, lease, [CallResult(made.number, b"\5")]))
    assert await alice.value(1) == 5
    await alice.call(2, "add", 2, 3, kept=False)
    second = await credential_of(worker)

    assert len(worker.received(RunJob)) == 1
    assert [await status(pool, each) for each in (first, second)] == [401, 200]
