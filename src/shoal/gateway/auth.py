"""Who is asking: API keys and whose they are."""

import hashlib
from collections.abc import Mapping

from shoal.domain.errors import ConfigError, Unauthorized


class Keyring:
    """API keys by name.

    Holds digests only: a key is looked up by its SHA-256, so how long that takes
    tells nothing about the keys there are.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        """Take keys by the name of their owner; raises ConfigError if one is empty."""
        if empty := [name for name, key in keys.items() if not key]:
            raise ConfigError(f"the API key {empty[0]} is empty")
        self._owners = {_digest(key): name for name, key in keys.items()}

    def owner(self, authorization: str | None, *, exact: bool = False) -> str:
        """Return whose key an ``Authorization`` header carries.

        The scheme may be in any case (RFC 9110, section 11.1) unless ``exact``.

        Raises Unauthorized, saying what to do.
        """
        scheme, _, key = (authorization or "").partition(" ")
        known = scheme == "Bearer" if exact else scheme.lower() == "bearer"
        if not exact:
            key = key.strip()
        if not known or not key:
            raise Unauthorized(
                "no API key: send the header `Authorization: Bearer KEY`; "
                "`shoal serve` prints the key when it starts"
            )
        owner = self._owners.get(_digest(key))
        if owner is None:
            raise Unauthorized(
                "incorrect API key: `shoal serve` prints the right one when it starts"
            )
        return owner


def _digest(key: str) -> bytes:
    # Bytes of a header that are not UTF-8 arrive as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
