"""The words of sharing models, and the messages that they are.

Source: TealeNet's "Cluster Messages", "Model Sharing".  Names and offsets are checked
by whoever shares, not here.

Pieces of files are base64 in JSON.  Between peers of ours that announce ``raw`` they
are a message of their own without either, after a ``modelTransferChunk`` whose ``data``
is empty, and whose ``shoal.raw`` says how many bytes they have.
"""

from collections.abc import Sequence

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.sharing import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelRequest,
    ModelWord,
)
from shoal.domain.sharing import ModelQuery as Query
from shoal.protocols.session import Data
from shoal.protocols.tealenet.peer import Peer
from shoal.protocols.tealenet.wire.extension import (
    Ability,
    Following,
    read_following,
    write,
)
from shoal.protocols.tealenet.wire.messages import (
    ModelQuery,
    ModelQueryResponse,
    ModelTransferChunk,
    ModelTransferComplete,
    ModelTransferRequest,
    encode,
)

Shared = (
    ModelQuery
    | ModelQueryResponse
    | ModelTransferRequest
    | ModelTransferChunk
    | ModelTransferComplete
)

WORDS: frozenset[type] = frozenset(
    {Query, ModelAnswer, ModelRequest, ModelChunk, ModelDone}
)


def word_of(message: Shared) -> ModelWord:
    """Return what a message says."""
    match message:
        case ModelQuery(model):
            return Query(model)
        case ModelQueryResponse(model, available, size):
            return ModelAnswer(model, available, size)
        case ModelTransferRequest(transfer_id, model):
            return ModelRequest(transfer_id, model)
        case ModelTransferChunk(transfer_id, file_name, offset, data, last, _):
            return ModelChunk(transfer_id, file_name, offset, data, last)
        case ModelTransferComplete(transfer_id, model):
            return ModelDone(transfer_id, model)


def message_of(word: ModelWord) -> Shared:
    """Return how a word is said."""
    match word:
        case Query(model):
            return ModelQuery(model)
        case ModelAnswer(model, available, size):
            return ModelQueryResponse(model, available, size)
        case ModelRequest(transfer_id, model):
            return ModelTransferRequest(transfer_id, model)
        case ModelChunk(transfer_id, file_name, offset, data, last):
            return ModelTransferChunk(transfer_id, file_name, offset, data, last)
        case ModelDone(transfer_id, model):
            return ModelTransferComplete(transfer_id, model)
        case _:
            raise Unsupported(f"the wire has no word for {type(word).__name__}")


def written(word: ModelWord, peer: Peer | None, flat: bool) -> Sequence[bytes]:
    """Return the messages in which a word is said to a peer."""
    takes_raw = peer is not None and Ability.RAW in peer.features
    if not (takes_raw and isinstance(word, ModelChunk) and word.data):
        return (encode(message_of(word), flat),)
    head = ModelTransferChunk(
        word.transfer_id,
        word.file_name,
        word.offset,
        b"",
        word.last,
        write(Following(len(word.data))),
    )
    return (encode(head, flat), word.data)


class RawPieces:
    """What of models a peer sends as it is."""

    def __init__(self) -> None:
        self._head: ModelTransferChunk | None = None
        self._size = 0
        self.due = False  # whether the next message is a piece

    def announced(self, message: Shared, peer: Peer) -> bool:
        """Take a message; say whether the piece that it is about comes after it."""
        if not isinstance(message, ModelTransferChunk) or not peer.ours:
            return False
        following = read_following(message.shoal)
        if following is None:
            return False
        self._head, self._size, self.due = message, following.raw, True
        return True

    def take(self, data: Data) -> ModelChunk:
        """Return the piece that was due.  Raises PeerError if this is none."""
        head, self._head, self.due = self._head, None, False
        assert head is not None, "it was announced"
        if isinstance(data, str) or len(data) != self._size:
            raise PeerError(
                f"{head.file_name}: expected {self._size} bytes as they are, got "
                f"{len(data)}"
            )
        return ModelChunk(
            head.transfer_id,
            head.file_name,
            head.offset,
            data,
            head.is_last_chunk,
        )
