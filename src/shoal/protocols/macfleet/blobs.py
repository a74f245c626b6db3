"""What is large among values, and travels apart: STATE frames, each a blob's pieces.

A blob is named by its SHA-256 digest, which goes before it, and is hashed as its pieces
come: of the largest at once that would take a sixth of a second.
"""

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import GiveBlob
from shoal.protocols.macfleet.voice import Voice
from shoal.protocols.macfleet.wire.beyond import DIGEST_SIZE, read_blob
from shoal.protocols.macfleet.wire.chunks import CHUNK
from shoal.protocols.macfleet.wire.frames import (
    STREAM,
    Frame,
    FrameType,
    Payload,
)
from shoal.protocols.session import Output

if TYPE_CHECKING:
    from hashlib import _Hash

REFERENCE = b"\xc7\x20\x02"
"""How a blob's name begins among values: MessagePack's ext, 32 bytes, of type 2."""


def names_blob(*parts: Payload) -> bool:
    """Say whether a blob may be named in a payload, so that it has to come before.

    Of a large one it is not asked: all large ones go in turn.
    """
    if sum(map(len, parts)) > CHUNK:
        return True
    return any(REFERENCE in bytes(part) for part in parts)


def give(word: GiveBlob, voice: Voice) -> Output:
    """Return how a blob goes to one of ours: in pieces, between which others go."""
    if len(word.data) + DIGEST_SIZE > CHUNK:
        return voice.say_in_pieces(
            FrameType.STATE, word.digest, word.data, stream=voice.new_stream()
        )
    payload = word.digest + bytes(word.data)
    return voice.say(FrameType.STATE, payload, STREAM, in_turn=True)


@dataclass(slots=True)
class _Hashing:
    digest: bytes
    hashed: "_Hash" = field(default_factory=hashlib.sha256)


class Coming:
    """The blobs that are on their way to us, by stream."""

    def __init__(self) -> None:
        self._hashing: dict[int, _Hashing] = {}

    def piece(self, frame: Frame) -> None:
        """Take note of a piece, which was found to be the next one of its stream.

        Raises PeerError if a blob begins without its digest.
        """
        data = memoryview(frame.payload)
        coming = self._hashing.get(frame.stream)
        if coming is None:
            if len(data) < DIGEST_SIZE:
                raise PeerError("a blob has no digest before it")
            coming = _Hashing(bytes(data[:DIGEST_SIZE]))
            self._hashing[frame.stream] = coming
            data = data[DIGEST_SIZE:]
        coming.hashed.update(data)

    def whole(self, frame: Frame) -> GiveBlob:
        """Return a blob that is whole.

        Raises PeerError if it is another than its digest says.
        """
        coming = self._hashing.pop(frame.stream, None)
        if coming is None:
            return GiveBlob(*read_blob(frame.payload))
        if coming.hashed.digest() != coming.digest:
            raise PeerError(
                f"a blob is not what its digest says: {coming.digest.hex()}"
            )
        return GiveBlob(*read_blob(frame.payload, check=False))
