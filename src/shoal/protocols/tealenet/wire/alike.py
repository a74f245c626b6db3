"""Chunks of an answer that are alike but for their text: of those, it alone is read.

A peer writes the same around each piece of a text.  What that is, is found out from the
first chunk of an answer, and believed only if a chunk with another text in that place
is read as that text.
"""

from dataclasses import dataclass

import msgspec

from shoal.protocols.session import Data
from shoal.protocols.tealenet.wire.messages import BadMessage, InferenceChunk, decode
from shoal.protocols.tealenet.wire.scalars import written

KEY_SIZE = 76  # bytes of a chunk by which to look: up to its request's id, of 36

_FIELD = b'"content":'
_OTHER = "?"  # what makes another text of one


@dataclass(slots=True)
class Alike:
    """What stands before and after the text in the chunks of one answer.

    Not frozen, for its fields are read for each token.
    """

    before: bytes
    after: bytes

    @property
    def key(self) -> bytes:
        """What such chunks begin with."""
        return self.before[:KEY_SIZE]

    def text(self, data: Data) -> str | None:
        """Return the text of a chunk; None if it is not like the others."""
        before, after = self.before, self.after
        if (
            not isinstance(data, bytes)
            or not data.startswith(before)
            or not data.endswith(after)
        ):
            return None
        try:
            return _text.decode(data[len(before) : -len(after)])
        except ValueError:
            return None


def alike(data: Data, message: InferenceChunk, text: str) -> Alike | None:
    """Return what the chunks after ``data``, of which ``text`` was read, may share.

    None, if it is of a form that none of ours writes.
    """
    if not isinstance(data, bytes):
        return None
    before, field, rest = data.partition(_FIELD + written(text))
    found = Alike(before + _FIELD, rest)
    if not field or len(before) < KEY_SIZE:
        return None
    try:
        other = decode(found.before + written(text + _OTHER) + found.after)
    except BadMessage:
        return None
    if not isinstance(other, InferenceChunk) or not other.chunk.choices:
        return None
    delta = other.chunk.choices[0].delta
    if delta is None or delta.get("content") != text + _OTHER:
        return None
    delta["content"] = text
    return found if other == message else None


_text = msgspec.json.Decoder(str)
