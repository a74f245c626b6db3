"""API keys, join tokens and usage in the store that forgets."""

from dataclasses import replace
from typing import TypeVar

from shoal.domain.credentials import (
    JoinToken,
    Key,
    KeyUsage,
    day_of,
    partial_usage,
    usage_of,
    was_unusable_before,
)
from shoal.domain.errors import StoreError
from shoal.domain.outcome import Outcome
from shoal.domain.work import Job

C = TypeVar("C", Key, JoinToken)


class MemoryKeys:
    """Keeps everything in dictionaries."""

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}
        self._tokens: dict[str, JoinToken] = {}
        self._usage: dict[tuple[str, int], tuple[int, int, int]] = {}  # by day

    async def keys(self) -> list[Key]:
        return sorted(self._keys.values(), key=lambda key: key.created_at)

    async def add_key(self, key: Key) -> None:
        _add(self._keys, key)

    async def revoke_key(self, key_id: str, at: float) -> None:
        _revoke(self._keys, key_id, at)

    async def tokens(self) -> list[JoinToken]:
        return sorted(self._tokens.values(), key=lambda token: token.created_at)

    async def add_token(self, token: JoinToken) -> None:
        _add(self._tokens, token)

    async def revoke_token(self, token_id: str, at: float) -> None:
        _revoke(self._tokens, token_id, at)

    async def bind_worker(self, token_id: str, worker: str) -> None:
        token = self._tokens[token_id]
        self._tokens[token_id] = replace(token, workers=token.workers | {worker})

    async def usage_of(self, owner: str, today: int) -> KeyUsage:
        return (await self.usage_by_owner(today)).get(owner, KeyUsage())

    async def usage_by_owner(self, today: int) -> dict[str, KeyUsage]:
        found: dict[str, KeyUsage] = {}
        for (owner, day), (requests, read, written) in self._usage.items():
            before = found.get(owner, KeyUsage())
            found[owner] = KeyUsage(
                before.requests + requests,
                before.prompt_tokens + read,
                before.completion_tokens + written,
                before.tokens_today + (read + written if day == today else 0),
            )
        return found

    # The store's side.

    def count_usage(self, job: Job, end: Outcome | int, at: float) -> None:
        """Add what a job has used to its owner's day.

        ``end`` is its outcome, or how many characters there were when it was given up.
        """
        requests, read, written = self._usage.get((job.owner, day_of(at)), (0, 0, 0))
        work = job.work
        used = partial_usage(work, end) if isinstance(end, int) else usage_of(work, end)
        if used is None:
            return
        self._usage[job.owner, day_of(at)] = (
            requests + 1,
            read + used.prompt_tokens,
            written + used.completion_tokens,
        )

    def forget_ended(self, before: float) -> None:
        """Forget keys and tokens that were of no use by then."""
        self._keys = _living(self._keys, before)
        self._tokens = _living(self._tokens, before)


def _add(kept: dict[str, C], new: C) -> None:
    if any(
        each.id == new.id
        or each.digest == new.digest
        or (each.name == new.name and each.revoked_at is None)
        for each in kept.values()
    ):
        raise StoreError(f"there is {new.name} already")
    kept[new.id] = new


def _revoke(kept: dict[str, C], id_: str, at: float) -> None:
    if id_ in kept and kept[id_].revoked_at is None:
        kept[id_] = replace(kept[id_], revoked_at=at)


def _living(kept: dict[str, C], before: float) -> dict[str, C]:
    return {
        id_: each for id_, each in kept.items() if not was_unusable_before(each, before)
    }
