"""API keys or join tokens in memory, in step with the store."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from shoal.domain import credentials
from shoal.domain.errors import InvalidRequest, NotFound, StoreError
from shoal.store.port import CredentialStore

CREDENTIALS_MAX = 100_000  # keys or tokens; ended ones are dropped later

C = TypeVar("C", credentials.Key, credentials.JoinToken)


class CredentialCache(Generic[C]):
    """Credentials of one kind, looked up by digest.

    ``what`` is the kind, for error messages.  Names are unique among credentials that
    are not revoked; ``reserved`` names cannot be used.
    """

    def __init__(
        self,
        what: str,
        kept: Iterable[C],
        store: CredentialStore[C],
        reserved: Iterable[str] = (),
    ) -> None:
        self._what = what
        self._store: CredentialStore[C] = store
        self._reserved = frozenset(reserved)
        self._by_id: dict[str, C] = {}
        self.by_id: Callable[[str], C | None] = self._by_id.get
        self._by_digest: dict[bytes, str] = {}  # the ids
        self._by_name: dict[str, str] = {}  # the ids of those that were not revoked
        self._listeners: list[Callable[[], None]] = []
        self._unsaved: set[str] = set()  # ids revoked here, but not in the store
        for each in kept:
            self._keep(each)

    def __iter__(self) -> Iterator[C]:
        return iter(list(self._by_id.values()))

    def on_change(self, call: Callable[[], None]) -> None:
        """Call ``call`` whenever a credential is no longer what it was."""
        self._listeners.append(call)

    def by_secret(self, secret: str) -> C | None:
        """Return the credential with this secret, even if it has ended."""
        return self.by_digest(credentials.digest_of(secret))

    def by_digest(self, digest: bytes) -> C | None:
        """Return the credential whose secret has this digest, even if it has ended."""
        # Timing reveals something about digests, and digests reveal no secret.
        id_ = self._by_digest.get(digest)
        return None if id_ is None else self._by_id[id_]

    def by_name(self, name: str) -> C | None:
        """Return the credential with this name that was not revoked."""
        found = self._by_id.get(self._by_name.get(name, ""))
        return None if found is None or found.revoked_at is not None else found

    def find(self, name: str) -> C:
        """Return the credential with this id, or with this name and not revoked.

        Raises NotFound.
        """
        found = self._by_id.get(name) or self._by_id.get(self._by_name.get(name, ""))
        if found is None:
            raise NotFound(f"there is no {self._what} {name}")
        return found

    def check_name(self, name: str) -> None:
        """Raise InvalidRequest if a new credential cannot have this name."""
        if not credentials.NAME_PATTERN.fullmatch(name):
            raise InvalidRequest(
                "name: expected up to 64 letters, digits and . _ @ -, got "
                f"{name[:80]!r}",
                "name",
            )
        if name in self._reserved:
            raise InvalidRequest(f"name: {name} is reserved", "name")
        if name in self._by_name:
            raise InvalidRequest(
                f"name: there is a {self._what} {name} already; revoke it first, or "
                "choose another name",
                "name",
            )

    async def add(self, new: C) -> None:
        """Store a new credential; it is valid once this returns.

        Raises InvalidRequest for a bad name or if there are too many, StoreError.
        """
        self.check_name(new.name)
        if len(self._by_id) >= CREDENTIALS_MAX:
            raise InvalidRequest(
                f"there are {CREDENTIALS_MAX} of them: revoke some first"
            )
        # Added before it is stored, so that its name is taken.  No client knows its
        # secret yet.
        self._keep(new)
        try:
            await self._store.add(new)
        except StoreError:
            self._drop(new)
            raise

    async def revoke(self, old: C, at: float) -> C:
        """Revoke a credential and return it.  Revoking it again changes nothing.

        Raises StoreError; it is revoked even then, until the next start, and keeps its
        name, so that revoking can be repeated.
        """
        if old.revoked_at is None:
            old = replace(old, revoked_at=at)
            self.update(old)
            self._unsaved.add(old.id)
        if old.id in self._unsaved:
            await self._store.revoke(old.id, at)
            self._unsaved.discard(old.id)
            self._by_name.pop(old.name, None)
        return old

    def update(self, changed: C) -> None:
        """Replace a credential by its changed version."""
        self._by_id[changed.id] = changed
        for call in self._listeners:
            call()

    def drop_ended(self, before: float) -> None:
        """Drop credentials that were revoked or had expired before then."""
        for each in self:
            if credentials.was_unusable_before(each, before):
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
