"""A signed statement of the log's size and root at a time.

Sources: C2SP ``tlog-checkpoint`` for the contents, C2SP ``signed-note`` for the
signature.  The name of a log is derived from its key, so that a checkpoint identifies
its log.  An extension line, which the first source allows, has the time.
"""

import hashlib
import re

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.ledger import keys
from shoal.ledger.canonical import from_base64, from_time, to_base64, to_time
from shoal.ledger.keys import Signer

_ED25519 = b"\x01"  # signed-note's number of the signature type
_ID_SIZE = 4  # bytes

_NOTE = re.compile(
    r"(?P<text>"
    r"(?P<origin>shoal/[0-9a-f]{16})\n"
    r"(?P<size>0|[1-9][0-9]{0,15})\n"
    r"(?P<root>[A-Za-z0-9+/]{43}=)\n"
    r"at (?P<at>[0-9T:.Z-]{24})\n"
    r")\n"
    r"\u2014 (?P<name>shoal/[0-9a-f]{16}) (?P<signature>[A-Za-z0-9+/]{91}=)\n",
    re.ASCII,
)


class Checkpoint(msgspec.Struct, frozen=True):
    """The contents of a checkpoint; ``at`` is Unix seconds."""

    size: int
    root: bytes
    at: float


def name_of(public_key: bytes) -> str:
    """Return the name of the log that a key signs."""
    return f"shoal/{hashlib.sha256(public_key).hexdigest()[:16]}"


def make(signer: Signer, size: int, root: bytes, at: float) -> str:
    """Encode and sign a checkpoint; ``at`` is Unix seconds."""
    name = name_of(signer.public_key)
    text = _text(name, size, root, at)
    signed = _key_id(name, signer.public_key) + signer.sign(text.encode())
    return f"{text}\n\u2014 {name} {to_base64(signed)}\n"


def origin_of(note: str) -> str:
    """Return the name of the log that a checkpoint says it is of."""
    return note.partition("\n")[0]


def read(note: str) -> Checkpoint:
    """Decode a checkpoint of one's own, without verifying it.

    Raises ValueError if it is damaged.
    """
    found = _NOTE.fullmatch(note)
    if found is None:
        raise ValueError("it is not in the form of a checkpoint")
    return Checkpoint(
        int(found["size"]), from_base64(found["root"]), from_time(found["at"])
    )


def verify(note: str, public_key: bytes) -> Checkpoint:
    """Decode a checkpoint that the owner of the key signed.

    It must be as ``make`` writes it, with this one signature: others could not be
    verified here.

    Raises InvalidRequest with the reason.
    """
    name = name_of(public_key)
    found = _NOTE.fullmatch(note)
    if found is None:
        raise InvalidRequest("the checkpoint is not in the form of a signed checkpoint")
    if (found["origin"], found["name"]) != (name, name):
        raise InvalidRequest(f"the checkpoint is of {found['origin']}, not of {name}")
    try:
        signed = from_base64(found["signature"])
        root = from_base64(found["root"])
        at = from_time(found["at"])
    except ValueError as error:
        raise InvalidRequest(f"the checkpoint cannot be read: {error}") from error
    key_id, signature = signed[:_ID_SIZE], signed[_ID_SIZE:]
    if key_id != _key_id(name, public_key):
        raise InvalidRequest("the checkpoint is signed by another key")
    if not keys.verify(public_key, signature, found["text"].encode()):
        raise InvalidRequest("the checkpoint's signature is wrong")
    return Checkpoint(int(found["size"]), root, at)


def _text(name: str, size: int, root: bytes, at: float) -> str:
    return f"{name}\n{size}\n{to_base64(root)}\nat {to_time(at)}\n"


def _key_id(name: str, public_key: bytes) -> bytes:
    named = name.encode() + b"\n" + _ED25519 + public_key
    return hashlib.sha256(named).digest()[:_ID_SIZE]
