"""The messages of the open handshake, of v1 and of v2, as bytes.

Nothing in them has a length of its own: an id is what is left when everything else has
been taken off the end::

         M1               M2                                M3
    open id               id
    v1   id | challenge   id | answer | challenge           answer
    v2   id | challenge   id | answer | challenge | suffix  answer | suffix

An answer is HMAC-SHA256 of the other's challenge under the fleet's key.  A suffix tells
the sender's hardware, bound to that challenge as well (``wire/suffix.py``).  All are
CONTROL frames on stream 0, with sequence 0.
"""

from typing import NamedTuple

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.handshake.steps import CHALLENGE, ID_MAX, Refusal
from shoal.protocols.macfleet.wire.frames import Frame, FrameType
from shoal.protocols.macfleet.wire.hardware import Profile
from shoal.protocols.macfleet.wire.keys import is_signed, sign
from shoal.protocols.macfleet.wire.suffix import TAIL, peel, suffix

ANSWER = 32  # bytes


class First(NamedTuple):
    """M1 of v1, v2 and the strong handshake, and M2 of the latter."""

    node_id: str
    challenge: bytes


class Second(NamedTuple):
    """M2 of v1 and v2; without hardware in v1."""

    node_id: str
    challenge: bytes
    profile: Profile | None


def control(payload: bytes, flags: int) -> Frame:
    """Return a message of the handshake as a frame."""
    return Frame(FrameType.CONTROL, 0, flags, 0, payload)


def read_id(data: bytes) -> str:
    """Read a node's id.

    Raises Refusal if it is too long, or no text.
    """
    if len(data) > ID_MAX:
        raise Refusal(f"a node's id of {len(data)} bytes, expected at most {ID_MAX}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Refusal(f"a node's id is not UTF-8 (byte {error.start})") from error


def write_first(node_id: str, challenge: bytes) -> bytes:
    """Write an id and a challenge."""
    return node_id.encode() + challenge


def read_first(payload: bytes) -> First:
    """Read an id and a challenge.

    Raises Refusal if there is no room for both, as in a guess, or the id is none.
    """
    if len(payload) <= CHALLENGE:
        raise Refusal(
            f"{len(payload)} bytes are no id and a challenge of {CHALLENGE}, with "
            "which a fleet that has a token is greeted",
            counts=True,
        )
    return First(read_id(payload[:-CHALLENGE]), payload[-CHALLENGE:])


def write_second(
    key: bytes, node_id: str, theirs: bytes, ours: bytes, profile: bytes | None
) -> bytes:
    """Answer the challenge ``theirs`` and put ``ours``; with hardware it is v2's."""
    message = node_id.encode() + sign(key, theirs) + ours
    if profile is None:
        return message
    return message + suffix(key, theirs, node_id, profile)


def read_second(key: bytes, payload: bytes, ours: bytes, *, signed: bool) -> Second:
    """Read the answer to the challenge ``ours``; ``signed``: it is v2's.

    The hardware has to be signed for the id that the message begins with.

    Raises PeerError if the sender does not have the key, or wrote something else.
    """
    base = payload[: -_block(payload)] if signed else payload
    if len(base) <= ANSWER + CHALLENGE:
        raise PeerError(
            f"an answer of {len(payload)} bytes has no room for an id, an answer of "
            f"{ANSWER} and a challenge of {CHALLENGE}"
        )
    node_id = read_id(base[: -ANSWER - CHALLENGE])
    profile = peel(key, ours, node_id, payload).hardware if signed else None
    if not is_signed(key, base[-ANSWER - CHALLENGE : -CHALLENGE], ours):
        raise PeerError("the answer to our challenge is wrong")
    return Second(node_id, base[-CHALLENGE:], profile)


def write_third(
    key: bytes, node_id: str, theirs: bytes, profile: bytes | None
) -> bytes:
    """Answer the challenge ``theirs``; with hardware it is v2's."""
    answer = sign(key, theirs)
    return answer if profile is None else answer + suffix(key, theirs, node_id, profile)


def read_third(
    key: bytes, node_id: str, payload: bytes, ours: bytes, *, signed: bool
) -> Profile | None:
    """Read a client's answer to the challenge ``ours``, as ``read_second``."""
    answer, profile = payload, None
    if signed:
        answer, profile = peel(key, ours, node_id, payload)
    if len(answer) != ANSWER or not is_signed(key, answer, ours):
        raise PeerError("the answer to our challenge is wrong")
    return profile


def _block(payload: bytes) -> int:
    """Return how many bytes at the end say that they are a suffix."""
    if len(payload) < TAIL.size:
        raise PeerError(f"an answer of {len(payload)} bytes has no hardware at its end")
    (size,) = TAIL.unpack_from(payload, len(payload) - TAIL.size)
    return TAIL.size + int(size)
