"""Lines of the heartbeat port: encoding and decoding of pings and pongs.

Source: the MacFleet document, "Heartbeat".  In an open fleet a line is a word and a
node id; in a secure fleet it also has a nonce and a signature, and optionally the
hardware as a fifth field.  Nothing binds a pong to its ping, so the caller has to check
id and nonce.
"""

from binascii import unhexlify
from typing import NamedTuple

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec.hardware import HARDWARE_MAX
from shoal.protocols.macfleet.codec.keys import is_signed, sign
from shoal.protocols.seam.session import Batch

LINE_MAX = 64 << 10  # bytes
NONCE_SIZE = 16  # bytes of Shoal's; a peer's may have another size
FIELDS = (4, 5)  # of a signed line
SHOWN_MAX = 40  # bytes of an invalid line in an error


class HeartbeatLine(NamedTuple):
    """The fields of a line.  ``hardware`` is JSON that was not parsed; None: none."""

    node_id: str
    nonce: bytes = b""
    hardware: bytes | None = None


def encode_ping(key: bytes | None, ping: HeartbeatLine) -> bytes:
    """Return the line of a ping; without a key, of an open fleet."""
    return _encode("PING", key, ping)


def encode_pong(key: bytes | None, pong: HeartbeatLine) -> bytes:
    """Return the line of a pong; it has hardware if the ping had it."""
    return _encode("PONG", key, pong)


def decode_ping(key: bytes | None, line: bytes) -> HeartbeatLine:
    """Decode a ping, with or without its end of line.  An open one may lack the id.

    Raises PeerError if it is malformed, or was not signed with the key.
    """
    return _decode(b"PING", key, line)


def decode_pong(key: bytes | None, line: bytes) -> HeartbeatLine:
    """Decode a pong, as ``decode_ping`` does a ping."""
    return _decode(b"PONG", key, line)


def _encode(verb: str, key: bytes | None, heartbeat: HeartbeatLine) -> bytes:
    node_id, nonce, hardware = heartbeat
    if key is None:
        return f"{verb} {node_id}\n".encode()
    proof = sign(key, *_signed(heartbeat))
    line = f"A{verb} {node_id} {nonce.hex()} {proof.hex()}"
    return (line if hardware is None else f"{line} {hardware.hex()}").encode() + b"\n"


def _decode(verb: bytes, key: bytes | None, line: bytes) -> HeartbeatLine:
    if len(line) > LINE_MAX:
        raise LimitExceeded("heartbeat line", len(line), LINE_MAX)
    # Upstream compares the start of the first word only.
    if not line.startswith(verb if key is None else b"A" + verb):
        start = bytes(line[:SHOWN_MAX])
        raise PeerError(
            f"expected {'' if key is None else 'A'}{verb.decode()}, got {start!r}"
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
        heartbeat = HeartbeatLine(
            node_id, unhexlify(nonce), unhexlify(rest[0]) if rest else None
        )
        signed = is_signed(key, unhexlify(proof), *_signed(heartbeat))
    except ValueError as error:
        raise PeerError(f"heartbeat line: {error}") from error
    if not signed:
        raise PeerError(f"heartbeat of {node_id!r} was not signed for this fleet")
    return heartbeat


def _signed(heartbeat: HeartbeatLine) -> tuple[bytes, ...]:
    node_id, nonce, hardware = heartbeat
    parts = (node_id.encode(), b":", nonce)
    return parts if hardware is None else (*parts, b":", hardware)


class LineBuffer:
    """Collects bytes up to the end of the line; memory is bounded."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def partial(self) -> bytes:
        """The bytes so far."""
        return bytes(self._buffer)

    def feed(self, batch: Batch) -> bytes | None:
        """Add bytes; return the line without its end once it is complete.

        Raises LimitExceeded if it is too long.
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
