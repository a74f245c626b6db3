"""Keys of a fleet, made of its token, and what the fleet is called on a network.

The token is not stretched, so that whoever hears a proof can try tokens against it:
one that was made by chance, and not thought of, is safe from that.
"""

import hmac
from hashlib import sha256

from shoal.domain.errors import ConfigError

TOKEN_MIN = 8  # characters, as real peers want it
DEFAULT_FLEET = "default"
KEY_SIZE = 32  # bytes
OPEN_SERVICE = "_macfleet._tcp"
TOKEN_FILE = ".macfleet/fleet-token"
"""Where other programs of this wire keep the token, below the user's home folder."""
TOKEN_VARIABLE = "MACFLEET_TOKEN"
"""The environment variable that they take it from."""


def fleet_key(token: str, fleet: str = "") -> bytes:
    """Return the key of a fleet, 32 bytes; without a name it is ``default``.

    Raises ConfigError if the token is too short, or no text.
    """
    if len(token) < TOKEN_MIN:
        raise ConfigError(
            f"a fleet's token has at least {TOKEN_MIN} characters, and this one has "
            f"{len(token)}: take a longer one"
        )
    try:
        name = f"macfleet-v2:{fleet or DEFAULT_FLEET}".encode()
        return hmac.digest(token.encode(), name, "sha256")
    except UnicodeEncodeError as error:
        raise ConfigError("a fleet's token and its name have to be UTF-8") from error


def fleet_hash(key: bytes) -> str:
    """Return what a fleet is known by to those who do not have its key."""
    return sha256(key).hexdigest()[:8]


def service_type(key: bytes | None) -> str:
    """Return the kind of service that a fleet's nodes are (DNS-SD); None: open."""
    return OPEN_SERVICE if key is None else f"_mf-{fleet_hash(key)}._tcp"


def sign(key: bytes, *parts: bytes) -> bytes:
    """Return the proof, 32 bytes, that whoever wrote the parts has the key."""
    return hmac.digest(key, b"".join(parts), "sha256")


def is_signed(key: bytes, proof: bytes, *parts: bytes) -> bool:
    """Say whether a proof is right, in a time that tells nothing about it."""
    return hmac.compare_digest(sign(key, *parts), proof)
