"""Lines of the heartbeat port: a ping, the pong that answers it, and their assembly.

Source: the MacFleet document, "Heartbeat".  In an open fleet a line is a word and a
node id; in a secure fleet it also has a nonce and a signature, and, if there are five
fields, the hardware.  Nothing binds a pong to its ping: the caller has to check id and
nonce.
"""

from binascii import unhexlify
from typing import NamedTuple

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec.hardware import HARDWARE_MAX
from shoal.protocols.macfleet.codec.keys import is_signed, sign
from shoal.protocols.seam.session import Batch

LINE_MAX = 64 << 10  # bytes
NONCE_SIZE = 16  # bytes of ours; peers may have others
FIELDS = (4, 5)  # of a line that is signed
SHOWN_MAX = 40  # bytes of a bad line


class HeartbeatLine(NamedTuple):
    """What a line says.  ``hardware`` is JSON that nobody has looked at; None: none."""

    node_id: str
    nonce: bytes = b""
    hardware: bytes | None = None


def encode_ping(key: bytes | None, ping: HeartbeatLine) -> bytes:
    """Return the line that asks whether a node is there; without a key: openly."""
    return _encode("PING", key, ping)


def encode_pong(key: bytes | None, pong: HeartbeatLine) -> bytes:
    """Return the line that answers, with hardware if the ping had it."""
    return _encode("PONG", key, pong)


def decode_ping(key: bytes | None, line: bytes) -> HeartbeatLine:
    """Read a ping, with or without its end of line.  An open one may lack the id.

    Raises PeerError if it is none, or was not signed with the key.
    """
    return _decode(b"PING", key, line)


def decode_pong(key: bytes | None, line: bytes) -> HeartbeatLine:
    """Read a pong, as ``decode_ping`` does a ping."""
    return _decode(b"PONG", key, line)


def _encode(word: str, key: bytes | None, heartbeat: HeartbeatLine) -> bytes:
    node_id, nonce, hardware = heartbeat
    if key is None:
        return f"{word} {node_id}\n".encode()
    proof = sign(key, *_signed(heartbeat))
    line = f"A{word} {node_id} {nonce.hex()} {proof.hex()}"
    return (line if hardware is None else f"{line} {hardware.hex()}").encode() + b"\n"


def _decode(word: bytes, key: bytes | None, line: bytes) -> HeartbeatLine:
    if len(line) > LINE_MAX:
        raise LimitExceeded("heartbeat line", len(line), LINE_MAX)
    # Real peers look no further than the beginning of the first word.
    if not line.startswith(word if key is None else b"A" + word):
        shown = bytes(line[:SHOWN_MAX])
        raise PeerError(
            f"expected {'' if key is None else 'A'}{word.decode()}, got {shown!r}"
        )
    try:
        fields = str(line, "utf-8").strip().split(" ")
    except UnicodeError as error:
        raise PeerError(f"heartbeat line: {error}") from error
    if key is None:
        return HeartbeatLine(" ".join(fields[1:]))
    if len(fields) not in FIELDS:
        raise PeerError(f"heartbeat line of {len(fields)} fields, expected 4 or 5")
    _, node_id, nonce, proof, *rest = fields
    if rest and len(rest[0]) > 2 * HARDWARE_MAX:
        raise LimitExceeded("hardware profile", len(rest[0]) // 2, HARDWARE_MAX)
    try:
        heard = HeartbeatLine(
            node_id, unhexlify(nonce), unhexlify(rest[0]) if rest else None
        )
        signed = is_signed(key, unhexlify(proof), *_signed(heard))
    except ValueError as error:
        raise PeerError(f"heartbeat line: {error}") from error
    if not signed:
        raise PeerError(f"heartbeat of {node_id!r} was not signed for this fleet")
    return heard


def _signed(heartbeat: HeartbeatLine) -> tuple[bytes, ...]:
    node_id, nonce, hardware = heartbeat
    parts = (node_id.encode(), b":", nonce)
    return parts if hardware is None else (*parts, b":", hardware)


class LineBuffer:
    """Puts together what arrives up to the end of the line; memory is bounded."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def partial(self) -> bytes:
        """What came of the line."""
        return bytes(self._buffer)

    def feed(self, batch: Batch) -> bytes | None:
        """Take what arrived; return the line when it is whole, without its end.

        Raises LimitExceeded if it gets too long.
        """
        for data in batch:
            if isinstance(data, str):
                raise PeerError("text message on a byte stream")
            piece, end, _ = data.partition(b"\n")
            self._buffer += piece
            if len(self._buffer) > LINE_MAX:
                raise LimitExceeded("heartbeat line", len(self._buffer), LINE_MAX)
            if end:
                return bytes(self._buffer)
        return None
