"""What is kept together with a batch of facts, and of the ledger as a whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from shoal.domain.ids import JobId
from shoal.ledger.accounts import Transfer
from shoal.ledger.receipts import Claims
from shoal.store.calls import Call

Node: TypeAlias = tuple[int, int]
"""A complete subtree of the log: its level from the leaves up, and its place there."""


@dataclass(frozen=True, slots=True)
class Filed:
    """A receipt as it stands in the log; ``claims`` is what ``body`` says."""

    index: int
    claims: Claims
    body: bytes
    signature: bytes
    at: float = 0.0  # Unix seconds


@dataclass(frozen=True, slots=True)
class Head:
    """A checkpoint of the log: ``note`` is the signed text."""

    size: int
    root: bytes
    note: str
    at: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class Entries:
    """What follows from a batch of facts for the books."""

    transfers: Sequence[Transfer] = ()
    receipts: Sequence[Filed] = ()
    nodes: Sequence[tuple[int, int, bytes]] = ()
    head: Head | None = None
    calls: Sequence[Call] = ()


NO_ENTRIES = Entries()


@dataclass(frozen=True, slots=True)
class Account:
    """An account in micro-dollars; ``budget`` is how far below zero it may go."""

    name: str
    balance: int
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Posted:
    """A transfer as it stands in the books."""

    number: int
    at: float  # Unix seconds
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Opening:
    """What the books and the log begin with after a start."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    head: Head | None = None


class LedgerStore(Protocol):
    """Receipts, their log, and accounts, as ``Store.append`` has written them.

    All methods raise StoreError.
    """

    async def opening(self) -> Opening: ...

    async def nodes(self, wanted: Sequence[Node]) -> dict[Node, bytes]:
        """Return the hashes of complete subtrees; those that are not there are left
        out."""
        ...

    async def receipts_of(self, job_id: JobId) -> list[Filed]:
        """Return a job's receipts, the oldest first: one, and one for each that its
        worker gave later."""
        ...

    async def recent_receipts(self, owner: str | None, limit: int) -> list[Filed]:
        """Return the newest receipts, of one owner's jobs or all, the newest first."""
        ...

    async def claim(self, reference: str, job_id: JobId, at: float) -> bool:
        """Note which job a payment is for, unless it is for one; say whether it was
        noted."""
        ...

    async def head(self, size: int | None = None) -> Head | None:
        """Return the checkpoint of that size, or the newest."""
        ...

    async def accounts(self) -> list[Account]:
        """Return all accounts by name."""
        ...

    async def transfers(self, account: str, limit: int) -> list[Posted]:
        """Return the newest transfers from or to an account, the newest first."""
        ...
