"""What is kept together with a batch of facts, and of the ledger as a whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.domain.ids import JobId
from shoal.ledger.accounts import Transfer
from shoal.ledger.merkle import Node, Place
from shoal.ledger.receipts import Claims
from shoal.store.calls import Call


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
    nodes: Sequence[Node] = ()
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

    async def opening(self) -> Opening:
        """Return what to go on from: all accounts, and the newest checkpoint."""
        ...

    async def nodes(self, wanted: Sequence[Place]) -> dict[Place, bytes]:
        """Return the hashes of complete nodes; those not there are left out."""
        ...

    async def receipts_of(self, job_id: JobId) -> list[Filed]:
        """Return a job's receipts, the oldest first.

        There is one, and another if its worker gave its own later.
        """
        ...

    async def recent_receipts(self, owner: str | None, limit: int) -> list[Filed]:
        """Return the newest receipts, of one owner's jobs or all, the newest first."""
        ...

    async def claim(self, reference: str, job_id: JobId, at: float) -> bool:
        """Note which job a payment is for; say whether it was for none before."""
        ...

    async def head(self, size: int | None = None) -> Head | None:
        """Return the checkpoint of that size, or the newest."""
        ...

    async def transfers(self, account: str, limit: int) -> list[Posted]:
        """Return the newest transfers from or to an account, the newest first.

        Those that are long past may not be looked for.
        """
        ...
