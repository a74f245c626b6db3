"""A node's hardware at the end of a message of the handshake, signed by the node.

It is read from the right, for what stands before it has no length of its own::

    version u8 | size u16 | hardware | HMAC, 32 bytes | size of all before this, u16

The HMAC covers version, the peer's challenge, the node's id, a colon and the hardware.
"""

import struct
from typing import NamedTuple

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.wire.hardware import HARDWARE_MAX, Profile, read_profile
from shoal.protocols.macfleet.wire.keys import KEY_SIZE, is_signed, sign

VERSION = 1
HEAD = struct.Struct("!BH")
TAIL = struct.Struct("!H")
BLOCK_MIN = HEAD.size + KEY_SIZE
BLOCK_MAX = BLOCK_MIN + HARDWARE_MAX


class Peeled(NamedTuple):
    """A message without its suffix, and what that said."""

    base: bytes
    hardware: Profile


def suffix(
    key: bytes, challenge: bytes, node_id: str, hardware: bytes, version: int = VERSION
) -> bytes:
    """Return the suffix that tells a peer our hardware, bound to its challenge."""
    head = HEAD.pack(version, len(hardware))
    proof = sign(key, *_signed(version, challenge, node_id, hardware))
    return head + hardware + proof + TAIL.pack(BLOCK_MIN + len(hardware))


def peel(key: bytes, challenge: bytes, node_id: str, payload: bytes) -> Peeled:
    """Take the suffix off a message; ``challenge`` is what we sent to the node.

    The hardware is not looked at before it is known to be the node's.

    Raises PeerError if there is no such suffix, or somebody else made it.
    """
    if len(payload) < TAIL.size:
        raise PeerError(f"a message of {len(payload)} bytes has no hardware at its end")
    end = len(payload) - TAIL.size
    (block,) = TAIL.unpack_from(payload, end)
    begin = end - block
    if not BLOCK_MIN <= block <= BLOCK_MAX or begin < 0:
        raise PeerError(
            f"the hardware at the end of a message of {len(payload)} bytes cannot be "
            f"{block} bytes long"
        )
    version, size = HEAD.unpack_from(payload, begin)
    if BLOCK_MIN + size != block:
        raise PeerError(f"hardware of {size} bytes is in a block of {block}")
    hardware = bytes(payload[begin + HEAD.size : end - KEY_SIZE])
    proof = bytes(payload[end - KEY_SIZE : end])
    if not is_signed(key, proof, *_signed(version, challenge, node_id, hardware)):
        raise PeerError(f"the hardware was not signed by {node_id!r} for this fleet")
    return Peeled(bytes(payload[:begin]), read_profile(hardware))


def _signed(
    version: int, challenge: bytes, node_id: str, hardware: bytes
) -> tuple[bytes, ...]:
    return (bytes([version]), challenge, node_id.encode(), b":", hardware)
