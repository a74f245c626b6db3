"""Pairing codes in the store that forgets."""

from collections.abc import Mapping
from dataclasses import replace

from shoal.domain.facts import WorkerTrusted
from shoal.store.pairing import PairedWorker, PairingCode


class MemoryPairing:
    """Keeps codes in a dictionary; ``trusted`` has when each worker was paired."""

    def __init__(self, trusted: Mapping[WorkerTrusted, float]) -> None:
        self._trusted = trusted
        self._codes: dict[str, PairingCode] = {}

    async def add(self, code: PairingCode) -> bool:
        return self._codes.setdefault(code.code, code) is code

    async def find(self, code: str) -> PairingCode | None:
        return self._codes.get(code)

    async def claim(self, code: str, public_key: str, at: float) -> bool:
        found = self._codes.get(code)
        if found is None or not _is_free(found, at):
            return False
        self._codes[code] = replace(found, public_key=public_key, claimed_at=at)
        return True

    async def count_claimable(self, owner: str, at: float) -> int:
        codes = self._codes.values()
        return sum(each.owner == owner and _is_free(each, at) for each in codes)

    async def count_paired(self, owner: str) -> int:
        return sum(each.owner == owner for each in self._trusted)

    async def paired_workers(self, owner: str, user: str) -> list[PairedWorker]:
        return [
            PairedWorker(each.public_key, at)
            for each, at in self._trusted.items()
            if (each.owner, each.user) == (owner, user)
        ]

    # The store's side.

    def forget_expired(self, before: float) -> None:
        """Forget the codes that nobody could claim any more by then."""
        self._codes = {
            name: code
            for name, code in self._codes.items()
            if code.expires_at >= before
        }


def _is_free(code: PairingCode, at: float) -> bool:
    return code.claimed_at is None and at < code.expires_at
