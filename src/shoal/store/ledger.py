"""The port of the ledger store, and what it keeps with each batch of facts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.domain.ids import JobId
from shoal.ledger.accounts import Transfer
from shoal.ledger.merkle import MerkleNode, NodePosition
from shoal.ledger.receipts import Claims
from shoal.store.webhooks import WebhookDelivery


@dataclass(frozen=True, slots=True)
class LoggedReceipt:
    """A receipt as it stands in the log; ``claims`` is what ``body`` says."""

    index: int
    claims: Claims
    body: bytes
    signature: bytes
    at: float = 0.0  # Unix seconds


@dataclass(frozen=True, slots=True)
class LogHead:
    """A checkpoint of the log: ``note`` is the signed text."""

    size: int
    root: bytes
    note: str
    at: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class LedgerEntries:
    """What follows from a batch of facts for the books."""

    transfers: Sequence[Transfer] = ()
    receipts: Sequence[LoggedReceipt] = ()
    nodes: Sequence[MerkleNode] = ()
    head: LogHead | None = None
    deliveries: Sequence[WebhookDelivery] = ()


NO_ENTRIES = LedgerEntries()


@dataclass(frozen=True, slots=True)
class Account:
    """An account in micro-dollars; ``budget`` is how far below zero it may go."""

    name: str
    balance: int
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class PostedTransfer:
    """A transfer as it stands in the books."""

    number: int
    at: float  # Unix seconds
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class LedgerOpening:
    """What the books and the log begin with after a start."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    head: LogHead | None = None


class LedgerStore(Protocol):
    """Receipts, their log, and accounts, as ``Store.append`` has written them.

    All methods raise StoreError.
    """

    async def load(self) -> LedgerOpening:
        """Return what to go on from: all accounts, and the newest checkpoint."""
        ...

    async def nodes(self, wanted: Sequence[NodePosition]) -> dict[NodePosition, bytes]:
        """Return the hashes of complete nodes; those not there are left out."""
        ...

    async def receipts_of(self, job_id: JobId) -> list[LoggedReceipt]:
        """Return a job's receipts, the oldest first.

        There is one, and another if its worker gave its own later.
        """
        ...

    async def recent_receipts(
        self, owner: str | None, limit: int
    ) -> list[LoggedReceipt]:
        """Return the newest receipts, of one owner's jobs or all, the newest first."""
        ...

    async def claim_payment(self, reference: str, job_id: JobId, at: float) -> bool:
        """Note which job a payment is for; say whether it was for none before."""
        ...

    async def head(self, size: int | None = None) -> LogHead | None:
        """Return the checkpoint of that size, or the newest."""
        ...

    async def transfers(self, account: str, limit: int) -> list[PostedTransfer]:
        """Return the newest transfers from or to an account, the newest first.

        Those that are long past may not be looked for.
        """
        ...
