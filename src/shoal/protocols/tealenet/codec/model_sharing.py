"""Model sharing: the messages that copy models between peers.

Source: TealeNet's "Cluster Messages", "Model Sharing".  The code that shares models
checks names and offsets, not this module.

Pieces of files are base64 in JSON.  Between Shoal's peers that announce ``raw``, a
piece is a message of its own, as it is: it follows a ``modelTransferChunk`` whose
``data`` is empty and whose ``shoal.raw`` gives the number of bytes.
"""

from collections.abc import Sequence

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelRequest,
)
from shoal.domain.model_messages import ModelQuery as Query
from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.codec.extension import (
    RawChunkExtension,
    ShoalFeature,
    read_raw_chunk,
    write_extension,
)
from shoal.protocols.tealenet.codec.messages import (
    ModelQuery,
    ModelQueryResponse,
    ModelTransferChunk,
    ModelTransferComplete,
    ModelTransferRequest,
)
from shoal.protocols.tealenet.peer import TealePeer

ModelSharingMessage = (
    ModelQuery
    | ModelQueryResponse
    | ModelTransferRequest
    | ModelTransferChunk
    | ModelTransferComplete
)

MODEL_WORDS: frozenset[type] = frozenset(
    {Query, ModelAnswer, ModelRequest, ModelChunk, ModelDone}
)


def read_model_message(message: ModelSharingMessage) -> ModelMessage:
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


def model_message(word: ModelMessage) -> ModelSharingMessage:
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


def encode_model_word(
    word: ModelMessage, peer: TealePeer | None, flat: bool
) -> Sequence[bytes]:
    """Return the messages in which a word is said to a peer."""
    takes_raw = peer is not None and ShoalFeature.RAW in peer.features
    if not (takes_raw and isinstance(word, ModelChunk) and word.data):
        return (encode(model_message(word), flat),)
    head = ModelTransferChunk(
        word.transfer_id,
        word.file_name,
        word.offset,
        b"",
        word.last,
        write_extension(RawChunkExtension(len(word.data))),
    )
    return (encode(head, flat), word.data)


class RawChunkReceiver:
    """What of models a peer sends as it is."""

    def __init__(self) -> None:
        self._head: ModelTransferChunk | None = None
        self._size = 0
        self.pending = False  # whether the next message is a piece

    def announces(self, message: ModelSharingMessage, peer: TealePeer) -> bool:
        """Take a message; say whether the piece that it is about comes after it."""
        if not isinstance(message, ModelTransferChunk) or not peer.runs_shoal:
            return False
        following = read_raw_chunk(message.shoal)
        if following is None:
            return False
        self._head, self._size, self.pending = message, following.raw, True
        return True

    def receive(self, data: Data) -> ModelChunk:
        """Return the piece that was due.  Raises PeerError if this is none."""
        head, self._head, self.pending = self._head, None, False
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
