"""Pairing codes, with which users admit workers to their private jobs."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PairingCode:
    """A code that one worker may claim.  Times are Unix seconds.

    ``owner`` and ``user`` identify whose private jobs, as in ``WorkerTrusted``.
    """

    code: str
    owner: str
    user: str
    expires_at: float
    public_key: str = ""  # of the worker that claimed it
    claimed_at: float | None = None


@dataclass(frozen=True, slots=True)
class PairedWorker:
    """A worker that a user trusts with private jobs, and since when (Unix seconds)."""

    public_key: str
    paired_at: float


class PairingStore(Protocol):
    """Pairing codes; ``Store.append`` records the trust that results from them.

    All methods raise StoreError.
    """

    async def add(self, code: PairingCode) -> bool:
        """Add a code unless it exists; return whether it was added."""
        ...

    async def find(self, beginning: str) -> list[PairingCode]:
        """Return the codes that begin so.

        The caller compares the rest in constant time.
        """
        ...

    async def claim(self, code: str, public_key: str, at: float) -> bool:
        """Record the claim of a code; return whether it was claimable at that time."""
        ...

    async def count_claimable(self, owner: str, at: float) -> int:
        """Return how many codes of an owner can still be claimed."""
        ...

    async def count_paired(self, owner: str) -> int:
        """Return the number of pairs of a user of the owner and a trusted worker."""
        ...

    async def paired_workers(self, owner: str, user: str) -> list[PairedWorker]:
        """Return the workers that a user trusts, in the order of their pairing."""
        ...
