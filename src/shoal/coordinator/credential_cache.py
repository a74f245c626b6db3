"""API keys or join tokens in memory, in step with the store."""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from shoal.domain.credentials import (
    NAME_PATTERN,
    JoinToken,
    Key,
    digest_of,
    was_unusable_before,
)
from shoal.domain.errors import InvalidRequest, NotFound, StoreError

CREDENTIALS_MAX = 100_000  # keys or tokens; those that have ended are forgotten in time

C = TypeVar("C", Key, JoinToken)


class CredentialCache(Generic[C]):
    """Credentials of one kind, found by their digest without looking at the others.

    ``what`` is what one of them is called.  Names are unique among those that were not
    revoked; ``reserved`` ones are given to none.
    """

    def __init__(
        self,
        what: str,
        kept: Iterable[C],
        add: Callable[[C], Awaitable[None]],
        revoke: Callable[[str, float], Awaitable[None]],
        reserved: Iterable[str] = (),
    ) -> None:
        self._what = what
        self._add: Callable[[C], Awaitable[None]] = add
        self._revoke = revoke
        self._reserved = frozenset(reserved)
        self._by_id: dict[str, C] = {}
        self._by_digest: dict[bytes, str] = {}  # the ids
        self._by_name: dict[str, str] = {}  # the ids of those that were not revoked
        self._unsaved: set[str] = (
            set()
        )  # the ids of those revoked, but not in the store
        for each in kept:
            self._keep(each)

    def __iter__(self) -> Iterator[C]:
        return iter(list(self._by_id.values()))

    def by_secret(self, secret: str) -> C | None:
        """Return what a secret belongs to, also if that has ended."""
        # Whoever measures how long this takes learns of digests, and from a digest
        # there is no way back.
        id_ = self._by_digest.get(digest_of(secret))
        return None if id_ is None else self._by_id[id_]

    def by_id(self, id_: str) -> C | None:
        return self._by_id.get(id_)

    def find(self, name: str) -> C:
        """Return the one with this id, or with this name that was not revoked.

        Raises NotFound.
        """
        found = self._by_id.get(name) or self._by_id.get(self._by_name.get(name, ""))
        if found is None:
            raise NotFound(f"there is no {self._what} {name}")
        return found

    def check_name(self, name: str) -> None:
        """Raise InvalidRequest if a new one cannot be called so."""
        if not NAME_PATTERN.fullmatch(name):
            raise InvalidRequest(
                "name: expected up to 64 letters, digits and . _ @ -, got "
                f"{name[:80]!r}",
                "name",
            )
        if name in self._reserved:
            raise InvalidRequest(f"name: {name} means something else here", "name")
        if name in self._by_name:
            raise InvalidRequest(
                f"name: there is a {self._what} {name} already; revoke it first, or "
                "choose another name",
                "name",
            )

    async def add(self, new: C) -> None:
        """Keep a new one; it counts once this returns.

        Raises InvalidRequest if its name cannot be or there are too many, StoreError.
        """
        self.check_name(new.name)
        if len(self._by_id) >= CREDENTIALS_MAX:
            raise InvalidRequest(
                f"there are {CREDENTIALS_MAX} of them: revoke some first"
            )
        # Known before it is stored, so that nobody else takes the name meanwhile.  Its
        # secret has been told to no one yet.
        self._keep(new)
        try:
            await self._add(new)
        except StoreError:
            self._drop(new)
            raise

    async def revoke(self, old: C, at: float) -> C:
        """End one; return it as it is now.  Revoking it again changes nothing.

        Raises StoreError.  It has ended all the same, until the next start; it keeps
        its name, so that it can be revoked by it once more.
        """
        if old.revoked_at is None:
            old = replace(old, revoked_at=at)
            self.update(old)
            self._unsaved.add(old.id)
        if old.id in self._unsaved:
            await self._revoke(old.id, at)
            self._unsaved.discard(old.id)
            self._by_name.pop(old.name, None)
        return old

    def update(self, changed: C) -> None:
        """Replace one by how it is now."""
        self._by_id[changed.id] = changed

    def drop_ended(self, before: float) -> None:
        """Forget those that were revoked or had expired before then."""
        for each in self:
            if was_unusable_before(each, before):
                self._drop(each)

    def _keep(self, new: C) -> None:
        self._by_id[new.id] = new
        self._by_digest[new.digest] = new.id
        if new.revoked_at is None:
            self._by_name[new.name] = new.id

    def _drop(self, old: C) -> None:
        del self._by_id[old.id]
        self._unsaved.discard(old.id)
        del self._by_digest[old.digest]
        if self._by_name.get(old.name) == old.id:
            del self._by_name[old.name]
