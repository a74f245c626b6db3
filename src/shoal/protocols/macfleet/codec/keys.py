"""A fleet's key, derived from its token, and the signatures made with it.

The derivation is not stretched: an eavesdropper on a signature can test tokens offline.
Randomly generated tokens are safe from that, memorable ones are not.
"""

import hmac
from hashlib import sha256

from shoal.domain.errors import ConfigError

TOKEN_MIN = 8  # characters, as in upstream
DEFAULT_FLEET = "default"
KEY_SIZE = 32  # bytes
OPEN_SERVICE = "_macfleet._tcp"
TOKEN_FILE = ".macfleet/fleet-token"
"""Where MacFleet's own programs keep the token, relative to the home directory."""
TOKEN_VARIABLE = "MACFLEET_TOKEN"
"""The environment variable from which they read it."""


def fleet_key(token: str, fleet: str = "") -> bytes:
    """Return the key of a fleet, 32 bytes; the default fleet is ``default``.

    Raises ConfigError if the token is too short, or cannot be encoded.
    """
    if len(token) < TOKEN_MIN:
        raise ConfigError(
            f"a fleet's token has at least {TOKEN_MIN} characters, and this one has "
            f"{len(token)}: use a longer token"
        )
    try:
        name = f"macfleet-v2:{fleet or DEFAULT_FLEET}".encode()
        return hmac.digest(token.encode(), name, "sha256")
    except UnicodeEncodeError as error:
        raise ConfigError("a fleet's token and its id must be valid UTF-8") from error


def fleet_hash(key: bytes) -> str:
    """Return the public identifier of a fleet."""
    return sha256(key).hexdigest()[:8]


def service_type(key: bytes | None) -> str:
    """Return the DNS-SD service type of a fleet; without a key, of open fleets."""
    return OPEN_SERVICE if key is None else f"_mf-{fleet_hash(key)}._tcp"


def sign(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of the parts, 32 bytes."""
    return hmac.digest(key, b"".join(parts), "sha256")


def is_signed(key: bytes, proof: bytes, *parts: bytes) -> bool:
    """Verify an HMAC in constant time."""
    return hmac.compare_digest(sign(key, *parts), proof)
