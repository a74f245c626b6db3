"""Turns facts into ledger transfers and receipts, and stores them in one commit."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import msgspec
from msgspec import structs

from shoal.coordinator.store_health import StoreHealth
from shoal.domain import facts
from shoal.domain.credentials import usage_of
from shoal.domain.errors import InsufficientFunds, ShoalError, StoreBroken
from shoal.domain.histogram import SECONDS_SHORT, Histogram, observe
from shoal.domain.ids import JobId, WorkerId, peer_of
from shoal.domain.job import Job
from shoal.domain.receipts import Verdict
from shoal.domain.work import MODEL_QUEUE, Call, CallStream, JobKind
from shoal.ledger import accounts
from shoal.ledger.accounts import Books, Transfer
from shoal.ledger.canonical import to_time
from shoal.ledger.keys import Signer
from shoal.ledger.merkle import EMPTY_ROOT, Frontier, frontier_positions
from shoal.ledger.notary import Notary, SealedBatch
from shoal.ledger.receipts import Claims, has_receipt
from shoal.ledger.requests import request_hash_of, request_of, request_salt
from shoal.pool.last_resort import estimated_cost
from shoal.pool.open_job import OpenJob
from shoal.pool.react import HARMLESS_VERDICTS
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker
from shoal.store import ledger
from shoal.store.port import CommitId, Epoch, RecordedFact, Store, commit_ids
from shoal.store.webhooks import WebhookDelivery
from shoal.transports.clock import Clock

_VALID = Verdict.VALID
RECORD_WITHIN = 0.25  # seconds


class _BatchDraft(msgspec.Struct):
    """The changes that the facts of one batch make to the books."""

    transfers: list[Transfer] = []
    claims: list[Claims] = []
    deliveries: list[WebhookDelivery] = []
    presented: list[facts.ReceiptPresented] = []
    places: dict[JobId, ledger.JobPlace] = {}
    refunds: list[ledger.Refund] = []

    def __bool__(self) -> bool:
        money = self.transfers or self.claims or self.refunds
        return bool(money or self.deliveries or self.presented or self.places)


@dataclass(slots=True, eq=False)
class Bookkeeper:
    """Turns facts into transfers and receipts.

    The books change with the facts, so that two jobs cannot spend the same balance;
    the log changes only when a batch is sealed.

    Args:
        fee: what the pool keeps of a price, in basis points.
        thread_above: a batch with more signatures than this is signed in a thread.
    """

    _pool: PoolState
    _store: Store
    _signer: Signer
    _fee: int
    _thread_above: float
    books: Books = field(default_factory=lambda: Books({}, {}))
    _notary: Notary = field(init=False)
    _draft: _BatchDraft = field(default_factory=_BatchDraft)
    # Of open jobs with much text.
    _request_hashes: dict[JobId, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._notary = Notary(self._signer, Frontier(), 0, EMPTY_ROOT)

    async def open(self) -> None:
        """Load the books and the log from the store.

        Raises StoreError; StoreBroken if the log is damaged.
        """
        opening = await self._store.ledger.load()
        kept = opening.accounts.values()
        self.books = Books(
            {each.name: each.balance for each in kept},
            {each.name: each.budget for each in kept if each.budget is not None},
        )
        if (head := opening.head) is not None:
            places = frontier_positions(head.size)
            nodes = await self._store.ledger.nodes(places)
            try:
                frontier = Frontier(head.size, [nodes[place] for place in places])
                self._notary = Notary(self._signer, frontier, head.size, head.root)
            except (KeyError, ValueError) as error:
                raise StoreBroken(
                    f"the log of receipts in the database is damaged ({error})"
                ) from error

    def payment_rejection(self, job: Job) -> ShoalError | None:
        """Return the error if the payer cannot pay for a job, else None."""
        if not job.terms.price:  # as of most jobs
            return None
        shortfall = self.books.shortfall(payer_of(job), job.terms.price)
        return None if shortfall is None else InsufficientFunds(shortfall)

    def hosted_shortfall(self, job: OpenJob, worker: Worker) -> str | None:
        """Describe what the payer lacks for a job at a hosted provider, if anything.

        It pays for its jobs that are there, too, as much as they are expected to cost.
        """
        payer = payer_of(job.job)
        expected = _expected_cost(job, worker) - job.job.terms.price
        for models in self._pool.roster.hosted.values():
            for other in models.values():
                for each, _ in self._pool.leases_of(other.id):
                    if payer_of(each.job) == payer:
                        reserved = each.job.terms.price
                        expected += _expected_cost(each, other) - reserved
        return self.books.shortfall(payer, max(0, expected))

    # When a job is submitted.

    async def prepare(self, job: Job) -> None:
        """Hash the request of a job with much text before it is submitted, in a thread.

        That takes tens of milliseconds for the largest.  ``discard`` it if the job is
        not submitted.
        """
        if has_receipt(job):
            found = await asyncio.to_thread(self._hash_request, job)
            self._request_hashes[job.id] = found

    def discard(self, job_id: JobId) -> None:
        """Forget what ``prepare`` found."""
        self._request_hashes.pop(job_id, None)

    def _hash_request(self, job: Job) -> str:
        salt = request_salt(self._signer, job.id)
        return request_hash_of(salt, request_of(job.work))

    # When a fact is decided, before it is applied.

    def record(self, fact: facts.Fact, at: float) -> None:
        """Book ``fact``, which is not applied to the pool yet."""
        match fact:
            case facts.JobSubmitted(job):
                if price := job.terms.price:
                    self._post(accounts.reserve(job.id, payer_of(job), price))
            case facts.JobCompleted():
                self._done(fact, at)
            case facts.JobFailed() | facts.JobCancelled() | facts.JobExpired():
                opened = self._pool.jobs[fact.job_id]
                self.discard(fact.job_id)
                self._release(opened.job)
                self._deliver(opened.job)
                if opened.worker_id is not None:
                    self._place(opened.job, opened.worker_id, 0)
            case facts.ReceiptPresented():
                self._draft.presented.append(fact)
            case facts.AccountCredited(account, amount):
                self._post(accounts.credit(account, amount))
            case facts.AccountLimited(account, budget):
                self.books.set_budget(account, budget)
            case _:
                pass  # no money moves

    def _done(self, fact: facts.JobCompleted, at: float) -> None:
        opened = self._pool.jobs[fact.job_id]
        job, worker_id = opened.job, opened.worker_id
        if opened.hedge is not None and opened.hedge.lease == fact.lease:
            worker_id = opened.hedge.worker_id
        assert worker_id is not None, f"no worker has {fact.job_id}"
        if not has_receipt(job):
            self._deliver(job)
            return
        offer = self._pool.workers[worker_id].offer
        key = offer.public_key
        price, fee, share = job.terms.price, 0, self._fee
        if offer.last_resort is not None and fact.verdict in HARMLESS_VERDICTS:
            used = usage_of(job.work, fact.outcome)
            price = offer.last_resort.cost(used.prompt_tokens, used.completion_tokens)
            self._post(accounts.adjust(job.id, payer_of(job), job.terms.price, price))
            share = 0  # the worker's owner pays all of it to the provider
        match fact.verdict:
            case Verdict.VALID | Verdict.UNSIGNED | Verdict.MISSING if not price:
                pass
            case Verdict.VALID | Verdict.UNSIGNED:
                # A wire without receipts may still have proved the worker's key.
                proven = fact.verdict is _VALID or offer.proven
                payee = _account(worker_id, key if proven else "")
                fee = accounts.fee_of(price, share)
                self._post(accounts.settle(job.id, payee, price, share))
            case Verdict.MISSING:
                self._post(accounts.withhold(job.id, price))
            case _:
                price = 0
                self._release(job)
        self._place(job, worker_id, price)
        usage = fact.outcome.usage
        request_hash = self._request_hashes.pop(job.id, None)
        self._draft.claims.append(
            Claims(
                job_id=job.id,
                worker=worker_id,
                worker_key=key or None,
                output_hash=fact.output_hash,
                prompt_tokens=None if usage is None else usage.prompt_tokens,
                completion_tokens=None if usage is None else usage.completion_tokens,
                price=price,
                fee=fee,
                payment_ref=job.terms.payment_ref or None,
                at=to_time(at),
                verdict=fact.verdict,
                worker_receipt=fact.worker_receipt,
                request_hash=request_hash or self._hash_request(job),
                shards=self._pool.shards_of(worker_id, job.work.model)
                if MODEL_QUEUE in self._pool.roster.with_model
                else (),
            )
        )
        self._deliver(job)

    def _place(self, job: Job, worker_id: WorkerId, cost: int) -> None:
        """Note where a job ended, for its usage."""
        if not job.terms.kept:
            return
        if not isinstance(job.work, Call | CallStream):
            self._draft.places[job.id] = ledger.JobPlace(peer_of(worker_id), cost)
        elif cost:
            # There may be thousands of calls a second: where each ran is not counted.
            self._draft.places[job.id] = ledger.JobPlace("", cost)

    def _release(self, job: Job) -> None:
        if price := job.terms.price:
            self._post(accounts.release(job.id, payer_of(job), price))

    def _deliver(self, job: Job) -> None:
        if job.terms.webhook is not None:
            self._draft.deliveries.append(WebhookDelivery(job.id, job.terms.webhook))

    def _post(self, transfers: Sequence[Transfer]) -> None:
        self.books.apply(transfers)
        self._draft.transfers += transfers

    # When facts are stored.

    async def seal(self, at: float) -> ledger.LedgerEntries:
        """Return what is stored with the recorded facts.

        The caller stores them, however often it has to try.  Raises StoreError; then it
        can be called again.
        """
        if not self._draft:
            return ledger.NO_ENTRIES
        while self._draft.presented:
            await self._settle_presented(self._draft.presented[0], at)
            del self._draft.presented[0]
        draft, self._draft = self._draft, _BatchDraft()
        if not draft.claims:
            return ledger.LedgerEntries(
                tuple(draft.transfers),
                deliveries=tuple(draft.deliveries),
                places=draft.places,
            )
        if len(draft.claims) > self._thread_above:
            sealed = await asyncio.to_thread(self._notary.seal, draft.claims, at)
        else:
            sealed = self._notary.seal(draft.claims, at)
        self._notary.commit(sealed)
        return _entries(draft, sealed, at)

    async def _settle_presented(self, fact: facts.ReceiptPresented, at: float) -> None:
        """Pay out, or give back, a price that was withheld until there is a receipt.

        It concerns the withheld price alone, so no decision of the batch depends on it.
        Reads first: after a StoreError nothing has changed.
        """
        (filed, *_) = await self._store.ledger.receipts_of(fact.job_id)
        claims, fee = (
            structs.replace(filed.claims, worker_receipt=fact.worker_receipt),
            0,
        )
        price = claims.price
        if fact.verdict is Verdict.VALID:
            fee = accounts.fee_of(price, self._fee)
            payee = _account(WorkerId(claims.worker), claims.worker_key or "")
            self._post(accounts.pay_withheld(fact.job_id, payee, price, fee))
        elif (job := await self._store.summary(fact.job_id)) is not None:
            payer = accounts.user_account(job.owner, job.terms.user)
            self._post(accounts.give_back(fact.job_id, payer, price))
            model, node = job.model, peer_of(WorkerId(claims.worker))
            if job.kind in (JobKind.CALL, JobKind.CALL_STREAM):
                model = node = ""  # as their cost was counted: see ``_place``
            self._draft.refunds.append(ledger.Refund(job.owner, model, node, price))
            price = 0
        self._draft.claims.append(
            structs.replace(
                claims, verdict=fact.verdict, price=price, fee=fee, at=to_time(at)
            )
        )


def _entries(
    draft: _BatchDraft, sealed: SealedBatch, at: float
) -> ledger.LedgerEntries:
    head = sealed.checkpoint
    filed = [
        ledger.LoggedReceipt(logged.index, claims, logged.body, logged.signature, at)
        for claims, logged in zip(draft.claims, sealed.receipts, strict=True)
    ]
    return ledger.LedgerEntries(
        tuple(draft.transfers),
        filed,
        sealed.nodes,
        ledger.LogHead(head.size, head.root, sealed.note, at),
        tuple(draft.deliveries),
        draft.places,
        tuple(draft.refunds),
    )


def _expected_cost(job: OpenJob, worker: Worker) -> int:
    prices = worker.offer.last_resort
    assert prices is not None, f"{worker.id} is a machine of the pool"
    return estimated_cost(job, prices)


def payer_of(job: Job) -> str:
    """Return the account that a job is charged to."""
    return accounts.user_account(job.owner, job.terms.user)


def _account(worker_id: WorkerId, public_key: str) -> str:
    """Return the payee's account: by public key if that is proved, else by worker."""
    return accounts.worker_account(WorkerId(public_key) if public_key else worker_id)


@dataclass(slots=True, eq=False)
class FactRecorder:
    """Stores facts with their ledger entries.

    A deferrable fact waits for the next commit, at most ``RECORD_WITHIN`` seconds:
    after a restart it would not be used.  ``wake`` is called when that time is over.
    ``commits`` are the ids of its commits; ``commit_seconds`` counts them by their
    time, repetitions included.
    """

    _store: Store
    _bookkeeper: Bookkeeper
    _health: StoreHealth
    _clock: Clock
    _wake: Callable[[], None]
    commits: Iterator[CommitId] = field(
        default_factory=partial(commit_ids, Epoch(0), "hub")
    )
    commit_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_SHORT))
    _waiting: list[RecordedFact] = field(default_factory=list)
    _record_by: float = math.inf

    @property
    def is_due(self) -> bool:
        """Whether a deferred fact must be stored now."""
        return self._clock.now() >= self._record_by

    async def record(self, kept: Sequence[facts.Fact], *, urgent: bool) -> None:
        """Store the facts in ``kept``; unless ``urgent``, they may wait.

        Repeats that until it succeeds.  Raises StoreError if it never can.
        """
        now, at = self._clock.now(), self._clock.wall()
        if not urgent and now < self._record_by:
            if not self._waiting:
                self._record_by = now + RECORD_WITHIN
                self._clock.call_at(self._record_by, self._record_now)
            self._waiting += [RecordedFact(at, fact) for fact in kept]
            return
        earlier, self._waiting = self._waiting, []
        self._record_by = math.inf
        entries = await self._health.read(partial(self._bookkeeper.seal, at))
        commit = next(self.commits)
        await self._health.write(
            partial(self._store.append, kept, at, earlier, entries, commit)
        )
        observe((self.commit_seconds, self._clock.now() - now))

    def _record_now(self) -> None:
        # Not left to comparing times: a timer may fire a little early.
        if self._waiting:
            self._record_by = -math.inf
            self._wake()


def is_deferrable(fact: facts.Fact) -> bool:
    """Say whether a fact may be stored with a later batch."""
    return isinstance(fact, facts.JobStarted | facts.WorkerLoadChanged)


_OfJob: TypeAlias = facts.JobFact | facts.LateResult | facts.ReceiptPresented


def is_stored(fact: facts.Fact, pool: PoolState) -> bool:
    """Say whether a fact, which is not applied yet, belongs in the store."""
    if isinstance(fact, facts.JobSubmitted):
        return fact.job.terms.kept
    if not isinstance(fact, _OfJob):
        return not isinstance(fact, facts.WorkerLoadChanged)
    opened = pool.jobs.get(fact.job_id)
    return opened is None or opened.job.terms.kept
