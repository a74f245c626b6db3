"""Codes by which users let their private jobs go to workers, and who got in by them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PairingCode:
    """A code that one worker may claim.  Times are Unix seconds.

    ``owner`` and ``user`` are whose private jobs are meant, as in ``WorkerTrusted``.
    """

    code: str
    owner: str
    user: str
    expires_at: float
    public_key: str = ""  # whose worker claimed it
    claimed_at: float | None = None


@dataclass(frozen=True, slots=True)
class PairedWorker:
    """A worker that a user trusts with private jobs, and since when (Unix seconds)."""

    public_key: str
    paired_at: float


class PairingStore(Protocol):
    """Pairing codes; what comes of them is written by ``Store.append``.

    All methods raise StoreError.
    """

    async def add(self, code: PairingCode) -> bool:
        """Keep a code, unless there is one of that name; say whether it is kept."""
        ...

    async def find(self, code: str) -> PairingCode | None: ...

    async def claim(self, code: str, public_key: str, at: float) -> bool:
        """Note who has claimed a code; say whether it could be claimed at that time."""
        ...

    async def count_claimable(self, owner: str, at: float) -> int:
        """Return how many codes of an owner can still be claimed."""
        ...

    async def count_paired(self, owner: str) -> int:
        """Return how many workers the users of an owner trust, each for each user."""
        ...

    async def paired_workers(self, owner: str, user: str) -> list[PairedWorker]:
        """Return the workers that a user trusts, in the order in which they came."""
        ...
