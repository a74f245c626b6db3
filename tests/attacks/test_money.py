"""Money is conserved, whatever workers, clients and the disk do."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random

import pytest
from msgspec.structs import replace

from coordinator.hubs import (
    Coordinator,
    ScriptedWorker,
    SlowStore,
    run_pending,
    running_coordinator,
)
from harness.profiles import some_long
from protocols.contexts import SIGNER
from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId
from shoal.domain.job import JobTerms, TimeLimits
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.vocabulary import Completed, Failed, ReceiptSent, Rejected, RunJob
from shoal.domain.work import JobKind, Task
from shoal.ledger.keys import Signer, verify
from shoal.ledger.receipts import PREFIX, output_of
from shoal.ledger.worker_receipts import output_hash_of
from shoal.pool.lifecycle import ENDED, JobState
from shoal.store.ledger import LoggedReceipt
from shoal.store.port import JobFilter
from simulation import virtual

SEEDS = range(25)
STEPS = 150
PRICE = 10_000
OWNERS = ("al", "bo")
LIMITS = TimeLimits(queue=20.0, first_output=15.0, silence=15.0, total=60.0)
SIGNERS = [Signer.from_seed(bytes([number]) * 32) for number in range(1, 5)]


class World:
    """Workers and clients with random behaviour."""

    def __init__(
        self, coordinator: Coordinator, random: Random, ids: Iterator[int]
    ) -> None:
        self.its = coordinator
        self.ids = ids
        self.random = random
        self.workers: list[tuple[ScriptedWorker, Signer | None]] = []
        self.ended: list[
            tuple[ScriptedWorker, RunJob]
        ] = []  # ended, and perhaps said again
        self.submitted: list[JobId] = []

    async def step(self) -> None:
        await self.random.choice(
            [self.join, self.submit, self.submit, self.cancel, self.wait]
            + [self.end, self.present, self.again, self.leave]
            + [self.end] * 6
        )()

    async def join(self) -> None:
        number = self.random.randrange(6)
        signer = SIGNERS[number] if number < len(SIGNERS) else None
        key = "" if signer is None else signer.public_key.hex()
        kinds = frozenset({JobKind.CHAT, JobKind.TASK})
        member = ScriptedWorker(
            self.its.hub, f"w{number}", kinds=kinds, slots=2, public_key=key
        )
        self.workers.append((member, signer))

    async def submit(self) -> None:
        terms = JobTerms(price=PRICE, user=self.random.choice("uv"), detached=True)
        kind = self.random.choice([JobKind.CHAT, JobKind.TASK])
        owner = self.random.choice(OWNERS)
        job = self.its.job(limits=LIMITS, owner=owner, kind=kind, terms=terms)
        job = replace(job, id=JobId(f"asked{next(self.ids)}"))
        try:
            async with self.its.hub.run_job(job):
                self.submitted.append(job.id)
        except ShoalError:
            pass  # nobody has the model yet

    async def cancel(self) -> None:
        if self.submitted:
            self.its.hub.cancel(self.random.choice(self.submitted), "cancelled")

    async def wait(self) -> None:
        await asyncio.sleep(self.random.choice([0.0, 0.01, 1.0, 6.0]))

    async def leave(self) -> None:
        if self.workers:
            member, _ = self.random.choice(self.workers)
            member.port.on_disconnect("left")

    async def end(self) -> None:
        """Report the end of a job, correctly or not, with a valid signature or not."""
        given = [(w, s, run) for w, s in self.workers for run in w.runs]
        if not given:
            return
        member, signer, run = self.random.choice(given[-6:])
        self.ended.append((member, run))
        what = self.random.randrange(12)
        if what == 0:
            member.emit(Rejected(run.job_id, run.lease, "no"))
        elif what == 1:
            member.emit(Failed(run.job_id, run.lease, "out of memory"))
        elif what == 2:
            member.write("tex", run=member.runs.index(run))
        else:
            self.complete(member, signer, run)

    def complete(
        self, member: ScriptedWorker, signer: Signer | None, run: RunJob
    ) -> None:
        output = json.dumps({"text": self.random.choice(["hi", "ho"])})
        receipt = None
        if signer is not None and self.random.random() < 0.8:
            receipt = self.receipt(run.job_id, output, signer)
        done = Completed(run.job_id, run.lease, rest=(output,), receipt=receipt)
        if not isinstance(run.work, Task):
            text = json.loads(output)["text"]
            done = Completed(
                run.job_id, run.lease, rest=(text,), output=output, receipt=receipt
            )
        member.emit(done)
        if signer is not None and receipt is None and self.random.random() < 0.5:
            signed = self.receipt(run.job_id, output, signer)
            member.emit(ReceiptSent(run.job_id, signed))

    async def present(self) -> None:
        for member, signer in self.workers:
            if signer is not None and self.submitted:
                job_id = self.random.choice(self.submitted)
                output = json.dumps({"text": "hi"})
                receipt = self.receipt(job_id, output, signer)
                member.emit(ReceiptSent(job_id, receipt))

    async def again(self) -> None:
        if self.ended:
            member, run = self.random.choice(self.ended)
            signer = next((s for m, s in self.workers if m is member), None)
            self.complete(member, signer, run)

    def receipt(self, job_id: JobId, output: str, signer: Signer) -> SignedReceipt:
        if self.random.random() < 0.1:
            output += " "  # what it signed is not what it gave
        claims = {
            "job_id": job_id,
            "provider_pubkey": signer.public_key.hex(),
            "output_hash": output_hash_of(output.encode()),
        }
        body = json.dumps(claims).encode()
        return SignedReceipt(body, signer.sign(body))


@pytest.mark.parametrize("seed", some_long(SEEDS, short=10))
def test_money_is_conserved(seed: int) -> None:
    random, ids = Random(seed), count()
    store = SlowStore()
    virtual.run(store.open())

    async def life() -> None:
        async with running_coordinator(store, hedge_after=5.0, fee=500) as coordinator:
            world = World(coordinator, random, ids)
            for _ in range(STEPS):
                await world.step()
                assert coordinator.hub.books.total() == 0
            if random.random() < 0.5:
                store.full = True  # and what is on its way is lost
                await world.submit()
                await run_pending()
                store.full = False

    async def the_end() -> None:
        async with running_coordinator(store, hedge_after=5.0, fee=500) as coordinator:
            await asyncio.sleep(LIMITS.total + 200.0)  # all that is open expires
            await check(coordinator)

    for _ in range(2):
        virtual.run(life())
    virtual.run(the_end())
    virtual.run(store.close())


async def check(coordinator: Coordinator) -> None:
    """Compare every account with the jobs and their receipts."""
    expected: Counter[str] = Counter()
    for row in (await coordinator.store.recent(JobFilter(), 10_000)).jobs:
        stored = await coordinator.store.job(row.id)
        assert stored is not None
        assert stored.state in ENDED
        filed = await coordinator.store.ledger.receipts_of(stored.job.id)
        assert bool(filed) == (stored.state is JobState.DONE)
        if stored.outcome is None:
            continue
        digest = output_hash_of(output_of(stored.job.work, stored.outcome))
        assert {each.claims.output_hash for each in filed} == {digest}
        last = filed[-1].claims
        assert len(filed) == 1 or filed[0].claims.verdict is Verdict.MISSING
        _count(expected, f"user:{stored.job.owner}/{stored.job.terms.user}", filed)
        assert last.price in (0, PRICE)
    books = coordinator.hub.books
    assert {name: books.balance(name) for name in books.account_names()} == {
        name: amount for name, amount in expected.items() if amount
    }
    assert books.balance("pool:held") == 0


def _count(expected: Counter[str], payer: str, filed: list[LoggedReceipt]) -> None:
    for each in filed:
        assert verify(SIGNER.public_key, each.signature, PREFIX + each.body)
    last = filed[-1].claims
    expected[payer] -= last.price
    if last.verdict in (Verdict.VALID, Verdict.UNSIGNED):
        key = last.worker_key if last.verdict is Verdict.VALID else last.worker
        expected[f"worker:{key}"] += last.price - last.fee
        expected["pool:fees"] += last.fee
    else:
        expected["pool:unproven"] += last.price
