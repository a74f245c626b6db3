"""The verdicts on receipts, before the hub decides about the results."""

from collections.abc import AsyncIterator

import pytest
from msgspec import structs
from msgspec.structs import replace

from ledger.builders import WORKER, claims, signed
from pool.builders import job, joined, pool_after
from shoal.coordinator.receipt_verifier import (
    HubMail,
    PresentedReceipt,
    ReceiptVerifier,
)
from shoal.domain.facts import JobLeased, JobSubmitted
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, JobTerms
from shoal.domain.outcome import Outcome
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.vocabulary import Completed, Failed
from shoal.domain.work import ANY_MODEL, Chat, Completion
from shoal.ledger.keys import Signer
from shoal.ledger.merkle import EMPTY_ROOT, Frontier
from shoal.ledger.notary import Notary
from shoal.ledger.worker_receipts import output_hash_of
from shoal.pool.inputs import HubInput, LeaseResult, ReceiptVerified
from shoal.pool.state import PoolState
from shoal.store.ledger import LedgerEntries, LoggedReceipt, LogHead
from shoal.store.port import Store
from store.in_memory import memory_store

J, W = JobId("j"), WorkerId("w")
ONE = LeaseNumber(1)
OUTPUT = b'{"model":"m","text":"hi"}'
HASH = output_hash_of(OUTPUT)


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with memory_store() as opened:
        yield opened


def working(given: Job, *, receipts: bool = True) -> PoolState:
    worker = joined("w", "m", given.work.model)
    offer = replace(worker.offer, public_key=WORKER.public_key.hex(), receipts=receipts)
    return pool_after(
        replace(worker, offer=replace(offer, models=frozenset({"m"}))),
        JobSubmitted(given),
        JobLeased(given.id, W, ONE, ""),
    )


def receipt(output: bytes = OUTPUT) -> SignedReceipt:
    return signed(job_id=J, output_hash=output_hash_of(output))


def result(
    given: SignedReceipt | None = None, lease: LeaseNumber = ONE, output: str = ""
) -> LeaseResult:
    return LeaseResult(
        W, Completed(J, lease, receipt=given), Outcome("hi", output=output)
    )


async def verified(store: Store, pool: PoolState, *mail: HubMail) -> list[HubInput]:
    verifier = ReceiptVerifier(pool, store, thread_above=8)
    return await verifier.verify_batch(mail)


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (receipt(), Verdict.VALID),
        (receipt(b"another"), Verdict.WRONG_OUTPUT),
        (None, Verdict.MISSING),
    ],
)
async def test_result_has_the_verdict_on_its_receipt(
    store: Store, given: SignedReceipt | None, verdict: Verdict
) -> None:
    (found,) = await verified(store, working(job()), result(given))

    assert isinstance(found, LeaseResult)
    assert (found.verdict, found.output_hash) == (verdict, HASH)


async def test_receipt_counts_only_where_the_wire_carries_any(store: Store) -> None:
    (found,) = await verified(store, working(job(), receipts=False), result(receipt()))

    assert found == structs.replace(result(), output_hash=HASH)


async def test_late_result_gets_no_receipt(store: Store) -> None:
    for late in (
        result(receipt(), lease=LeaseNumber(2)),
        structs.replace(result(receipt()), worker_id=WorkerId("v")),
        structs.replace(
            result(), event=Completed(JobId("none"), ONE, receipt=receipt())
        ),
    ):
        assert await verified(store, working(job()), late) == [late]


async def test_job_that_is_not_kept_gets_no_receipt(store: Store) -> None:
    unkept = replace(job(), terms=JobTerms(kept=False))

    assert await verified(store, working(unkept), result()) == [result()]


async def test_receipt_right_after_its_result_belongs_to_it(store: Store) -> None:
    key = WORKER.public_key.hex()
    first = PresentedReceipt(W, key, J, receipt())
    second = PresentedReceipt(W, key, J, receipt(b"another"))

    found, *others = await verified(store, working(job()), result(), first, second)

    assert isinstance(found, LeaseResult)
    assert (found.verdict, others) == (Verdict.VALID, [])


async def test_receipt_of_a_job_that_failed_counts_not(store: Store) -> None:
    failed = LeaseResult(W, Failed(J, ONE, "boom"))

    assert await verified(store, working(job()), failed, shown()) == [failed]


async def test_receipt_inside_the_result_counts_before_a_later_one(
    store: Store,
) -> None:
    later = PresentedReceipt(W, WORKER.public_key.hex(), J, receipt(b"another"))

    (found,) = await verified(store, working(job()), result(receipt()), later)

    assert isinstance(found, LeaseResult)
    assert found.verdict is Verdict.VALID


async def file(store: Store, *verdicts: Verdict) -> None:
    """Store receipts of the job with these verdicts, in this order."""
    notary = Notary(Signer.from_seed(b"s" * 32), Frontier(), 0, EMPTY_ROOT)
    said = [
        claims(
            job_id=J,
            worker=W,
            output_hash=HASH,
            verdict=each,
            worker_receipt=None if each is Verdict.MISSING else receipt(),
        )
        for each in verdicts
    ]
    sealed = notary.seal(said, 1.0)
    filed = [
        LoggedReceipt(logged.index, each, logged.body, logged.signature, 1.0)
        for each, logged in zip(said, sealed.receipts, strict=True)
    ]
    head = LogHead(sealed.checkpoint.size, sealed.checkpoint.root, sealed.note, 1.0)
    entries = LedgerEntries(receipts=filed, nodes=sealed.nodes, head=head)
    await store.append([], 1.0, (), entries)


def shown(worker: WorkerId = W, output: bytes = OUTPUT) -> PresentedReceipt:
    return PresentedReceipt(worker, WORKER.public_key.hex(), J, receipt(output))


async def test_first_receipt_after_the_answer_counts(store: Store) -> None:
    await file(store, Verdict.MISSING)

    found = await verified(store, PoolState(), shown(), shown(output=b"another"))

    assert found == [ReceiptVerified(W, J, Verdict.VALID, receipt())]
    # The hub deferred it, so that it comes again.
    again = await verified(store, PoolState(), *found, shown(output=b"another"))
    assert again == found


@pytest.mark.parametrize(
    "verdicts",
    [
        [],
        [Verdict.VALID],
        [Verdict.WRONG_OUTPUT],
        [Verdict.MISSING, Verdict.VALID],
        [Verdict.MISSING, Verdict.WRONG_OUTPUT],
    ],
)
async def test_receipt_after_another_counts_not(
    store: Store, verdicts: list[Verdict]
) -> None:
    if verdicts:
        await file(store, *verdicts)

    assert await verified(store, PoolState(), shown()) == []


@pytest.mark.parametrize("leases", [1, 2])
async def test_receipt_for_what_was_written_under_another_lease_counts_not(
    store: Store, leases: int
) -> None:
    facts = [JobLeased(J, W, LeaseNumber(1 + each), "") for each in range(leases)]
    await store.append([JobSubmitted(job()), *facts], 1.0)
    await file(store, Verdict.MISSING)

    found = await verified(store, PoolState(), shown(output=b"another"))

    wrong = ReceiptVerified(W, J, Verdict.WRONG_OUTPUT, receipt(b"another"))
    assert found == ([wrong] if leases == 1 else [])


async def test_receipt_of_another_worker_counts_not(store: Store) -> None:
    await file(store, Verdict.MISSING)

    assert await verified(store, PoolState(), shown(WorkerId("v"))) == []


async def test_output_names_the_model_that_the_client_left_open(store: Store) -> None:
    anything = replace(job(), work=Chat(ANY_MODEL, ()))

    (found,) = await verified(store, working(anything), result(receipt()))
    (own,) = await verified(store, working(anything), result(output="{}"))

    assert isinstance(found, LeaseResult)
    assert isinstance(own, LeaseResult)
    assert (found.outcome.output.encode(), found.verdict) == (OUTPUT, Verdict.VALID)
    assert own.outcome.output == "{}"


@pytest.mark.parametrize(
    "work", [Chat("m", ()), Completion("m", "hi"), Completion(ANY_MODEL, "hi")]
)
async def test_output_of_other_work_is_left_as_it_is(
    store: Store, work: Chat | Completion
) -> None:
    (found,) = await verified(store, working(replace(job(), work=work)), result())

    assert isinstance(found, LeaseResult)
    assert found.outcome.output == ""
