"""Lines of the heartbeat port: a ping, and the pong that answers it.

Source: the MacFleet document, "Heartbeat".  Of an open fleet a line is a word and an
id; of others it also has a nonce and a signature, and, if there are five fields, the
hardware.  A pong is bound to its ping by nothing: whoever asks has to look at its id
and nonce.
"""

from binascii import unhexlify
from typing import NamedTuple

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.wire.hardware import HARDWARE_MAX
from shoal.protocols.macfleet.wire.keys import is_signed, sign

LINE_MAX = 64 << 10  # bytes
NONCE_SIZE = 16  # bytes of ours; peers may have others
FIELDS = (4, 5)  # of a line that is signed
SHOWN_MAX = 40  # bytes of a bad line


class Heard(NamedTuple):
    """What a line says.  ``hardware`` is JSON that nobody has looked at; None: none."""

    node_id: str
    nonce: bytes = b""
    hardware: bytes | None = None


def write_ping(key: bytes | None, ping: Heard) -> bytes:
    """Return the line that asks whether a node is there; without a key: openly."""
    return _write("PING", key, ping)


def write_pong(key: bytes | None, pong: Heard) -> bytes:
    """Return the line that answers, with hardware if the ping had it."""
    return _write("PONG", key, pong)


def read_ping(key: bytes | None, line: bytes) -> Heard:
    """Read a ping, with or without its end of line.  An open one may lack the id.

    Raises PeerError if it is none, or was not signed with the key.
    """
    return _read(b"PING", key, line)


def read_pong(key: bytes | None, line: bytes) -> Heard:
    """Read a pong, as ``read_ping`` does a ping."""
    return _read(b"PONG", key, line)


def _write(word: str, key: bytes | None, said: Heard) -> bytes:
    node_id, nonce, hardware = said
    if key is None:
        return f"{word} {node_id}\n".encode()
    proof = sign(key, *_signed(said))
    line = f"A{word} {node_id} {nonce.hex()} {proof.hex()}"
    return (line if hardware is None else f"{line} {hardware.hex()}").encode() + b"\n"


def _read(word: bytes, key: bytes | None, line: bytes) -> Heard:
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
        return Heard(" ".join(fields[1:]))
    if len(fields) not in FIELDS:
        raise PeerError(f"heartbeat line of {len(fields)} fields, expected 4 or 5")
    _, node_id, nonce, proof, *rest = fields
    if rest and len(rest[0]) > 2 * HARDWARE_MAX:
        raise LimitExceeded("hardware profile", len(rest[0]) // 2, HARDWARE_MAX)
    try:
        heard = Heard(node_id, unhexlify(nonce), unhexlify(rest[0]) if rest else None)
        signed = is_signed(key, unhexlify(proof), *_signed(heard))
    except ValueError as error:
        raise PeerError(f"heartbeat line: {error}") from error
    if not signed:
        raise PeerError(f"heartbeat of {node_id!r} was not signed for this fleet")
    return heard


def _signed(said: Heard) -> tuple[bytes, ...]:
    node_id, nonce, hardware = said
    parts = (node_id.encode(), b":", nonce)
    return parts if hardware is None else (*parts, b":", hardware)
