"""Who is asking: API keys and whose they are."""

from collections.abc import Mapping

from shoal.domain.credentials import Key, Scope, digest_of
from shoal.domain.errors import ConfigError, KeyExpired, KeyRevoked, Unauthorized
from shoal.runtime.book import Book

NO_KEYS: Mapping[str, str] = {}
REVOKED = "the key was revoked"


class Keyring:
    """The keys that the coordinator was started with, and those that were made since.

    A key is looked up by its SHA-256, so how long that takes tells nothing about the
    keys there are, and does not depend on how many.
    """

    def __init__(self, book: Book[Key], first: Mapping[str, str] = NO_KEYS) -> None:
        """Take the first keys, which may do everything, by their names.

        Raises ConfigError if one is empty.
        """
        if empty := [name for name, key in first.items() if not key]:
            raise ConfigError(f"the API key {empty[0]} is empty")
        self.book = book
        self._first = {
            digest_of(key): Key("", name, digest_of(key), "", Scope.ADMIN, 0.0)
            for name, key in first.items()
        }

    def identify(
        self, authorization: str | None, at: float, *, exact: bool = False
    ) -> Key:
        """Return the key that an ``Authorization`` header carries at a Unix time.

        The scheme may be in any case (RFC 9110, section 11.1) unless ``exact``.

        Raises Unauthorized, saying what to do.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        known = scheme == "Bearer" if exact else scheme.lower() == "bearer"
        if not exact:
            secret = secret.strip()
        if not known or not secret:
            raise Unauthorized(
                "no API key: send the header `Authorization: Bearer KEY`; "
                "`shoal serve` prints the first key, `shoal keys create` makes others"
            )
        key = self._first.get(digest_of(secret)) or self.book.of(secret)
        if key is None:
            raise Unauthorized(
                "incorrect API key: `shoal serve` prints the first one when it "
                "starts, `shoal keys create` makes others"
            )
        self.check(key)
        if key.expires_at is not None and at >= key.expires_at:
            raise KeyExpired(
                f"the API key {key.name} has expired: ask whoever gave it to you for "
                "a new one"
            )
        return key

    def check(self, key: Key) -> None:
        """Raise KeyRevoked if a key that was good has been revoked since."""
        now = self.book.by_id(key.id)
        if now is not None and now.revoked_at is not None:
            raise KeyRevoked(
                f"{REVOKED} ({key.name}): ask whoever gave it to you for a new one"
            )
