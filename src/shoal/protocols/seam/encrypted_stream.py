"""An encrypted byte stream: how it opens, and its records.

The dialling end sends ``PREFACE`` and the first message of a Noise handshake without
static keys; the other end answers with the second.  From then on the stream consists of
records: a 16-bit big-endian size, and that many bytes of ciphertext under the next
nonce.  A record has at most 65535 bytes (Noise, revision 34, section 3).

The handshake does not authenticate.  Its hash, the *binding*, is the same at both ends
of one stream and at no other, so a session authenticates its peer by proofs that cover
the binding: see ``token_proof``.
"""

import struct
from typing import Final

from shoal.domain.errors import PeerError
from shoal.protocols.seam import noise

# It is the prologue as well.  On wires with 32-bit lengths it is no valid length.
PREFACE: Final = b"shoal noise 1\n"
FIRST_SIZE: Final = len(PREFACE) + noise.KEY_SIZE  # bytes that the dialling end sends
SECOND_SIZE: Final = noise.SECOND_SIZE_MIN  # bytes of the answer
RECORD_MAX: Final = 65535  # bytes of ciphertext
PLAIN_MAX: Final = RECORD_MAX - noise.TAG_SIZE  # bytes of plaintext in a record

_SIZE = struct.Struct(">H")


def may_be_preface(beginning: bytes | bytearray) -> bool:
    """Return whether a stream that begins so may be an encrypted one."""
    size = min(len(beginning), len(PREFACE))
    return beginning[:size] == PREFACE[:size]


class RecordSealer:
    """Encrypts one direction of a stream."""

    def __init__(self, sealer: noise.Sealer) -> None:
        self._seal = sealer.seal

    def seal(self, data: bytes | memoryview) -> bytes:
        """Return the records of some bytes, in as few records as possible."""
        if len(data) <= PLAIN_MAX:
            _, sealed = self._seal(data)
            return _SIZE.pack(len(sealed)) + sealed
        view = memoryview(data)
        records: list[bytes] = []
        for at in range(0, len(view), PLAIN_MAX):
            _, sealed = self._seal(view[at : at + PLAIN_MAX])
            records += (_SIZE.pack(len(sealed)), sealed)
        return b"".join(records)


class RecordOpener:
    """Decrypts one direction of a stream; holds at most one incomplete record."""

    def __init__(self, opener: noise.Opener) -> None:
        self._open = opener.open
        self._number = 0
        self._held = bytearray()
        self._needed = _SIZE.size  # bytes that ``_held`` has to have

    def open(self, data: bytes) -> bytes:
        """Return what the complete records contain; empty if none is complete.

        Raises PeerError for a record that the other end did not seal, or not as the
        next one: it was changed, repeated, reordered or left out.
        """
        if self._held:
            self._held += data
            if len(self._held) < self._needed:
                return b""
            data = bytes(self._held)
            self._held.clear()
        view, end, at = memoryview(data), len(data), 0
        opened: list[bytes] = []
        self._needed = _SIZE.size
        while end - at >= _SIZE.size:
            (size,) = _SIZE.unpack_from(data, at)
            begin = at + _SIZE.size
            if end - begin < size:
                self._needed = _SIZE.size + size
                break
            plain = self._open(self._number, view[begin : begin + size])
            if plain is None:
                raise PeerError(f"record {self._number} of the stream is not genuine")
            self._number += 1
            opened.append(plain)
            at = begin + size
        self._held += view[at:]
        return opened[0] if len(opened) == 1 else b"".join(opened)
