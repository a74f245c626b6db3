"""Model sharing: the messages that copy models between peers.

Source: TealeNet's "Cluster Messages", "Model Sharing".  Names and offsets are checked
by ``shoal.models``, not here.

Chunks of files are base64 in JSON.  Between Shoal peers that announce ``raw``, a chunk
is sent as a separate message of raw bytes: it follows a ``modelTransferChunk`` whose
``data`` is empty and whose ``shoal.raw`` gives the number of bytes.  A request with
``shoal.window`` gets that many bytes, and more by each ``modelTransferPull``.
"""

from collections.abc import Sequence

from shoal.domain.errors import Unsupported
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelPull,
    ModelQuery,
    ModelRequest,
)
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.codec.extension import (
    RawChunkExtension,
    TransferRequestExtension,
    read_transfer_request,
    write_extension,
)
from shoal.protocols.tealenet.codec.messages import (
    ModelQueryRequest,
    ModelQueryResponse,
    ModelTransferChunk,
    ModelTransferComplete,
    ModelTransferPull,
    ModelTransferRequest,
)

ModelSharingMessage = (
    ModelQueryRequest
    | ModelQueryResponse
    | ModelTransferRequest
    | ModelTransferChunk
    | ModelTransferPull
    | ModelTransferComplete
)

MODEL_MESSAGES: frozenset[type] = frozenset(
    {ModelQuery, ModelAnswer, ModelRequest, ModelChunk, ModelPull, ModelDone}
)


def wire_message(message: ModelMessage) -> ModelSharingMessage:
    """Translate a message to the wire's."""
    match message:
        case ModelQuery(model):
            return ModelQueryRequest(model)
        case ModelAnswer(model, available, size):
            return ModelQueryResponse(model, available, size)
        case ModelRequest(transfer_id, model, 0):
            return ModelTransferRequest(transfer_id, model)
        case ModelRequest(transfer_id, model, window):
            shoal = write_extension(TransferRequestExtension(window))
            return ModelTransferRequest(transfer_id, model, shoal)
        case ModelPull(transfer_id, size):
            return ModelTransferPull(transfer_id, size)
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


def read_model_message(message: ModelSharingMessage) -> ModelMessage:
    """Translate a message from the wire's."""
    match message:
        case ModelQueryRequest(model):
            return ModelQuery(model)
        case ModelQueryResponse(model, available, size):
            return ModelAnswer(model, available, size)
        case ModelTransferRequest(transfer_id, model, shoal):
            request = read_transfer_request(shoal)
            window = 0 if request is None else request.window
            return ModelRequest(transfer_id, model, window)
        case ModelTransferPull(transfer_id, size):
            return ModelPull(transfer_id, size)
        case ModelTransferChunk(transfer_id, file_name, offset, data, last):
            return ModelChunk(transfer_id, file_name, offset, data, last)
        case ModelTransferComplete(transfer_id, model):
            return ModelDone(transfer_id, model)
