"""Model sharing: the messages that copy models between peers.

Source: TealeNet's "Cluster Messages", "Model Sharing".  Names and offsets are checked
by ``shoal.models``, not here.

Chunks of files are base64 in JSON.  Between Shoal peers that announce ``raw``, a chunk
is sent as a separate message of raw bytes: it follows a ``modelTransferChunk`` whose
``data`` is empty and whose ``shoal.raw`` gives the number of bytes.
"""

from collections.abc import Sequence

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelQuery,
    ModelRequest,
)
from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.codec.extension import (
    RawChunkExtension,
    read_raw_chunk,
    write_extension,
)
from shoal.protocols.tealenet.codec.messages import (
    ModelQueryRequest,
    ModelQueryResponse,
    ModelTransferChunk,
    ModelTransferComplete,
    ModelTransferRequest,
)

ModelSharingMessage = (
    ModelQueryRequest
    | ModelQueryResponse
    | ModelTransferRequest
    | ModelTransferChunk
    | ModelTransferComplete
)

MODEL_MESSAGES: frozenset[type] = frozenset(
    {ModelQuery, ModelAnswer, ModelRequest, ModelChunk, ModelDone}
)


def wire_message(message: ModelMessage) -> ModelSharingMessage:
    """Translate a message to the wire's."""
    match message:
        case ModelQuery(model):
            return ModelQueryRequest(model)
        case ModelAnswer(model, available, size):
            return ModelQueryResponse(model, available, size)
        case ModelRequest(transfer_id, model):
            return ModelTransferRequest(transfer_id, model)
        case ModelChunk(transfer_id, file_name, offset, data, last):
            return ModelTransferChunk(transfer_id, file_name, offset, data, last)
        case ModelDone(transfer_id, model):
            return ModelTransferComplete(transfer_id, model)
        case _:
            raise Unsupported(f"TealeNet has no message for {type(message).__name__}")


def encode_model_message(
    message: ModelMessage, *, raw: bool = False, flat: bool = False
) -> Sequence[bytes]:
    """Encode a message: two messages for a chunk of ``raw`` bytes, else one."""
    if not (raw and isinstance(message, ModelChunk) and message.data):
        return (encode(wire_message(message), flat),)
    head = ModelTransferChunk(
        message.transfer_id,
        message.file_name,
        message.offset,
        b"",
        message.last,
        write_extension(RawChunkExtension(len(message.data))),
    )
    return (encode(head, flat), message.data)


class ModelMessageReader:
    """Reads the model messages of one peer; raw chunks span two messages.

    ``expects_raw``: the next message is the bytes of a chunk, for ``read_raw``.
    """

    def __init__(self) -> None:
        self._head: ModelTransferChunk | None = None
        self._size = 0
        self.expects_raw = False

    def read(
        self, message: ModelSharingMessage, *, extended: bool
    ) -> ModelMessage | None:
        """Return a message's meaning; None if the bytes of its chunk follow.

        ``extended``: the peer runs Shoal.
        """
        match message:
            case ModelQueryRequest(model):
                return ModelQuery(model)
            case ModelQueryResponse(model, available, size):
                return ModelAnswer(model, available, size)
            case ModelTransferRequest(transfer_id, model):
                return ModelRequest(transfer_id, model)
            case ModelTransferComplete(transfer_id, model):
                return ModelDone(transfer_id, model)
            case ModelTransferChunk(transfer_id, file_name, offset, data, last, shoal):
                if extended and (announced := read_raw_chunk(shoal)) is not None:
                    self._head, self._size = message, announced.raw
                    self.expects_raw = True
                    return None
                return ModelChunk(transfer_id, file_name, offset, data, last)

    def read_raw(self, data: Data) -> ModelChunk:
        """Return the announced chunk.  Raises PeerError for a wrong size."""
        head, self._head, self.expects_raw = self._head, None, False
        assert head is not None, "a message announced it"
        if isinstance(data, str) or len(data) != self._size:
            raise PeerError(
                f"{head.file_name}: expected {self._size} raw bytes, got {len(data)}"
            )
        return ModelChunk(
            head.transfer_id, head.file_name, head.offset, data, head.is_last_chunk
        )
