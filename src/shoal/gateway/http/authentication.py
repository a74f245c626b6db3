"""Authenticates callers: by API key, or as a program on this machine.

Browsers that are signed in are those of ``browser_sessions``.
"""

from collections.abc import Collection, Mapping

from multidict import CIMultiDictProxy

from shoal.coordinator.credential_cache import CredentialCache
from shoal.domain.addresses import is_loopback, is_own_host
from shoal.domain.credentials import Key, Scope, digest_of, without_fingerprint
from shoal.domain.errors import ConfigError, KeyExpired, KeyRevoked, Unauthorized
from shoal.gateway.http.web_origins import OWN_SITES, host_name

AUTHORIZATION = "Authorization"
BARE_KEY = "x-api-key"
"""The header in which Anthropic's clients send a key, without a scheme."""

NO_KEYS: Mapping[str, str] = {}
REVOKED = "the key was revoked"


def carries_key(headers: Mapping[str, str]) -> bool:
    """Say whether a request carries an API key, right or wrong."""
    return AUTHORIZATION in headers or BARE_KEY in headers


def authorization_in(headers: Mapping[str, str]) -> str | None:
    """Return the ``Authorization`` of a request, or the one that its bare key means.

    Raises Unauthorized if it carries two different keys.
    """
    authorization, bare = headers.get(AUTHORIZATION), headers.get(BARE_KEY)
    if bare is None or (not bare and authorization is not None):
        return authorization
    if authorization is not None:
        _, _, secret = authorization.partition(" ")
        if without_fingerprint(secret.strip())[0] != without_fingerprint(bare)[0]:
            raise Unauthorized(
                f"{AUTHORIZATION} and {BARE_KEY} have different keys: send one of them"
            )
        return authorization
    return f"Bearer {bare}"


def secret_in(authorization: str | None, *, exact: bool = False) -> str | None:
    """Return the key that an ``Authorization`` header carries, if it does.

    The scheme may be in any case (RFC 9110, section 11.1) unless ``exact``.
    """
    scheme, _, secret = (authorization or "").partition(" ")
    known = scheme == "Bearer" if exact else scheme.lower() == "bearer"
    if not exact:
        secret = secret.strip()
    return without_fingerprint(secret)[0] if known and secret else None


KEY_PREFIX = "sk-shoal-"
KEY_START = len(KEY_PREFIX) + 4  # characters that are shown, to recognise a key by


def shown_start(secret: str) -> str:
    """Return the start of a key for people; empty for one that an operator chose."""
    return secret[:KEY_START] if secret.startswith(KEY_PREFIX) else ""


class Keyring:
    """The keys that the coordinator was started with, and those created since.

    Keys are looked up by their SHA-256, so that timing reveals nothing about them.
    """

    def __init__(
        self, book: CredentialCache[Key], first: Mapping[str, str] = NO_KEYS
    ) -> None:
        """``first`` has the initial keys by name; their scope is admin.

        Raises ConfigError if one is empty.
        """
        if empty := [name for name, key in first.items() if not key]:
            raise ConfigError(f"the API key {empty[0]} is empty")
        self.cache = book
        self._first = {
            digest_of(key): Key(
                "", name, digest_of(key), shown_start(key), Scope.ADMIN, 0.0
            )
            for name, key in first.items()
        }

    @property
    def first(self) -> Collection[Key]:
        """The keys that the coordinator was started with."""
        return self._first.values()

    def authenticate(
        self, authorization: str | None, at: float, *, exact: bool = False
    ) -> Key:
        """Return the key that an ``Authorization`` header carries at a Unix time.

        ``exact`` is as in ``secret_in``.

        Raises Unauthorized, with what to do.
        """
        secret = secret_in(authorization, exact=exact)
        if secret is None:
            raise Unauthorized(
                "no API key: send the header `Authorization: Bearer KEY`, or "
                "`x-api-key: KEY`; `shoal serve` prints the first key, `shoal keys "
                "create` creates more"
            )
        key = self._first.get(digest_of(secret)) or self.cache.by_secret(secret)
        if key is None:
            raise Unauthorized(
                "incorrect API key: `shoal serve` prints the first one when it starts, "
                "`shoal keys create` creates more"
            )
        self.ensure_active(key, at)
        return key

    def by_digest(self, digest: bytes, at: float) -> Key:
        """Return the valid key with a digest at a Unix time.  Raises Unauthorized."""
        key = self._first.get(digest) or self.cache.by_digest(digest)
        if key is None:
            raise KeyRevoked(REVOKED)  # long ago, or it was a first key
        self.ensure_active(key, at)
        return key

    def of_owner(self, name: str, at: float) -> Key:
        """Return the valid key of a name at a Unix time.  Raises Unauthorized."""
        first = (each for each in self._first.values() if each.name == name)
        key = next(first, None) or self.cache.by_name(name)
        if key is None:
            raise KeyRevoked(f"{REVOKED} ({name})")
        self.ensure_active(key, at)
        return key

    def ensure_active(self, key: Key, at: float) -> None:
        """Raise KeyRevoked or KeyExpired if a key has ended by a Unix time."""
        now = self.cache.by_id(key.id)
        if now is not None and now.revoked_at is not None:
            raise KeyRevoked(f"{REVOKED} ({key.name}): ask the operator for a new one")
        if key.expires_at is not None and at >= key.expires_at:
            raise KeyExpired(
                f"the API key {key.name} has expired: ask the operator for a new one"
            )


FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
"""Headers of proxies: behind a local one, every client comes from 127.0.0.1."""


def is_local(address: str, headers: CIMultiDictProxy[str]) -> bool:
    """Say whether a request came from a program on this machine, not from a web page.

    Pages that this coordinator serves count as programs.
    """
    hosts = headers.getall("Host", [])
    if not is_loopback(address) or len(hosts) != 1 or not _names_loopback(hosts[0]):
        return False
    if any(name in headers for name in FORWARDED):
        return False
    if headers.get("Sec-Fetch-Site", "none") not in OWN_SITES:
        return False
    origins = headers.getall("Origin", [])
    own = {f"http://{hosts[0]}", f"https://{hosts[0]}"}
    return all(origin in own for origin in origins)


def _names_loopback(host: str) -> bool:
    name = host_name(host)
    return name is not None and is_own_host(name)
