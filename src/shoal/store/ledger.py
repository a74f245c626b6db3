"""The ports of the ledger and of usage, and the entries written with facts.

Usage is what was used of which model, on which node, by which key, a day.
``Store.append`` counts that of a job together with its end.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from shoal.domain.ids import JobId
from shoal.ledger.accounts import Transfer
from shoal.ledger.merkle import MerkleNode, NodePosition
from shoal.ledger.receipts import Claims
from shoal.store.webhooks import WebhookDelivery

UsageField: TypeAlias = Literal["day", "key", "model", "node"]
"""What usage can be added up by, in the order in which lists are sorted."""

USAGE_DAYS = (
    400  # for which it is kept, so that a month can be compared with last year's
)
MINUTES_KEPT = 24 * 60
ROWS_PER_DAY_MAX = 10_000  # of keys, models and nodes; beyond it only the key is named


class JobPlace(NamedTuple):
    """The node that ran a job, and what the job cost its owner in micro-dollars.

    The node is empty for a call of a function; one that was free has no place.
    """

    node: str
    cost: int


NO_PLACE = JobPlace("", 0)


class Refund(NamedTuple):
    """Micro-dollars given back to the owner of a job that was counted before."""

    owner: str
    model: str
    node: str
    amount: int


@dataclass(frozen=True, slots=True)
class UsageSum:
    """Usage added up; None for fields that it is not grouped by.

    ``day`` is a ``day_of``.  Model and node are empty for calls of functions, and for
    usage of which they are not known.
    """

    day: int | None
    key: str | None
    model: str | None
    node: str | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: int  # micro-dollars


class UsagePlace(NamedTuple):
    """The place of a sum in a list: a day, key and model, and how many to leave out.

    Those are of this key and model: a place names no node.  Without ``day`` among the
    fields the day is any.
    """

    day: int
    key: str = ""
    model: str = ""
    skip: int = 0


@dataclass(frozen=True, slots=True)
class UsagePage:
    """Some sums, and the place of the next; None: there are no more.

    A page is short where many rows are added up to few sums.
    """

    sums: list[UsageSum]
    next: UsagePlace | None


class MinuteUsage(NamedTuple):
    """The jobs that were done in a minute, and the tokens that were written for jobs.

    ``running`` and ``queued`` are the jobs that were open once in this minute.
    ``minute`` is in minutes since 1970.
    """

    minute: int
    jobs: int
    tokens: int
    running: int = 0
    queued: int = 0


class UsageStore(Protocol):
    """Usage by day, key, model and node, and that of the last minutes."""

    async def minutes(self, since: int) -> list[MinuteUsage]:
        """Return the minutes from ``since`` on with a job that ended or was open.

        In order; the last ``MINUTES_KEPT`` are kept.  Raises StoreError.
        """

    async def record_open_jobs(self, minute: int, running: int, queued: int) -> None:
        """Record how many jobs are open; of a minute, the most are kept.

        Raises StoreError.
        """

    async def sums(
        self,
        since: int,
        until: int,
        by: Collection[UsageField],
        limit: int,
        owner: str | None = None,
        place: UsagePlace | None = None,
    ) -> UsagePage:
        """Add up the usage of the days from ``since`` to ``until``, both included.

        Returns at most ``limit`` sums, from ``place`` on.  ``owner``: only the usage of
        the keys of this name.  Raises StoreError.
        """


class LoggedReceipt(msgspec.Struct, frozen=True):
    """A receipt in the log; ``claims`` are the decoded ``body``."""

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
    """The changes to the ledger that result from a batch of facts.

    ``places`` has the jobs that a worker ended, or had when they were given up, for
    their usage.
    """

    transfers: Sequence[Transfer] = ()
    receipts: Sequence[LoggedReceipt] = ()
    nodes: Sequence[MerkleNode] = ()
    head: LogHead | None = None
    deliveries: Sequence[WebhookDelivery] = ()
    places: Mapping[JobId, JobPlace] = field(default_factory=dict)
    refunds: Sequence[Refund] = ()


NO_ENTRIES = LedgerEntries()


@dataclass(frozen=True, slots=True)
class Account:
    """An account in micro-dollars; ``budget`` is how far below zero it may go."""

    name: str
    balance: int
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class PostedTransfer:
    """A transfer that has been posted to the accounts."""

    number: int
    at: float  # Unix seconds
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class LedgerOpening:
    """The state of the accounts and of the log at the start of a coordinator."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    head: LogHead | None = None


class LedgerStore(Protocol):
    """Receipts, their log, and accounts, as ``Store.append`` wrote them.

    All methods raise StoreError.
    """

    async def load(self) -> LedgerOpening:
        """Return all accounts and the newest checkpoint."""

    async def nodes(self, wanted: Sequence[NodePosition]) -> dict[NodePosition, bytes]:
        """Return the hashes of complete nodes; missing nodes are left out."""

    async def receipts_of(self, job_id: JobId) -> list[LoggedReceipt]:
        """Return a job's receipts, the oldest first.

        There is a second one if the worker presented its own receipt later.
        """

    async def receipt_owner(self, job_id: JobId) -> str | None:
        """Return the owner of a job that has receipts, also after it was pruned."""

    async def recent_receipts(
        self, owner: str | None, limit: int, before: int | None = None
    ) -> list[LoggedReceipt]:
        """Return the newest receipts, of one owner's jobs or all, the newest first.

        ``before``: only those with a smaller index.  They stay when their jobs are
        pruned.
        """

    async def claim_payment(
        self, names: Collection[str], job_id: JobId, at: float
    ) -> bool:
        """Assign a payment to a job, unless it is assigned under one of its names.

        Returns whether it was unassigned.
        """

    async def head(self, size: int | None = None) -> LogHead | None:
        """Return the checkpoint of that size, or the newest."""

    async def head_after(self, index: int) -> LogHead | None:
        """Return the first checkpoint of a log that has the receipt of that index."""

    async def transfers(
        self, account: str, limit: int, before: int | None = None
    ) -> list[PostedTransfer]:
        """Return the newest transfers from or to an account, the newest first.

        ``before``: only those with a smaller number.
        """
