"""Receipts, their log, and accounts, until the process ends."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from shoal.domain.facts import AccountLimited
from shoal.domain.ids import JobId
from shoal.ledger.merkle import NodePosition
from shoal.store.ledger import (
    Account,
    LedgerEntries,
    LedgerOpening,
    LoggedReceipt,
    LogHead,
    PostedTransfer,
)


class MemoryLedger:
    """Keeps the books in lists."""

    def __init__(self, owner_of: Callable[[JobId], str | None]) -> None:
        self._owner_of = owner_of
        self._accounts: dict[str, Account] = {}
        self._transfers: list[PostedTransfer] = []
        self._receipts: list[LoggedReceipt] = []
        self._nodes: dict[NodePosition, bytes] = {}
        self._heads: dict[int, LogHead] = {}
        self._payments: dict[str, JobId] = {}

    def write(self, entries: LedgerEntries, at: float) -> None:
        """Take in what belongs to a batch of facts."""
        for transfer in entries.transfers:
            posted = PostedTransfer(len(self._transfers) + 1, at, transfer)
            self._transfers.append(posted)
            self._add(transfer.debit, -transfer.amount)
            self._add(transfer.credit, transfer.amount)
        self._receipts += entries.receipts
        self._nodes |= {(level, place): hash for level, place, hash in entries.nodes}
        if entries.head is not None:
            self._heads[entries.head.size] = entries.head

    def limit(self, fact: AccountLimited) -> None:
        """Take in how far an account may go."""
        account = self._accounts.get(fact.account, Account(fact.account, 0))
        self._accounts[fact.account] = replace(account, budget=fact.budget)

    async def load(self) -> LedgerOpening:
        return LedgerOpening(dict(self._accounts), await self.head())

    async def nodes(self, wanted: Sequence[NodePosition]) -> dict[NodePosition, bytes]:
        return {place: self._nodes[place] for place in wanted if place in self._nodes}

    async def receipts_of(self, job_id: JobId) -> list[LoggedReceipt]:
        return [filed for filed in self._receipts if filed.claims.job_id == job_id]

    async def recent_receipts(
        self, owner: str | None, limit: int
    ) -> list[LoggedReceipt]:
        found = (
            filed
            for filed in reversed(self._receipts)
            if owner is None or self._owner_of(filed.claims.job_id) == owner
        )
        return list(islice(found, limit))

    async def claim_payment(self, reference: str, job_id: JobId, at: float) -> bool:
        if reference in self._payments:
            return False
        self._payments[reference] = job_id
        return True

    async def head(self, size: int | None = None) -> LogHead | None:
        if size is not None:
            return self._heads.get(size)
        return self._heads[max(self._heads)] if self._heads else None

    async def transfers(self, account: str, limit: int) -> list[PostedTransfer]:
        found = [
            posted
            for posted in reversed(self._transfers)
            if account in (posted.transfer.debit, posted.transfer.credit)
        ]
        return found[:limit]

    def _add(self, name: str, amount: int) -> None:
        account = self._accounts.get(name, Account(name, 0))
        self._accounts[name] = replace(account, balance=account.balance + amount)
