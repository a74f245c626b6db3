"""Verifies workers' receipts before the hub decides about their results."""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from msgspec import structs
from msgspec.structs import replace

from shoal.domain.facts import JobLeased
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.vocabulary import Completed
from shoal.domain.work import ANY_MODEL, Chat
from shoal.ledger.receipts import has_receipt, output_of
from shoal.ledger.worker_receipts import output_hash_of, verify_output_hash
from shoal.pool.inputs import HubInput, LeaseResult, ReceiptVerified
from shoal.pool.open_job import OpenJob
from shoal.pool.state import PoolState
from shoal.store.port import Store

SignatureCheck: TypeAlias = Callable[[], Verdict]


@dataclass(frozen=True, slots=True)
class PresentedReceipt:
    """A worker sent a receipt for a job after the answer."""

    worker_id: WorkerId
    public_key: str
    job_id: JobId
    receipt: SignedReceipt


HubMail: TypeAlias = HubInput | PresentedReceipt


class ReceiptVerifier:
    """Verifies the receipts that workers signed.

    Args:
        thread_above: a batch with more signatures than this is verified in a thread.
    """

    def __init__(self, pool: PoolState, store: Store, thread_above: float) -> None:
        self._pool = pool
        self._store = store
        self._thread_above = thread_above

    async def verify_batch(self, mail: Sequence[HubMail]) -> list[HubInput]:
        """Verify the receipts of a batch; return the inputs of the hub.

        Raises StoreError.
        """
        checks: list[SignatureCheck] = []
        inputs: list[tuple[HubInput, int | None]] = []  # and the index of their check
        kinds = {*map(type, mail)}
        late = PresentedReceipt in kinds or ReceiptVerified in kinds
        # An input that the hub deferred is here again, and already verified.
        presented = set[JobId]()
        if late:
            presented |= {
                each.job_id for each in mail if isinstance(each, ReceiptVerified)
            }
        for each in _with_late_receipts(mail) if late else mail:
            check: SignatureCheck | None = None
            if isinstance(each, PresentedReceipt):
                if each.job_id in presented:  # No secret: these are jobs.
                    continue  # the first receipt counts
                found = await self._verify_presented(each)
                if found is None:
                    continue
                presented.add(each.job_id)
                hub_input, check = found
            elif isinstance(each, LeaseResult) and isinstance(each.event, Completed):
                hub_input, check = self._verify_result(each, each.event)
            else:
                hub_input = each
            inputs.append((hub_input, len(checks) if check else None))
            if check is not None:
                checks.append(check)
        verdicts = await self._run_checks(checks) if checks else []
        verified = [
            hub_input if index is None else _with_verdict(hub_input, verdicts[index])
            for hub_input, index in inputs
        ]
        if not late:
            return verified
        return [
            hub_input
            for hub_input in verified
            if not isinstance(hub_input, ReceiptVerified)
            or not await self._is_of_another_lease(hub_input)
        ]

    async def _is_of_another_lease(self, shown: ReceiptVerified) -> bool:
        """Say whether a late receipt may be for what its worker wrote before.

        A worker that had the job under two leases, as after a restart of the
        coordinator, has signed two outputs, and the first receipt may come last.
        """
        if shown.verdict is not Verdict.WRONG_OUTPUT:
            return False
        facts = [each.fact for each in await self._store.history(shown.job_id)]
        leases = [each for each in facts if isinstance(each, JobLeased)]
        return sum(each.worker_id == shown.worker_id for each in leases) > 1

    def _verify_result(
        self, answered: LeaseResult, event: Completed
    ) -> tuple[HubInput, SignatureCheck | None]:
        job = self._pool.jobs.get(event.job_id)
        worker = self._pool.workers.get(answered.worker_id)
        held = (answered.worker_id, event.lease)
        if job is None or worker is None or held not in job.holders:
            return answered, None  # a late result gets no receipt
        if not has_receipt(job.job):
            return answered, None
        answered = _with_model(answered, job, worker.offer.models)
        output = output_of(job.job.work, answered.outcome)
        output_hash, offer = output_hash_of(output), worker.offer
        public_key = offer.public_key if offer.receipts else ""
        receipt = event.receipt if public_key else None
        if receipt is not event.receipt:
            event = replace(event, receipt=receipt)
        answered = structs.replace(answered, event=event, output_hash=output_hash)
        if not public_key:
            return answered, None
        if receipt is None:
            return structs.replace(answered, verdict=Verdict.MISSING), None
        check = _signature_check(receipt, event.job_id, public_key, output_hash)
        return answered, check

    async def _verify_presented(
        self, shown: PresentedReceipt
    ) -> tuple[HubInput, SignatureCheck] | None:
        """Return the check of a late receipt; None if it does not count.

        It counts if the job's worker presented none before.
        """
        filed = await self._store.ledger.receipts_of(shown.job_id)
        if not filed or filed[0].claims.worker != shown.worker_id:
            return None  # another worker did the job
        if any(each.claims.verdict is not Verdict.MISSING for each in filed):
            return None  # the first receipt counts
        verified = ReceiptVerified(
            shown.worker_id, shown.job_id, Verdict.MISSING, shown.receipt
        )
        check = _signature_check(
            shown.receipt, shown.job_id, shown.public_key, filed[0].claims.output_hash
        )
        return verified, check

    async def _run_checks(self, checks: Sequence[SignatureCheck]) -> list[Verdict]:
        if len(checks) > self._thread_above:
            return await asyncio.to_thread(lambda: [check() for check in checks])
        return [check() for check in checks]


def _with_late_receipts(mail: Sequence[HubMail]) -> Sequence[HubMail]:
    """Attach receipts to the results in the same batch that they belong to.

    The store does not know those results yet: the receipts alone would be lost.
    """
    shown = {
        (each.worker_id, each.job_id): each.receipt
        for each in reversed(mail)  # of several the first counts
        if isinstance(each, PresentedReceipt)
    }
    if not shown:
        return mail
    return [_with_receipt(each, shown) for each in mail]


def _with_receipt(
    mail: HubMail, shown: Mapping[tuple[WorkerId, JobId], SignedReceipt]
) -> HubMail:
    if not isinstance(mail, LeaseResult) or not isinstance(mail.event, Completed):
        return mail
    receipt = mail.event.receipt or shown.get((mail.worker_id, mail.event.job_id))
    return structs.replace(mail, event=replace(mail.event, receipt=receipt))


def _with_model(answered: LeaseResult, job: OpenJob, models: Set[str]) -> LeaseResult:
    """Name the model in the output, where the client left it open."""
    outcome = answered.outcome
    work = job.job.work
    if not isinstance(work, Chat) or work.model != ANY_MODEL or outcome.output:
        return answered
    work = replace(work, model=next(iter(models), ANY_MODEL))
    output = output_of(work, outcome).decode()
    return structs.replace(answered, outcome=replace(outcome, output=output))


def _signature_check(
    receipt: SignedReceipt, job_id: JobId, public_key: str, digest: str
) -> SignatureCheck:
    return partial(
        verify_output_hash,
        receipt,
        job_id=job_id,
        public_key=bytes.fromhex(public_key),
        output_hash=digest,
    )


def _with_verdict(hub_input: HubInput, verdict: Verdict) -> HubInput:
    assert isinstance(hub_input, LeaseResult | ReceiptVerified), (
        "only these have receipts"
    )
    return structs.replace(hub_input, verdict=verdict)
