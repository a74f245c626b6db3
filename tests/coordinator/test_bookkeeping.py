"""Prices of jobs, and their receipts."""

import asyncio
import json

import pytest
from msgspec.structs import replace

from coordinator.hubs import (
    Client,
    Coordinator,
    ScriptedWorker,
    SlowStore,
    run_pending,
    run_script,
    running_coordinator,
)
from protocols.contexts import SIGNER
from shoal.domain.errors import InsufficientFunds, JobError
from shoal.domain.facts import (
    JobCompleted,
    LateResult,
    ReceiptPresented,
    WorkerMarked,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import JobTerms, Privacy
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.vocabulary import Completed, Failed, ReceiptSent
from shoal.domain.work import JobKind
from shoal.ledger import bundle, checkpoint
from shoal.ledger.bundle import ReceiptBundle
from shoal.ledger.keys import Signer, verify
from shoal.ledger.merkle import inclusion_path, nodes_for_inclusion
from shoal.ledger.receipts import PREFIX
from shoal.ledger.worker_receipts import output_hash_of
from shoal.pool.inputs import AccountTopUp, BudgetSet, WorkerPaired
from shoal.store.ledger import LoggedReceipt
from simulation.virtual import in_virtual_time

WORKER = Signer.from_seed(b"w" * 32)
OTHER = Signer.from_seed(b"o" * 32)
OUTPUT = '{"text":"hi","model":"m"}'
PRICED = JobTerms(price=10_000)
FEE = 500  # basis points: five percent

W = WorkerId("wire:w")
WORKER_ACCOUNT = f"worker:{WORKER.public_key.hex()}"


def receipt(
    job_id: JobId,
    output: str = OUTPUT,
    signer: Signer = WORKER,
    key: Signer = WORKER,
    prefix: str = "",
) -> SignedReceipt:
    claims = {
        "job_id": job_id,
        "provider_pubkey": key.public_key.hex(),
        "output_hash": prefix + output_hash_of(output.encode()).removeprefix("sha256:"),
        "completed_at": "2026-02-09T12:00:05.000Z",
        "payment_ref": None,
    }
    body = json.dumps(claims, separators=(",", ":")).encode()
    return SignedReceipt(body, signer.sign(body))


async def signing(coordinator: Coordinator) -> ScriptedWorker:
    return await coordinator.join("w", public_key=WORKER.public_key.hex())


async def only_receipt(coordinator: Coordinator, job_id: JobId) -> LoggedReceipt:
    (filed,) = await coordinator.store.ledger.receipts_of(job_id)
    return filed


@in_virtual_time
async def test_price_is_reserved_and_paid_on_completion() -> None:
    async with running_coordinator(fee=FEE) as coordinator:
        worker = await coordinator.join()
        client = await coordinator.request(
            owner="al", terms=replace(PRICED, user="u 1")
        )
        books = coordinator.hub.books

        assert books.balance("user:al/u%201") == -10_000
        assert books.balance("pool:held") == 10_000

        worker.write("hi")
        worker.complete()
        await run_pending()

        assert client.outcome is not None
        assert books.balance("worker:wire:w") == 9_500
        assert books.balance("pool:fees") == 500
        assert books.balance("pool:held") == 0
        assert books.total() == 0


@pytest.mark.parametrize("how", ["failed", "cancelled"])
@in_virtual_time
async def test_unsuccessful_job_costs_nothing(how: str) -> None:
    async with running_coordinator() as coordinator:
        worker = await coordinator.join()
        client = await coordinator.request(owner="al", terms=PRICED)
        if how == "failed":
            run = worker.runs[-1]
            worker.emit(Failed(run.job_id, run.lease, "out of memory"))
        else:
            await client.disconnect()
        await run_pending()

        assert coordinator.hub.books.balance("user:al") == 0
        assert coordinator.hub.books.balance("pool:held") == 0
        assert await coordinator.store.ledger.receipts_of(worker.runs[-1].job_id) == []


@pytest.mark.parametrize("prefix", ["", "sha256:"])
@in_virtual_time
async def test_worker_receipt_is_verified_paid_and_countersigned(
    prefix: str,
) -> None:
    async with running_coordinator() as coordinator:
        worker = await signing(coordinator)
        client = await coordinator.request(owner="al", terms=PRICED)
        signed = receipt(client.job_id, prefix=prefix)
        worker.answer(OUTPUT, signed)
        await run_pending()

        filed = await only_receipt(coordinator, client.job_id)
        assert filed.claims.verdict is Verdict.VALID
        assert filed.claims.worker_receipt == signed
        assert filed.claims.output_hash == output_hash_of(OUTPUT.encode())
        assert verify(SIGNER.public_key, filed.signature, PREFIX + filed.body)
        assert coordinator.hub.books.balance(WORKER_ACCOUNT) == 10_000
        assert client.outcome is not None
        assert client.outcome.output == OUTPUT


BAD: dict[str, tuple[SignedReceipt, Verdict]] = {
    "another job": (receipt(JobId("other")), Verdict.WRONG_JOB),
    "another key": (receipt(JobId("job1"), key=OTHER), Verdict.WRONG_WORKER),
    "another output": (receipt(JobId("job1"), "{}"), Verdict.WRONG_OUTPUT),
    "another signer": (receipt(JobId("job1"), signer=OTHER), Verdict.BAD_SIGNATURE),
    "no receipt at all": (SignedReceipt(b"", b""), Verdict.MALFORMED),
}


@pytest.mark.parametrize("name", BAD)
@in_virtual_time
async def test_invalid_receipt_is_recorded_unpaid_and_marks_the_worker(
    name: str,
) -> None:
    signed, verdict = BAD[name]
    async with running_coordinator() as coordinator:
        worker = await signing(coordinator)
        client = await coordinator.request(owner="al", terms=PRICED)
        worker.answer(OUTPUT, signed)
        await run_pending()

        assert client.outcome is not None  # the job still succeeds
        filed = await only_receipt(coordinator, client.job_id)
        assert filed.claims.verdict is verdict
        assert filed.claims.price == 0
        assert coordinator.hub.books.balance("user:al") == 0
        assert coordinator.hub.books.balance(WORKER_ACCOUNT) == 0
        (mark,) = await coordinator.store.penalties_since(0.0)
        assert isinstance(mark.fact, WorkerMarked)
        assert mark.fact.about == client.job_id


@in_virtual_time
async def test_worker_with_invalid_receipts_gets_no_more_work() -> None:
    async with running_coordinator() as coordinator:
        worker = await signing(coordinator)
        for number in range(1, 4):
            await coordinator.request()
            worker.answer(OUTPUT, receipt(JobId(f"job{number}"), "{}"))
            await run_pending()
        await coordinator.request()

        assert len(worker.runs) == 3


@in_virtual_time
async def test_marks_survive_a_restart(store: SlowStore) -> None:
    async with running_coordinator(store) as coordinator:
        worker = await signing(coordinator)
        for number in range(1, 4):
            await coordinator.request()
            worker.answer(OUTPUT, receipt(JobId(f"job{number}"), "{}"))
            await run_pending()
    async with running_coordinator(store) as coordinator:
        worker = await signing(coordinator)
        await coordinator.request()

        assert worker.runs == []


@in_virtual_time
async def test_late_receipt_is_paid() -> None:
    async with running_coordinator(fee=FEE) as coordinator:
        worker = await signing(coordinator)
        client = await coordinator.request(terms=PRICED)
        worker.answer(OUTPUT)
        await run_pending()
        books = coordinator.hub.books

        assert (await only_receipt(coordinator, client.job_id)).claims.verdict is (
            Verdict.MISSING
        )
        assert books.balance("pool:unproven") == 10_000

        worker.emit(ReceiptSent(client.job_id, receipt(client.job_id)))
        worker.emit(ReceiptSent(client.job_id, receipt(client.job_id)))
        await run_pending()

        assert books.balance("pool:unproven") == 0
        assert books.balance(WORKER_ACCOUNT) == 9_500
        _, later = await coordinator.store.ledger.receipts_of(client.job_id)
        assert later.claims.verdict is Verdict.VALID
        presented = ReceiptPresented(client.job_id, W, Verdict.VALID)
        assert (await coordinator.history(client.job_id))[-1] == presented


@in_virtual_time
async def test_usage_has_the_node_and_what_was_not_given_back() -> None:
    async with running_coordinator(fee=FEE) as coordinator:
        worker = await signing(coordinator)
        client = await coordinator.request(owner="al", terms=PRICED)
        worker.answer(OUTPUT)
        await run_pending()
        usage = coordinator.store.usage

        (used,) = (await usage.sums(0, 99_999, ["key", "model", "node"], 9)).sums
        assert (used.key, used.model, used.node) == ("al", "m", W)
        assert (used.requests, used.cost) == (1, 10_000)

        # An invalid receipt: the price that was withheld goes back.
        worker.emit(ReceiptSent(client.job_id, receipt(client.job_id, "{}")))
        await run_pending()

        (used,) = (await usage.sums(0, 99_999, ["key", "model", "node"], 9)).sums
        assert (used.requests, used.cost) == (1, 0)


@in_virtual_time
async def test_usage_has_the_cost_of_calls_that_was_not_given_back() -> None:
    async with running_coordinator(fee=FEE) as coordinator:
        kinds = frozenset({JobKind.CALL})
        key = WORKER.public_key.hex()
        worker = await coordinator.join("w", kinds=kinds, public_key=key)
        for _ in range(2):
            await coordinator.request(owner="al", kind=JobKind.CALL, terms=PRICED)
            run = worker.runs[-1]
            worker.emit(Completed(run.job_id, run.lease, value=b"\xc0"))
            await run_pending()
        usage = coordinator.store.usage

        (used,) = (await usage.sums(0, 99_999, ["key", "model", "node"], 9)).sums
        assert (used.key, used.model, used.node) == ("al", "", "")
        assert (used.requests, used.cost) == (2, 20_000)

        worker.emit(ReceiptSent(run.job_id, receipt(run.job_id, "{}")))
        await run_pending()

        (used,) = (await usage.sums(0, 99_999, ["key", "model", "node"], 9)).sums
        assert (used.model, used.requests, used.cost) == ("", 2, 10_000)


@pytest.mark.parametrize("proven", [True, False])
@in_virtual_time
async def test_no_receipt_is_due_on_a_wire_without_receipts(proven: bool) -> None:
    async with running_coordinator() as coordinator:
        worker = await coordinator.join(
            "w", public_key=WORKER.public_key.hex(), proven=proven
        )
        (known,) = coordinator.hub.pool.workers.values()
        known.offer = replace(known.offer, receipts=False)
        client = await coordinator.request(terms=PRICED)
        worker.answer(OUTPUT)
        await run_pending()
        books = coordinator.hub.books

        claims = (await only_receipt(coordinator, client.job_id)).claims
        assert claims.verdict is Verdict.UNSIGNED
        payee = WORKER_ACCOUNT if proven else f"worker:{W}"
        assert books.balance(payee) == 10_000


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_receipt_covers_the_first_of_two_answers(
    order: tuple[int, int],
) -> None:
    signers = (WORKER, OTHER)
    outputs = (OUTPUT, '{"text":"hi","model":"other"}')

    async def script(coordinator: Coordinator) -> None:
        workers = [
            await coordinator.join(str(number), public_key=signer.public_key.hex())
            for number, signer in enumerate(signers)
        ]
        client = await coordinator.request(terms=PRICED)
        await asyncio.sleep(6.0)
        for which in order:
            signer = signers[which]
            signed = receipt(client.job_id, outputs[which], signer, signer)
            workers[which].answer(outputs[which], signed)
        await run_pending()

        filed = await only_receipt(coordinator, client.job_id)
        first = order[0]
        key = signers[first].public_key.hex()
        assert client.outcome is not None
        assert client.outcome.output == outputs[first]
        assert filed.claims.output_hash == output_hash_of(outputs[first].encode())
        assert filed.claims.verdict is Verdict.VALID
        assert filed.claims.worker_receipt == receipt(
            client.job_id, outputs[first], signers[first], signers[first]
        )
        assert coordinator.hub.books.balance(f"worker:{key}") == 10_000

    run_script(script, hedge_after=5.0)


@in_virtual_time
async def test_receipt_directly_after_its_answer_belongs_to_it() -> None:
    async with running_coordinator() as coordinator:
        worker = await signing(coordinator)
        client = await coordinator.request(owner="al", terms=PRICED)

        worker.answer(OUTPUT)
        worker.emit(ReceiptSent(client.job_id, receipt(client.job_id)))
        worker.emit(ReceiptSent(client.job_id, receipt(client.job_id, "{}")))
        await run_pending()

        filed = await only_receipt(coordinator, client.job_id)
        assert filed.claims.verdict is Verdict.VALID
        assert coordinator.hub.books.balance(WORKER_ACCOUNT) == 10_000
        assert coordinator.hub.books.balance("pool:unproven") == 0


@in_virtual_time
async def test_separate_receipt_for_a_foreign_job_is_ignored() -> None:
    async with running_coordinator() as coordinator:
        worker = await signing(coordinator)
        client = await coordinator.request(terms=PRICED)
        worker.answer(OUTPUT)
        await run_pending()
        thief = await coordinator.join("thief", "n", public_key=OTHER.public_key.hex())
        signed = receipt(client.job_id, signer=OTHER, key=OTHER)
        thief.emit(ReceiptSent(client.job_id, signed))
        thief.emit(ReceiptSent(JobId("never was"), signed))
        await run_pending()

        assert coordinator.hub.books.balance("pool:unproven") == 10_000
        assert len(await coordinator.store.ledger.receipts_of(client.job_id)) == 1


@in_virtual_time
async def test_replayed_receipt_is_invalid() -> None:
    async with running_coordinator() as coordinator:
        worker = await signing(coordinator)
        first = await coordinator.request(terms=PRICED)
        signed = receipt(first.job_id)
        worker.answer(OUTPUT, signed)
        await run_pending()
        second = await coordinator.request(terms=PRICED)
        worker.answer(OUTPUT, signed)
        await run_pending()

        filed = await only_receipt(coordinator, second.job_id)
        assert filed.claims.verdict is Verdict.WRONG_JOB
        assert coordinator.hub.books.balance(WORKER_ACCOUNT) == 10_000


@in_virtual_time
async def test_answer_of_an_unknown_lease_is_recorded_only() -> None:
    async with running_coordinator() as coordinator:
        worker = await signing(coordinator)
        client = await coordinator.request(terms=PRICED)
        late = await coordinator.join("late", public_key=OTHER.public_key.hex())
        signed = receipt(client.job_id, '{"text":"forged"}', OTHER, OTHER)
        none = LeaseNumber(0)
        late.emit(Completed(client.job_id, none, rest=("forged",), receipt=signed))
        await run_pending()
        worker.answer(OUTPUT, receipt(client.job_id))
        await run_pending()

        assert client.text == "hi"
        story = await coordinator.history(client.job_id)
        assert [type(fact) for fact in story[-2:]] == [LateResult, JobCompleted]
        assert (
            await only_receipt(coordinator, client.job_id)
        ).claims.worker == "wire:w"
        assert coordinator.hub.books.balance(f"worker:{OTHER.public_key.hex()}") == 0


@in_virtual_time
async def test_output_of_a_task_is_signed() -> None:
    async with running_coordinator() as coordinator:
        tasks = frozenset({JobKind.TASK})
        key = WORKER.public_key.hex()
        worker = await coordinator.join("w", kinds=tasks, public_key=key)
        client = await coordinator.request(kind=JobKind.TASK)
        output = '{"sentiment":"positive","confidence":0.5}'
        worker.answer(output, receipt(client.job_id, output))
        await run_pending()

        assert client.text == output
        filed = await only_receipt(coordinator, client.job_id)
        assert filed.claims.verdict is Verdict.VALID


@in_virtual_time
async def test_concurrent_jobs_do_not_overdraw_a_budget() -> None:
    async with running_coordinator() as coordinator:
        await coordinator.join(slots=100)
        await coordinator.hub.process(AccountTopUp("user:al", 35_000, "default"))
        await coordinator.hub.process(BudgetSet("user:al", 0, "default"))
        clients = [
            Client(
                coordinator.hub,
                coordinator.job(owner="al", terms=replace(PRICED, user=f"u{n}")),
            )
            for n in range(100)
        ]
        await run_pending()

        accepted = [client for client in clients if client.accepted]
        refused = [c for c in clients if isinstance(c.error, InsufficientFunds)]
        assert (len(accepted), len(refused)) == (3, 97)
        assert coordinator.hub.books.total_of("user:al") == 5_000
        assert coordinator.hub.books.total() == 0


@in_virtual_time
async def test_accounts_survive_a_restart(store: SlowStore) -> None:
    async with running_coordinator(store) as coordinator:
        worker = await coordinator.join()
        await coordinator.hub.process(BudgetSet("user:al", 15_000, "default"))
        first = await coordinator.request(owner="al", terms=PRICED)
        worker.write("hi")
        worker.complete()
        await run_pending()
        assert first.outcome is not None
    async with running_coordinator(store) as coordinator:
        worker = await coordinator.join()
        again = await coordinator.request(owner="al", terms=PRICED)
        assert isinstance(again.error, InsufficientFunds)
        other = await coordinator.request(owner="bo", terms=PRICED)
        worker.write("hi")
        worker.complete()
        await run_pending()

        head = await coordinator.store.ledger.head()
        assert head is not None
        assert head.size == 2
        filed = await only_receipt(coordinator, other.job_id)
        nodes = await coordinator.store.ledger.nodes(
            nodes_for_inclusion(filed.index, 2)
        )
        path = inclusion_path(filed.index, 2, lambda *place: nodes[place])
        made = ReceiptBundle(
            SIGNER.public_key.hex(),
            filed.body.decode(),
            filed.signature,
            filed.index,
            tuple(path),
            head.note,
        )
        checks = bundle.verify(bundle.write(made), SIGNER.public_key)
        assert all(check.ok for check in checks), checks
        assert checkpoint.verify(head.note, SIGNER.public_key).size == 2


@in_virtual_time
async def test_private_job_goes_to_a_paired_worker_with_a_proven_key() -> None:
    private = JobTerms(privacy=Privacy.PRIVATE, user="u1")
    key = WORKER.public_key.hex()
    async with running_coordinator() as coordinator:
        await coordinator.join("public")
        alone = await coordinator.request(owner="al", terms=private)
        assert isinstance(alone.error, JobError)
        assert str(alone.error).startswith("no_trusted_worker")

        await coordinator.hub.process(WorkerPaired("al", "u1", key))
        unproven = await coordinator.join("unproven", public_key=key)
        still = await coordinator.request(owner="al", terms=private)
        assert isinstance(still.error, JobError)

        proven = await coordinator.join("proven", public_key=key, proven=True)
        client = await coordinator.request(owner="al", terms=private)
        others = await coordinator.request(owner="bo", terms=private)

        assert [run.job_id for run in proven.runs] == [client.job_id]
        assert unproven.runs == []
        assert isinstance(others.error, JobError)


@in_virtual_time
async def test_pairing_survives_a_restart(store: SlowStore) -> None:
    key = WORKER.public_key.hex()
    async with running_coordinator(store) as coordinator:
        await coordinator.hub.process(WorkerPaired("al", "u1", key))
        await coordinator.hub.process(WorkerPaired("al", "u1", key))
    async with running_coordinator(store) as coordinator:
        worker = await coordinator.join(public_key=key, proven=True)
        await coordinator.request(
            owner="al", terms=JobTerms(privacy=Privacy.PRIVATE, user="u1")
        )

        assert len(worker.runs) == 1


@in_virtual_time
async def test_later_invalid_receipt_refunds_the_price() -> None:
    async with running_coordinator() as coordinator:
        worker = await signing(coordinator)
        client = await coordinator.request(owner="al", terms=PRICED)
        worker.answer(OUTPUT)
        await run_pending()
        worker.emit(ReceiptSent(client.job_id, receipt(client.job_id, "{}")))
        await run_pending()

        assert coordinator.hub.books.balance("user:al") == 0
        assert coordinator.hub.books.balance("pool:unproven") == 0
        _, later = await coordinator.store.ledger.receipts_of(client.job_id)
        assert later.claims.verdict is Verdict.WRONG_OUTPUT
        assert later.claims.price == 0


@in_virtual_time
async def test_input_is_handled_once_it_is_stored(
    store: SlowStore,
) -> None:
    async with running_coordinator(store, queue_max=3) as coordinator:
        await coordinator.join(slots=2)
        # More than the queue holds, so that the rest of the batch is deferred.
        clients = [Client(coordinator.hub, coordinator.job()) for _ in range(5)]
        await asyncio.sleep(0)
        await coordinator.hub.process(AccountTopUp("user:al", 5, "default"))

        assert (await store.ledger.load()).accounts["user:al"].balance == 5
        assert len(clients) == 5


@in_virtual_time
async def test_omitting_the_proof_does_not_clear_marks() -> None:
    key = WORKER.public_key.hex()
    async with running_coordinator() as coordinator:
        proven = await coordinator.join("proven", public_key=key, proven=True)
        for number in range(1, 4):
            await coordinator.request()
            proven.answer(OUTPUT, receipt(JobId(f"job{number}"), "{}"))
            await run_pending()
        await coordinator.request()
        again = await coordinator.join("proven/unproven", public_key=key)

        assert again.runs == []


@in_virtual_time
async def test_unproven_key_does_not_mark_its_owner() -> None:
    key = WORKER.public_key.hex()
    async with running_coordinator() as coordinator:
        impostor = await coordinator.join("w/unproven", public_key=key)
        for number in range(1, 4):
            await coordinator.request()
            impostor.answer(OUTPUT, receipt(JobId(f"job{number}"), "{}"))
            await run_pending()
        await coordinator.request()
        owner = await coordinator.join("w", public_key=key, proven=True)

        assert len(impostor.runs) == 3
        assert len(owner.runs) == 1
