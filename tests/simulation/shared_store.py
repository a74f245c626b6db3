"""One database that all coordinators of a simulation use, each by its own session.

Commits fail before anything is written, succeed and lose their answers, and arrive long
after their coordinator has given them up, or was paused.
"""

import asyncio
import copy
from collections.abc import Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from shoal.domain.errors import Fenced, StoreError
from shoal.domain.facts import Fact
from shoal.ledger.merkle import Frontier
from shoal.store.ledger import NO_ENTRIES, LedgerEntries, LogHead
from shoal.store.port import CommitId, Epoch, RecordedFact
from shoal.store.sqlite.database import SqliteStore

ANSWER_WITHIN = 5.0  # seconds after which a commit's outcome is unknown
HANGS = (0.0, 20.0)  # seconds for which a commit hangs, from and to


@dataclass
class StoreFaults:
    """What goes wrong with a database until a time, and how often it has."""

    full_until: float = 0.0
    silent_until: float = 0.0  # it commits, and nobody learns it
    hangs_until: float = 0.0
    away_until: float = 0.0
    failures: int = 0
    unanswered: int = 0
    fenced: int = 0
    heads: list[LogHead] = field(default_factory=list)


class SharedStore(SqliteStore):
    """A session of the database, which is in memory; the first one opens it."""

    def __init__(self, random: Random) -> None:
        super().__init__(Path(":memory:"))
        self.faults = StoreFaults()
        self._random = random
        self.cut_until = 0.0  # of this session only
        self.epoch = Epoch(0)

    def session(self) -> "SharedStore":
        """Return the session of another coordinator."""
        other = copy.copy(self)
        other.cut_until = 0.0
        return other

    async def take_over(self) -> Epoch:
        self.check_connected()
        self.epoch = await super().take_over()
        return self.epoch

    async def append(
        self,
        facts: Sequence[Fact],
        at: float,
        earlier: Sequence[RecordedFact] = (),
        entries: LedgerEntries = NO_ENTRIES,
        commit: CommitId | None = None,
    ) -> None:
        faults, now = self.faults, asyncio.get_running_loop().time()
        if now < faults.full_until:
            faults.failures += 1
            await asyncio.sleep(0.0)  # the writer's thread answers a turn later
            raise StoreError("database or disk is full", temporary=True)
        self.check_connected()
        write = self._write(facts, at, earlier, entries, commit)
        if now < faults.hangs_until:
            await self._answer_of(write)
        else:
            await write
        if now < faults.silent_until:
            faults.unanswered += 1
            raise StoreError("connection reset by peer", temporary=True)

    async def confirm(self) -> None:
        """Look whether the epoch of this session lasts.  Raises Fenced."""
        self.check_connected()
        query = "SELECT epoch FROM writers WHERE name = 'hub'"
        ((present,),) = await self.database.read(lambda sql: sql.execute(query))
        if present != self.epoch:
            raise Fenced("another coordinator has taken over")

    async def balance(self) -> int:
        """Return the sum of all accounts."""
        query = "SELECT coalesce(sum(balance), 0) FROM accounts"
        ((total,),) = await self.database.read(lambda sql: sql.execute(query))
        return int(total)

    async def log_problems(self) -> list[str]:
        """Return which heads are not those of the log made anew from its receipts."""
        receipts = await self.ledger.recent_receipts(None, 1_000_000)
        heads = {head.size: head for head in self.faults.heads}
        frontier, problems = Frontier(), []
        for number, receipt in enumerate(reversed(receipts)):
            frontier.append(receipt.body)
            head = heads.pop(number + 1, None)
            if receipt.index != number:
                problems.append(f"receipt {number} is missing")
            if head is not None and head.root != frontier.root():
                problems.append(f"the head of size {number + 1} is another log's")
        return [*problems, *(f"no receipts for size {size}" for size in heads)]

    async def _write(
        self,
        facts: Sequence[Fact],
        at: float,
        earlier: Sequence[RecordedFact],
        entries: LedgerEntries,
        commit: CommitId | None,
    ) -> None:
        try:
            await super().append(facts, at, earlier, entries, commit)
        except Fenced:
            self.faults.fenced += 1
            raise
        if entries.transfers:
            assert await self.balance() == 0, "money was made or lost"
        if entries.head is not None:
            self.faults.heads.append(entries.head)

    async def _answer_of(self, write: Coroutine[Any, Any, None]) -> None:
        """Wait for a commit that hangs, which is made at last whoever waits for it."""
        loop = asyncio.get_running_loop()
        seconds = self._random.uniform(*HANGS)

        async def hang() -> None:
            await asyncio.sleep(seconds)
            await write

        # In the database's process, which goes on while the coordinator is paused.
        hanging = loop.create_task(hang(), context=Context())
        hanging.add_done_callback(_retrieve)
        await asyncio.wait([hanging], timeout=ANSWER_WITHIN)
        if not hanging.done():
            self.faults.unanswered += 1
            raise StoreError("the database did not answer in time", temporary=True)
        hanging.result()

    def check_connected(self) -> None:
        """Raise StoreError if this session cannot reach the database."""
        now = asyncio.get_running_loop().time()
        if now < self.cut_until or now < self.faults.away_until:
            raise StoreError("connection refused", temporary=True)


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # nobody may wait for it any more
