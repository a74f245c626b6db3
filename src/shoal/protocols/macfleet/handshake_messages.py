"""The messages of the open handshake, of v1 and of v2, as bytes.

No field has a length of its own: the id is what remains when everything else has been
removed from the end::

         M1               M2                                M3
    open id               id
    v1   id | challenge   id | answer | challenge           answer
    v2   id | challenge   id | answer | challenge | suffix  answer | suffix

An answer is HMAC-SHA256 of the other end's challenge under the fleet's key.  All
messages are CONTROL frames on stream 0, with sequence 0.  A suffix has the sender's
hardware and is read from the right::

    version u8 | size u16 | hardware | HMAC, 32 bytes | size of all before this, u16

Its HMAC covers version, the other end's challenge, the sender's id, a colon and the
hardware.
"""

import struct
from dataclasses import replace
from typing import NamedTuple

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.frames import Frame, FrameType
from shoal.protocols.macfleet.codec.hardware import (
    HARDWARE_MAX,
    WIRE_VERSION,
    HardwareProfile,
    decode_profile,
)
from shoal.protocols.macfleet.codec.keys import KEY_SIZE, is_signed, sign

ID_MAX = 256  # bytes of a node's id in UTF-8
CHALLENGE_SIZE = 32  # bytes
ANSWER_SIZE = 32  # bytes
FIRST_MAX = ID_MAX + CHALLENGE_SIZE  # bytes of the first message
MESSAGE_MAX = 10 << 10  # bytes of any other: 8 KiB of hardware, ids and signatures

SUFFIX_HEADER = struct.Struct("!BH")
SUFFIX_TRAILER = struct.Struct("!H")
BLOCK_MIN = SUFFIX_HEADER.size + KEY_SIZE
BLOCK_MAX = BLOCK_MIN + HARDWARE_MAX


class HandshakeRefused(PeerError):
    """The handshake failed.

    ``counts_as_failure``: the peer presented a wrong secret, or may have, so its
    address is rate-limited.  ``final``: dialling again with the same settings is
    useless; the text says what to change.  ``id_conflict``: the peer has this node's
    id.
    """

    def __init__(
        self,
        reason: str,
        *,
        counts_as_failure: bool = False,
        final: bool = False,
        id_conflict: bool = False,
    ) -> None:
        super().__init__(reason)
        self.counts_as_failure = counts_as_failure
        self.final = final
        self.id_conflict = id_conflict


class DecodedSuffix(NamedTuple):
    """A message without its suffix, and the hardware in the suffix."""

    message: bytes
    hardware: HardwareProfile


def encode_suffix(
    key: bytes,
    challenge: bytes,
    node_id: str,
    hardware: bytes,
    version: int = WIRE_VERSION,
) -> bytes:
    """Return the suffix with this node's hardware, bound to the peer's challenge."""
    head = SUFFIX_HEADER.pack(version, len(hardware))
    proof = sign(key, *_signed_parts(version, challenge, node_id, hardware))
    return head + hardware + proof + SUFFIX_TRAILER.pack(BLOCK_MIN + len(hardware))


def decode_suffix(
    key: bytes, challenge: bytes, node_id: str, payload: bytes
) -> DecodedSuffix:
    """Remove and verify a message's suffix; ``challenge`` is the one sent to the node.

    The hardware is parsed only after its signature has been verified.  Its version is
    that of the suffix, if that is not this node's.

    Raises PeerError if the suffix is missing, malformed or signed by another node.
    """
    if len(payload) < SUFFIX_TRAILER.size:
        raise PeerError(f"a message of {len(payload)} bytes has no hardware suffix")
    end = len(payload) - SUFFIX_TRAILER.size
    (block,) = SUFFIX_TRAILER.unpack_from(payload, end)
    start = end - block
    if not BLOCK_MIN <= block <= BLOCK_MAX or start < 0:
        raise PeerError(
            f"a hardware suffix of {block} bytes is invalid in a message of "
            f"{len(payload)} bytes"
        )
    version, size = SUFFIX_HEADER.unpack_from(payload, start)
    if BLOCK_MIN + size != block:
        raise PeerError(f"hardware of {size} bytes in a suffix of {block} bytes")
    hardware = bytes(payload[start + SUFFIX_HEADER.size : end - KEY_SIZE])
    proof = bytes(payload[end - KEY_SIZE : end])
    if not is_signed(key, proof, *_signed_parts(version, challenge, node_id, hardware)):
        raise PeerError(f"the hardware was not signed by {node_id!r} for this fleet")
    profile = decode_profile(hardware)
    if version != WIRE_VERSION:
        profile = replace(profile, wire_version=version)
    return DecodedSuffix(bytes(payload[:start]), profile)


def _signed_parts(
    version: int, challenge: bytes, node_id: str, hardware: bytes
) -> tuple[bytes, ...]:
    return (bytes([version]), challenge, node_id.encode(), b":", hardware)


class FirstMessage(NamedTuple):
    """M1 of v1 and v2."""

    node_id: str
    challenge: bytes


class SecondMessage(NamedTuple):
    """M2 of v1 and v2; without hardware in v1."""

    node_id: str
    challenge: bytes
    profile: HardwareProfile | None


def control_frame(payload: bytes, flags: int) -> Frame:
    """Return a handshake message as a frame."""
    return Frame(FrameType.CONTROL, 0, flags, 0, payload)


def decode_id(data: bytes) -> str:
    """Decode a node's id.

    Raises HandshakeRefused if it is too long or not UTF-8.
    """
    if len(data) > ID_MAX:
        raise HandshakeRefused(
            f"a node's id of {len(data)} bytes, expected at most {ID_MAX}"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise HandshakeRefused(
            f"a node's id is not UTF-8 (byte {error.start})"
        ) from error


def encode_first(node_id: str, challenge: bytes) -> bytes:
    """Encode an id and a challenge."""
    return node_id.encode() + challenge


def decode_first(payload: bytes) -> FirstMessage:
    """Decode an id and a challenge.

    Raises HandshakeRefused if the message is too short (counted as a failure), or the
    id is invalid.
    """
    if len(payload) <= CHALLENGE_SIZE:
        raise HandshakeRefused(
            f"a first message of {len(payload)} bytes, expected an id and a challenge "
            f"of {CHALLENGE_SIZE} bytes: this fleet has a token",
            counts_as_failure=True,
        )
    return FirstMessage(decode_id(payload[:-CHALLENGE_SIZE]), payload[-CHALLENGE_SIZE:])


def encode_second(
    key: bytes,
    node_id: str,
    peer_challenge: bytes,
    own_challenge: bytes,
    profile: bytes | None,
) -> bytes:
    """Answer the peer's challenge and send this node's; with hardware in v2."""
    message = node_id.encode() + sign(key, peer_challenge) + own_challenge
    if profile is None:
        return message
    return message + encode_suffix(key, peer_challenge, node_id, profile)


def decode_second(
    key: bytes, payload: bytes, own_challenge: bytes, *, signed: bool
) -> SecondMessage:
    """Decode the answer to this node's challenge; ``signed``: with hardware (v2).

    The hardware must be signed for the id at the start of the message.

    Raises PeerError if the sender does not have the key, or the message is malformed.
    """
    message = payload[: -_suffix_size(payload)] if signed else payload
    if len(message) <= ANSWER_SIZE + CHALLENGE_SIZE:
        raise PeerError(
            f"an answer of {len(payload)} bytes is too short for an id, an answer of "
            f"{ANSWER_SIZE} bytes and a challenge of {CHALLENGE_SIZE}"
        )
    node_id = decode_id(message[: -ANSWER_SIZE - CHALLENGE_SIZE])
    profile = (
        decode_suffix(key, own_challenge, node_id, payload).hardware if signed else None
    )
    if not is_signed(
        key, message[-ANSWER_SIZE - CHALLENGE_SIZE : -CHALLENGE_SIZE], own_challenge
    ):
        raise PeerError("wrong answer to the challenge")
    return SecondMessage(node_id, message[-CHALLENGE_SIZE:], profile)


def encode_third(
    key: bytes, node_id: str, peer_challenge: bytes, profile: bytes | None
) -> bytes:
    """Answer the challenge ``peer_challenge``; with hardware in v2."""
    answer = sign(key, peer_challenge)
    return (
        answer
        if profile is None
        else answer + encode_suffix(key, peer_challenge, node_id, profile)
    )


def decode_third(
    key: bytes, node_id: str, payload: bytes, own_challenge: bytes, *, signed: bool
) -> HardwareProfile | None:
    """Decode and verify a client's answer, as ``decode_second`` does."""
    answer, profile = payload, None
    if signed:
        answer, profile = decode_suffix(key, own_challenge, node_id, payload)
    if len(answer) != ANSWER_SIZE or not is_signed(key, answer, own_challenge):
        raise PeerError("wrong answer to the challenge")
    return profile


def _suffix_size(payload: bytes) -> int:
    """Return the size of the suffix, as the end of the message states it."""
    if len(payload) < SUFFIX_TRAILER.size:
        raise PeerError(f"an answer of {len(payload)} bytes has no hardware suffix")
    (size,) = SUFFIX_TRAILER.unpack_from(payload, len(payload) - SUFFIX_TRAILER.size)
    return SUFFIX_TRAILER.size + int(size)
