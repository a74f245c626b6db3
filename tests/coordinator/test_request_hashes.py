"""Receipts name the request that was answered, whatever becomes of the coordinator."""

import asyncio

import pytest
from msgspec.structs import replace

from coordinator.hubs import (
    Client,
    Coordinator,
    SlowStore,
    run_pending,
    run_script,
    running_coordinator,
)
from protocols.contexts import SIGNER
from shoal.domain.errors import QueueFull
from shoal.domain.ids import JobId
from shoal.domain.job import JobTerms
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.vocabulary import ReceiptSent
from shoal.domain.work import JobKind, Work
from shoal.ledger.keys import Signer
from shoal.ledger.receipts import Claims
from shoal.ledger.requests import request_hash_of, request_of, request_salt
from shoal.store.codec import LARGE_FROM
from simulation.virtual import in_virtual_time, scripted

LARGE = "word " * (LARGE_FROM // 5 + 1)
WORKER = Signer.from_seed(b"w" * 32)


def expected(job_id: JobId, work: Work) -> str:
    return request_hash_of(request_salt(SIGNER, job_id), request_of(work))


def hashed(coordinator: Coordinator) -> set[JobId]:
    """Return the open jobs whose request was hashed when they were submitted."""
    return {*coordinator.hub._bookkeeper._request_hashes}


async def claims_of(coordinator: Coordinator, job_id: JobId) -> list[Claims]:
    return [each.claims for each in await coordinator.store.ledger.receipts_of(job_id)]


@pytest.mark.parametrize(
    "kind", [each for each in JobKind if each is not JobKind.CALL_STREAM]
)
def test_receipt_names_the_request(kind: JobKind) -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join("worker", kinds=frozenset({kind}))
        job = coordinator.job(kind=kind, terms=JobTerms(price=1))
        Client(coordinator.hub, job)
        await run_pending()
        worker.complete()
        await run_pending()

        (claims,) = await claims_of(coordinator, job.id)
        assert claims.request_hash == expected(job.id, job.work)

    run_script(script)


@scripted(run_script)
async def test_large_request_is_hashed_before_it_is_submitted(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join(slots=2)
    small = await coordinator.request()
    job = coordinator.job(prompt=LARGE)
    client = Client(coordinator.hub, job)
    await asyncio.sleep(1.0)
    assert client.accepted
    assert hashed(coordinator) == {job.id}

    for run in range(2):
        worker.complete(run)
    await run_pending()

    assert not hashed(coordinator)
    (claims,) = await claims_of(coordinator, job.id)
    assert claims.request_hash == expected(job.id, job.work)
    assert small.outcome is not None


@in_virtual_time
async def test_large_request_is_hashed_again_after_a_restart() -> None:
    store = SlowStore()
    await store.open()
    async with running_coordinator(store) as coordinator:
        await coordinator.join(name="first")
        job = coordinator.job(prompt=LARGE, terms=JobTerms(detached=True))
        Client(coordinator.hub, job)
        await asyncio.sleep(1.0)
        assert hashed(coordinator) == {job.id}
    async with running_coordinator(store) as coordinator:
        worker = await coordinator.join()
        await asyncio.sleep(1.0)
        assert not hashed(coordinator)
        worker.complete()
        await run_pending()

        (claims,) = await claims_of(coordinator, job.id)
        assert claims.request_hash == expected(job.id, job.work)
    await store.close()


@scripted(run_script)
async def test_hash_of_a_job_that_ends_otherwise_is_forgotten(
    coordinator: Coordinator,
) -> None:
    await coordinator.join()
    client = Client(coordinator.hub, coordinator.job(prompt=LARGE))
    await asyncio.sleep(1.0)
    assert hashed(coordinator) == {client.job_id}

    await client.disconnect()

    assert not hashed(coordinator)


def test_hash_of_a_job_that_is_refused_is_forgotten() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()
        await coordinator.request()  # keeps the worker busy

        jobs = [coordinator.job(prompt=LARGE) for _ in range(2)]
        clients = [Client(coordinator.hub, job) for job in jobs]
        await asyncio.sleep(1.0)

        (error,) = (client.error for client in clients if client.error is not None)
        assert isinstance(error, QueueFull)
        (accepted,) = (client.job_id for client in clients if client.accepted)
        assert hashed(coordinator) == {accepted}

    run_script(script, queue_max=1)


@scripted(run_script)
async def test_hash_of_a_repeated_request_is_forgotten(
    coordinator: Coordinator,
) -> None:
    await coordinator.join()

    jobs = [coordinator.job(prompt=LARGE, key="k") for _ in range(3)]
    clients = [Client(coordinator.hub, job) for job in jobs]
    await asyncio.sleep(1.0)

    (job_id,) = {client.job_id for client in clients}
    assert hashed(coordinator) == {job_id}


@scripted(run_script)
async def test_job_without_a_receipt_is_not_hashed(coordinator: Coordinator) -> None:
    bookkeeper = coordinator.hub._bookkeeper
    job = coordinator.job(prompt=LARGE)

    await bookkeeper.prepare(replace(job, terms=JobTerms(kept=False)))
    assert not hashed(coordinator)
    await bookkeeper.prepare(job)
    assert hashed(coordinator) == {job.id}


@scripted(run_script)
async def test_later_receipt_names_the_same_request(coordinator: Coordinator) -> None:
    key = WORKER.public_key.hex()
    worker = await coordinator.join(public_key=key)
    job = coordinator.job(terms=JobTerms(price=5))
    Client(coordinator.hub, job)
    await run_pending()
    worker.complete()
    await run_pending()

    worker.emit(ReceiptSent(job.id, SignedReceipt(b"{}", b"")))
    await run_pending()

    first, second = await claims_of(coordinator, job.id)
    assert (first.verdict, second.verdict) == (Verdict.MISSING, Verdict.MALFORMED)
    assert first.request_hash == second.request_hash == expected(job.id, job.work)
