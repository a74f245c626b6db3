"""The contract of stores for receipts, their log and accounts."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from shoal.domain.errors import StoreError
from shoal.domain.facts import AccountLimited, JobCancelled, JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.outcome import Usage
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.work import Chat
from shoal.ledger import accounts
from shoal.ledger.keys import Signer
from shoal.ledger.merkle import (
    EMPTY_ROOT,
    Frontier,
    consistency_path,
    frontier_positions,
    inclusion_path,
    leaf_hash,
    node_hash,
    nodes_for_consistency,
    nodes_for_inclusion,
    root_from_inclusion,
    verify_consistency,
)
from shoal.ledger.notary import Notary
from shoal.ledger.receipts import Claims
from shoal.store.ledger import Account, LedgerEntries, LoggedReceipt, LogHead
from shoal.store.port import Store
from shoal.store.sqlite.database import SqliteStore

SIGNER = Signer.from_seed(b"s" * 32)
J = JobId("j1")


def claims(job_id: str, written: int | None = None) -> Claims:
    return Claims(
        job_id=JobId(job_id),
        worker="wire:w",
        worker_key="8a" * 32,
        output_hash="sha256:" + "0" * 64,
        prompt_tokens=3,
        completion_tokens=written,
        price=10_000,
        fee=500,
        payment_ref="tx1",
        at="2026-02-09T12:00:05.000Z",
        verdict=Verdict.VALID,
        worker_receipt=SignedReceipt(b"{}", b"s" * 64),
    )


class StoredLog:
    """Seals batches and stores them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.notary = Notary(SIGNER, Frontier(), 0, EMPTY_ROOT)

    async def add(
        self, *job_ids: str, at: float = 1.0, written: int | None = None
    ) -> None:
        said = [claims(job_id, written) for job_id in job_ids]
        sealed = self.notary.seal(said, at)
        filed = [
            LoggedReceipt(logged.index, each, logged.body, logged.signature, at)
            for each, logged in zip(said, sealed.receipts, strict=True)
        ]
        head = sealed.checkpoint
        entries = LedgerEntries(
            receipts=filed,
            nodes=sealed.nodes,
            head=LogHead(head.size, head.root, sealed.note, at),
        )
        await self.store.append([], at, (), entries)
        self.notary.commit(sealed)


async def test_new_store_is_empty(store: Store) -> None:
    opening = await store.ledger.load()

    assert opening.accounts == {}
    assert opening.head is None
    assert await store.ledger.receipts_of(J) == []
    assert await store.ledger.recent_receipts(None, 10) == []
    assert await store.ledger.transfers("user:al", 10) == []
    assert await store.ledger.receipt_owner(J) is None
    assert await store.ledger.nodes([(0, 0)]) == {}


async def test_receipts_survive_storage(store: Store) -> None:
    log = StoredLog(store)
    await log.add("j1", "j2", at=5.5)
    await log.add("j1", at=6.5)

    first, second = await store.ledger.receipts_of(J)
    assert (first.index, second.index) == (0, 2)
    assert first.claims == claims("j1")
    assert SIGNER.sign(b"shoal receipt v1\n" + first.body) == first.signature
    assert (first.at, second.at) == (5.5, 6.5)
    newest = await store.ledger.recent_receipts(None, 2)
    assert [each.index for each in newest] == [2, 1]


async def test_tokens_of_jobs_are_those_of_their_newest_receipts(store: Store) -> None:
    log = StoredLog(store)
    await log.add("j1", "j2")
    await log.add("j1", written=5)

    counted, uncounted, none = await store.runs([J, JobId("j2"), JobId("j3")])

    assert counted.usage == Usage(3, 5)
    assert (uncounted.usage, none.usage) == (None, None)


async def test_first_checkpoint_with_a_receipt_is_found(store: Store) -> None:
    log = StoredLog(store)
    await log.add("j1", "j2")
    await log.add("j3")

    found = [await store.ledger.head_after(index) for index in range(4)]

    assert [head and head.size for head in found] == [2, 2, 3, None]


async def test_last_receipts_of_a_long_log_are_listed(store: Store) -> None:
    await StoredLog(store).add(*(f"j{number}" for number in range(130)))

    newest = await store.ledger.recent_receipts(None, 2)
    head = await store.ledger.head()

    assert [each.index for each in newest] == [129, 128]
    assert head is not None
    assert head.size == 130


async def test_receipts_and_transfers_are_listed_page_by_page(store: Store) -> None:
    ledger = store.ledger
    await StoredLog(store).add("j1", "j2", "j3")
    for amount in (1, 2, 3):
        posted = LedgerEntries(accounts.credit("user:al", amount))
        await store.append([], float(amount), (), posted)

    receipts = await ledger.recent_receipts(None, 2)
    older = await ledger.recent_receipts(None, 2, receipts[-1].index)
    assert [each.index for each in (*receipts, *older)] == [2, 1, 0]
    transfers = await ledger.transfers("user:al", 2)
    earlier = await ledger.transfers("user:al", 2, transfers[-1].number)
    assert [each.transfer.amount for each in (*transfers, *earlier)] == [3, 2, 1]


async def test_receipts_are_found_by_owner(store: Store) -> None:
    for name, owner in (("j1", "al"), ("j2", "bo")):
        job = Job(JobId(name), Chat("m", ()), owner=owner)
        await store.append([JobSubmitted(job)], 1.0)
    await StoredLog(store).add("j1", "j2")

    (found,) = await store.ledger.recent_receipts("bo", 10)
    assert found.claims.job_id == "j2"


async def test_receipts_stay_with_their_owner_when_jobs_are_pruned(
    store: Store,
) -> None:
    job = Job(J, Chat("m", ()), owner="al")
    await store.append([JobSubmitted(job), JobCancelled(J, "")], 1.0)
    await StoredLog(store).add("j1", "unstored")

    assert await store.prune(10.0) == 1

    (found,) = await store.ledger.recent_receipts("al", 10)
    assert found.claims.job_id == J
    assert await store.ledger.receipts_of(J) == [found]
    assert await store.ledger.receipt_owner(J) == "al"
    assert await store.ledger.receipt_owner(JobId("unstored")) is None
    assert len(await store.ledger.recent_receipts(None, 10)) == 2


@pytest.mark.parametrize("sizes", [[1], [3, 1, 4], [8], [1] * 7, [5, 16]])
async def test_log_proves_every_leaf_and_every_growth(
    store: Store, sizes: list[int]
) -> None:
    log, names = StoredLog(store), iter(range(100))
    for size in sizes:
        await log.add(*(f"j{next(names)}" for _ in range(size)))
    ledger = store.ledger
    last = await ledger.head()
    assert last is not None
    assert last.size == sum(sizes)

    for filed in await ledger.recent_receipts(None, 100):
        nodes = await ledger.nodes(nodes_for_inclusion(filed.index, last.size))
        path = inclusion_path(filed.index, last.size, lambda *at: nodes[at])  # noqa: B023
        leaf = leaf_hash(filed.body)
        assert root_from_inclusion(filed.index, last.size, leaf, path) == last.root
    size = 0
    for grown in sizes:
        size += grown
        head = await ledger.head(size)
        assert head is not None
        nodes = await ledger.nodes(nodes_for_consistency(size, last.size))
        path = consistency_path(size, last.size, lambda *at: nodes[at])  # noqa: B023
        assert verify_consistency(size, last.size, head.root, last.root, path)


async def test_nodes_are_numbered_as_they_become_complete(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "shoal.db")
    await store.open()
    await StoredLog(store).add(*(f"j{number}" for number in range(8)))
    await store.close()

    with closing(sqlite3.connect(tmp_path / "shoal.db")) as sql:
        rows = sql.execute("SELECT number, hash FROM tree ORDER BY number").fetchall()

    # 0: the first leaf; 2: the node above it and the second; 14: the root.
    hashes = dict(rows)
    assert [*hashes] == [*range(15)]
    assert hashes[2] == node_hash(hashes[0], hashes[1])
    assert hashes[14] == node_hash(hashes[6], hashes[13])


async def test_log_continues_from_the_store(store: Store) -> None:
    log = StoredLog(store)
    await log.add("j1", "j2", "j3")
    head = (await store.ledger.load()).head
    assert head is not None
    places = frontier_positions(head.size)
    nodes = await store.ledger.nodes(places)
    frontier = Frontier(head.size, [nodes[place] for place in places])
    assert frontier.root() == head.root

    log.notary = Notary(SIGNER, frontier, head.size, head.root)
    await log.add("j4")

    now = await store.ledger.head()
    assert now is not None
    assert now.size == 4


async def test_balance_is_the_sum_of_transfers(store: Store) -> None:
    al, w = accounts.user_account("al"), "worker:w"
    moved = [
        *accounts.credit(al, 50_000),
        *accounts.reserve(J, al, 10_000),
        *accounts.settle(J, w, 10_000, 500),
    ]
    await store.append([], 1.0, (), LedgerEntries(moved[:2]))
    await store.append([], 2.0, (), LedgerEntries(moved[2:]))

    kept = (await store.ledger.load()).accounts
    assert kept[al].balance == 40_000
    assert kept[w].balance == 9_500
    assert sum(each.balance for each in kept.values()) == 0
    shown = await store.ledger.transfers(al, 10)
    assert [each.transfer for each in shown] == [moved[1], moved[0]]
    assert [each.at for each in shown] == [1.0, 1.0]
    assert len(await store.ledger.transfers("pool:held", 2)) == 2


async def test_transfers_of_both_sides_are_listed_newest_first(store: Store) -> None:
    al = accounts.user_account("al")
    moved = [
        *accounts.credit(al, 50_000),
        *accounts.reserve(J, al, 10_000),
        *accounts.release(J, al, 10_000),
    ]
    await store.append([], 1.0, (), LedgerEntries(moved))

    shown = await store.ledger.transfers(al, 10)

    assert [each.transfer for each in shown] == moved[::-1]


async def test_budget_is_set_changed_and_removed(store: Store) -> None:
    for budget in (5_000, 0, None):
        await store.append([AccountLimited("user:al", budget, "default")], 1.0)

        kept = (await store.ledger.load()).accounts
        assert kept == {"user:al": Account("user:al", 0, budget)}


async def test_failed_batch_transfers_nothing(store: Store) -> None:
    log = StoredLog(store)
    await log.add("j1")
    entries = LedgerEntries(
        accounts.credit("user:al", 1), [], [(0, 0, b"again")], LogHead(9, b"", "", 1.0)
    )

    with pytest.raises(StoreError):
        await store.append([], 1.0, (), entries)

    assert (await store.ledger.load()).accounts == {}
    head = await store.ledger.head()
    assert head is not None
    assert head.size == 1


async def test_payment_is_for_one_job(store: Store) -> None:
    assert await store.ledger.claim_payment(["TX", "n"], JobId("a"), 1.0)
    for names in (["TX"], ["n"], ["TX2", "n"], ["n2", "TX"]):
        assert not await store.ledger.claim_payment(names, JobId("b"), 2.0)
    assert not await store.ledger.claim_payment(["TX", "n"], JobId("a"), 3.0)
    assert await store.ledger.claim_payment(["TX2", "n2"], JobId("b"), 4.0)


async def test_payment_stays_used_after_its_job_is_pruned(store: Store) -> None:
    await store.ledger.claim_payment(["TX"], JobId("a"), 1.0)

    await store.prune(1e12)

    assert not await store.ledger.claim_payment(["TX"], JobId("b"), 2.0)
