"""Keeps the books: what each job costs whom, and a receipt for each that was done."""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from shoal.domain.errors import InsufficientFunds, ShoalError, StoreError
from shoal.domain.facts import (
    AccountCredited,
    AccountLimited,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobSubmitted,
    ReceiptPresented,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.vocabulary import Completed
from shoal.domain.work import ANY_MODEL, Chat, Job
from shoal.ledger import accounts
from shoal.ledger.accounts import Books, Transfer
from shoal.ledger.canonical import to_time
from shoal.ledger.keys import Signer
from shoal.ledger.merkle import EMPTY_ROOT, Frontier, frontier_places
from shoal.ledger.notary import Notary, Sealed
from shoal.ledger.outputs import output_of
from shoal.ledger.receipts import Claims
from shoal.ledger.worker_receipts import hash_of, verify_hash
from shoal.pool.open_job import OpenJob
from shoal.pool.state import Pool
from shoal.pool.stimuli import Answered, Proved, Stimulus
from shoal.store.calls import Call
from shoal.store.entries import NO_ENTRIES, Entries, Filed, Head, LedgerStore

_VALID = Verdict.VALID


@dataclass(frozen=True, slots=True)
class Shown:
    """A worker gave a receipt for a job, apart from the answer."""

    worker_id: WorkerId
    public_key: str
    job_id: JobId
    receipt: SignedReceipt


Mail: TypeAlias = Stimulus | Shown


@dataclass(slots=True)
class _Draft:
    """What the facts of one batch mean for the books."""

    transfers: list[Transfer] = field(default_factory=list)
    claims: list[Claims] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.transfers or self.claims or self.calls)


@dataclass(frozen=True, slots=True)
class _Output:
    """The hash of what a job came to, and what its worker signed about it."""

    digest: str
    receipt: SignedReceipt | None


class Clerk:
    """Looks at workers' receipts, and turns facts into transfers and receipts.

    The books change with the facts, so that what one job takes is not there for the
    next; the log only when ``entries`` are in the store.

    Args:
        fee: what the pool keeps of a price, in basis points.
        aside: how many signatures of a batch are made or checked in this thread; a
            batch with more has another one.
    """

    def __init__(
        self,
        pool: Pool,
        store: LedgerStore,
        signer: Signer,
        fee: int,
        aside: float,
    ) -> None:
        self.books = Books({}, {})
        self._pool = pool
        self._store = store
        self.public_key = signer.public_key
        self._signer = signer
        self._notary = Notary(signer, Frontier(), 0, EMPTY_ROOT)
        self._fee = fee
        self._aside = aside
        self._draft = _Draft()
        # Of this batch: what its answers came to, with the worker's receipt, by lease
        # for two workers may answer at once; and the claims of earlier receipts that
        # wait for a worker's.
        self._outputs: dict[tuple[JobId, LeaseNumber], _Output] = {}
        self._withheld: dict[JobId, Claims] = {}

    async def open(self) -> None:
        """Go on from where the books in the store end.  Raises StoreError."""
        opening = await self._store.opening()
        kept = opening.accounts.values()
        self.books = Books(
            {each.name: each.balance for each in kept},
            {each.name: each.budget for each in kept if each.budget is not None},
        )
        if (head := opening.head) is not None:
            places = frontier_places(head.size)
            nodes = await self._store.nodes(places)
            try:
                frontier = Frontier(head.size, [nodes[place] for place in places])
                self._notary = Notary(self._signer, frontier, head.size, head.root)
            except (KeyError, ValueError) as error:
                raise StoreError(
                    f"the log of receipts is damaged ({error}): restore the database "
                    "from a copy"
                ) from error

    # Before facts are decided on.

    async def examine(self, mail: Sequence[Mail]) -> list[Stimulus]:
        """Look at the receipts in a batch; return what is to be decided about."""
        looks: list[Callable[[], Verdict]] = []
        examined: list[tuple[Stimulus, int | None]] = []
        for each in _bundled(mail):
            if isinstance(each, Shown):
                proved, look = await self._shown(each)
                if proved is None:
                    continue
                stimulus: Stimulus = proved
            elif isinstance(each, Answered) and isinstance(each.event, Completed):
                stimulus, look = self._answered(each, each.event)
            else:
                stimulus, look = each, None
            examined.append((stimulus, len(looks) if look else None))
            if look is not None:
                looks.append(look)
        if not looks:
            return [stimulus for stimulus, _ in examined]
        verdicts = await self._all(looks)
        return [
            stimulus if index is None else _with(stimulus, verdicts[index])
            for stimulus, index in examined
        ]

    def _answered(
        self, answered: Answered, event: Completed
    ) -> tuple[Answered, Callable[[], Verdict] | None]:
        job = self._pool.jobs.get(event.job_id)
        worker = self._pool.workers.get(answered.worker_id)
        held = (answered.worker_id, event.lease)
        if job is None or worker is None or held not in job.holders:
            return answered, None  # it came late, and proves nothing to anybody
        answered = _with_model(answered, job, worker.offer.models)
        output = output_of(job.job.work, answered.outcome)
        digest, public_key = hash_of(output), worker.offer.public_key
        receipt = event.receipt if public_key else None
        # Of a worker that answers twice, the first word counts.
        self._outputs.setdefault((job.job.id, event.lease), _Output(digest, receipt))
        if not public_key:
            return answered, None
        if receipt is None:
            return replace(answered, verdict=Verdict.MISSING), None
        return answered, _look(receipt, event.job_id, public_key, digest)

    async def _shown(
        self, shown: Shown
    ) -> tuple[Proved | None, Callable[[], Verdict] | None]:
        """Look at a receipt that came apart: it counts if one was missing until now."""
        filed = await self._store.receipts_of(shown.job_id)
        if not filed or filed[0].claims.worker != shown.worker_id:
            return None, None  # it is for a job that this worker has not done
        if any(each.claims.verdict is not Verdict.MISSING for each in filed):
            return None, None  # the first word counts
        if shown.job_id in self._withheld:
            return None, None
        claims = filed[0].claims
        self._withheld[shown.job_id] = replace(claims, worker_receipt=shown.receipt)
        proved = Proved(shown.worker_id, shown.job_id, Verdict.MISSING)

        look = _look(shown.receipt, shown.job_id, shown.public_key, claims.output_hash)
        return proved, look

    async def _all(self, looks: Sequence[Callable[[], Verdict]]) -> list[Verdict]:
        if len(looks) > self._aside:
            return await asyncio.to_thread(lambda: [look() for look in looks])
        return [look() for look in looks]

    def refusal(self, job: Job) -> ShoalError | None:
        """Say why a job cannot be paid for, or None if it can."""
        payer = accounts.user(job.owner, job.terms.user)
        why = self.books.refusal(payer, job.terms.price)
        return None if why is None else InsufficientFunds(why)

    # When a fact is decided on, and before it is applied.

    def note(self, fact: Fact, at: float) -> None:
        """Write down what ``fact`` means; the pool does not know it yet."""
        match fact:
            case JobSubmitted(job):
                payer = accounts.user(job.owner, job.terms.user)
                self._post(accounts.reserve(job.id, payer, job.terms.price))
            case JobCompleted():
                self._done(fact, at)
            case JobFailed() | JobCancelled() | JobExpired():
                job = self._pool.jobs[fact.job_id].job
                self._release(job)
                self._call(job)
            case ReceiptPresented(job_id, _, verdict):
                self._presented(job_id, verdict, at)
            case AccountCredited(account, amount):
                self._post(accounts.credit(account, amount))
            case AccountLimited(account, budget):
                self.books.set_budget(account, budget)
            case _:
                pass  # nothing that costs anything

    def _done(self, fact: JobCompleted, at: float) -> None:
        opened = self._pool.jobs[fact.job_id]
        job, worker_id = opened.job, opened.worker_id
        if opened.hedge is not None and opened.hedge.lease == fact.lease:
            worker_id = opened.hedge.worker_id
        assert worker_id is not None, f"nobody has {fact.job_id}"
        key = self._pool.workers[worker_id].offer.public_key
        price, fee = job.terms.price, 0
        match fact.verdict:
            case Verdict.VALID | Verdict.UNSIGNED:
                payee = _account(worker_id, key if fact.verdict is _VALID else "")
                fee = accounts.fee_of(price, self._fee)
                self._post(accounts.settle(job.id, payee, price, self._fee))
            case Verdict.MISSING:
                self._post(accounts.withhold(job.id, price))
            case _:
                price = 0
                self._release(job)
        usage = fact.outcome.usage
        output = self._outputs.pop((job.id, fact.lease))
        self._draft.claims.append(
            Claims(
                job_id=job.id,
                worker=worker_id,
                worker_key=key or None,
                output_hash=output.digest,
                prompt_tokens=None if usage is None else usage.prompt_tokens,
                completion_tokens=None if usage is None else usage.completion_tokens,
                price=price,
                fee=fee,
                payment_ref=job.terms.payment_ref or None,
                at=to_time(at),
                verdict=fact.verdict,
                worker_receipt=output.receipt,
            )
        )
        self._call(job)

    def _presented(self, job_id: JobId, verdict: Verdict, at: float) -> None:
        claims = self._withheld.pop(job_id)
        fee = 0
        if verdict is Verdict.VALID:
            fee = accounts.fee_of(claims.price, self._fee)
            payee = _account(WorkerId(claims.worker), claims.worker_key or "")
            self._post(accounts.pay_withheld(job_id, payee, claims.price, fee))
        self._draft.claims.append(
            replace(claims, verdict=verdict, fee=fee, at=to_time(at))
        )

    def _release(self, job: Job) -> None:
        payer = accounts.user(job.owner, job.terms.user)
        self._post(accounts.release(job.id, payer, job.terms.price))

    def _call(self, job: Job) -> None:
        if job.terms.webhook is not None:
            self._draft.calls.append(Call(job.id, job.terms.webhook))

    def _post(self, transfers: Sequence[Transfer]) -> None:
        self.books.apply(transfers)
        self._draft.transfers += transfers

    # When they are stored.

    async def entries(self, at: float) -> Entries:
        """Return what is to be stored with the facts that were noted."""
        self._outputs.clear()
        if not self._draft:
            return NO_ENTRIES
        draft, self._draft = self._draft, _Draft()
        if not draft.claims:
            return Entries(tuple(draft.transfers), calls=tuple(draft.calls))
        if len(draft.claims) > self._aside:
            sealed = await asyncio.to_thread(self._notary.seal, draft.claims, at)
        else:
            sealed = self._notary.seal(draft.claims, at)
        self._notary.commit(sealed)  # if storing fails, nothing comes after it
        return _entries(draft, sealed, at)


def _bundled(mail: Sequence[Mail]) -> Sequence[Mail]:
    """Put receipts to the answers that they came right behind.

    Nothing is in the store about those yet, so that alone they would be lost.
    """
    shown = {
        (each.worker_id, each.job_id): each.receipt
        for each in reversed(mail)  # of several the first counts
        if isinstance(each, Shown)
    }
    if not shown:
        return mail
    return [_with_receipt(each, shown) for each in mail]


def _with_receipt(
    mail: Mail, shown: Mapping[tuple[WorkerId, JobId], SignedReceipt]
) -> Mail:
    if not isinstance(mail, Answered) or not isinstance(mail.event, Completed):
        return mail
    receipt = mail.event.receipt or shown.get((mail.worker_id, mail.event.job_id))
    return replace(mail, event=replace(mail.event, receipt=receipt))


def _look(
    receipt: SignedReceipt, job_id: JobId, public_key: str, digest: str
) -> Callable[[], Verdict]:
    key = bytes.fromhex(public_key)
    return lambda: verify_hash(
        receipt, job_id=job_id, public_key=key, output_hash=digest
    )


def _with(stimulus: Stimulus, verdict: Verdict) -> Stimulus:
    assert isinstance(stimulus, Answered | Proved), "only these have receipts"
    return replace(stimulus, verdict=verdict)


def _with_model(answered: Answered, job: OpenJob, models: Set[str]) -> Answered:
    """Note which model it was, where the asker left that open."""
    outcome = answered.outcome
    work = job.job.work
    if not isinstance(work, Chat) or work.model != ANY_MODEL or outcome.output:
        return answered
    work = replace(work, model=next(iter(models), ANY_MODEL))
    output = output_of(work, outcome).decode()
    return replace(answered, outcome=replace(outcome, output=output))


def _entries(draft: _Draft, sealed: Sealed, at: float) -> Entries:
    head = sealed.checkpoint
    filed = [
        Filed(logged.index, claims, logged.body, logged.signature, at)
        for claims, logged in zip(draft.claims, sealed.receipts, strict=True)
    ]
    return Entries(
        tuple(draft.transfers),
        filed,
        sealed.nodes,
        Head(head.size, head.root, sealed.note, at),
        tuple(draft.calls),
    )


def _account(worker_id: WorkerId, public_key: str) -> str:
    """Return whom to pay: whoever has the key, if it was proved, else the worker."""
    return accounts.worker(WorkerId(public_key) if public_key else worker_id)
