"""Verifies workers' receipts before the hub decides about their results."""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.vocabulary import Completed
from shoal.domain.work import ANY_MODEL, Chat
from shoal.ledger import accounts
from shoal.ledger.outputs import output_of
from shoal.ledger.receipts import Claims, has_receipt
from shoal.ledger.worker_receipts import output_hash_of, verify_output_hash
from shoal.pool.inputs import HubInput, LeaseResult, ReceiptVerified
from shoal.pool.open_job import OpenJob
from shoal.pool.state import PoolState
from shoal.store.port import Store

SignatureCheck: TypeAlias = Callable[[], Verdict]


@dataclass(frozen=True, slots=True)
class PresentedReceipt:
    """A worker gave a receipt for a job, apart from the answer."""

    worker_id: WorkerId
    public_key: str
    job_id: JobId
    receipt: SignedReceipt


HubMail: TypeAlias = HubInput | PresentedReceipt


@dataclass(frozen=True, slots=True)
class VerifiedOutput:
    """The hash of what a job came to, and what its worker signed about it."""

    digest: str
    receipt: SignedReceipt | None


@dataclass(frozen=True, slots=True)
class PendingReceipt:
    """What was said of a job whose worker gave no receipt until now.

    ``payer`` is the account that was charged; None if the job is not kept any more.
    """

    claims: Claims
    payer: str | None


@dataclass(slots=True)
class VerifierFindings:
    """What the facts of a batch do not carry, and the books need.

    ``outputs`` are by lease, for two workers may answer at once.
    """

    outputs: dict[tuple[JobId, LeaseNumber], VerifiedOutput] = field(
        default_factory=dict
    )
    unproven: dict[JobId, PendingReceipt] = field(default_factory=dict)


class ReceiptVerifier:
    """Verifies what workers signed.

    Args:
        aside: how many signatures of a batch are checked in this thread; a batch with
            more has another one.
    """

    def __init__(self, pool: PoolState, store: Store, thread_above: float) -> None:
        self.findings = VerifierFindings()
        self._pool = pool
        self._store = store
        self._aside = thread_above

    async def verify_batch(self, mail: Sequence[HubMail]) -> list[HubInput]:
        """Look at the receipts in a batch; return what is to be decided about.

        Raises StoreError.
        """
        looks: list[SignatureCheck] = []
        examined: list[tuple[HubInput, int | None]] = []
        for each in _with_late_receipts(mail):
            look: SignatureCheck | None = None
            if isinstance(each, PresentedReceipt):
                found = await self._shown(each)
                if found is None:
                    continue
                stimulus, look = found
            elif isinstance(each, LeaseResult) and isinstance(each.event, Completed):
                stimulus, look = self._answered(each, each.event)
            else:
                stimulus = each
            examined.append((stimulus, len(looks) if look else None))
            if look is not None:
                looks.append(look)
        verdicts = await self._all(looks)
        return [
            stimulus if index is None else _with_verdict(stimulus, verdicts[index])
            for stimulus, index in examined
        ]

    def _answered(
        self, answered: LeaseResult, event: Completed
    ) -> tuple[HubInput, SignatureCheck | None]:
        job = self._pool.jobs.get(event.job_id)
        worker = self._pool.workers.get(answered.worker_id)
        held = (answered.worker_id, event.lease)
        if job is None or worker is None or held not in job.holders:
            return answered, None  # it came late, and proves nothing to anybody
        if not has_receipt(job.job):
            return answered, None
        answered = _with_model(answered, job, worker.offer.models)
        output = output_of(job.job.work, answered.outcome)
        digest, offer = output_hash_of(output), worker.offer
        public_key = offer.public_key if offer.receipts else ""
        receipt = event.receipt if public_key else None
        # Of a worker that answers twice, the first word counts.
        outputs = self.findings.outputs
        outputs.setdefault((event.job_id, event.lease), VerifiedOutput(digest, receipt))
        if not public_key:
            return answered, None
        if receipt is None:
            return replace(answered, verdict=Verdict.MISSING), None
        return answered, _signature_check(receipt, event.job_id, public_key, digest)

    async def _shown(
        self, shown: PresentedReceipt
    ) -> tuple[HubInput, SignatureCheck] | None:
        """Look at a receipt that came apart: it counts if one was missing until now."""
        if shown.job_id in self.findings.unproven:
            return None
        filed = await self._store.ledger.receipts_of(shown.job_id)
        if not filed or filed[0].claims.worker != shown.worker_id:
            return None  # it is for a job that this worker has not done
        if any(each.claims.verdict is not Verdict.MISSING for each in filed):
            return None  # the first word counts
        claims = replace(filed[0].claims, worker_receipt=shown.receipt)
        job = await self._store.summary(shown.job_id)
        payer = (
            None if job is None else accounts.user_account(job.owner, job.terms.user)
        )
        self.findings.unproven[shown.job_id] = PendingReceipt(claims, payer)
        proved = ReceiptVerified(shown.worker_id, shown.job_id, Verdict.MISSING)
        look = _signature_check(
            shown.receipt, shown.job_id, shown.public_key, claims.output_hash
        )
        return proved, look

    async def _all(self, looks: Sequence[SignatureCheck]) -> list[Verdict]:
        if len(looks) > self._aside:
            return await asyncio.to_thread(lambda: [look() for look in looks])
        return [look() for look in looks]


def _with_late_receipts(mail: Sequence[HubMail]) -> Sequence[HubMail]:
    """Put receipts to the answers that they came right behind.

    Nothing is in the store about those yet, so that alone they would be lost.
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
    return replace(mail, event=replace(mail.event, receipt=receipt))


def _with_model(answered: LeaseResult, job: OpenJob, models: Set[str]) -> LeaseResult:
    """Note which model it was, where the asker left that open."""
    outcome = answered.outcome
    work = job.job.work
    if not isinstance(work, Chat) or work.model != ANY_MODEL or outcome.output:
        return answered
    work = replace(work, model=next(iter(models), ANY_MODEL))
    output = output_of(work, outcome).decode()
    return replace(answered, outcome=replace(outcome, output=output))


def _signature_check(
    receipt: SignedReceipt, job_id: JobId, public_key: str, digest: str
) -> SignatureCheck:
    key = bytes.fromhex(public_key)
    return lambda: verify_output_hash(
        receipt, job_id=job_id, public_key=key, output_hash=digest
    )


def _with_verdict(stimulus: HubInput, verdict: Verdict) -> HubInput:
    assert isinstance(stimulus, LeaseResult | ReceiptVerified), (
        "only these have receipts"
    )
    return replace(stimulus, verdict=verdict)
