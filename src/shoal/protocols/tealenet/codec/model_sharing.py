"""Model sharing: the messages that copy models between peers.

Source: TealeNet's "Cluster Messages", "Model Sharing".  Names and offsets are checked
by ``shoal.models``, not here.  The peer that sends a model sets the pace.
"""

from shoal.domain.errors import Unsupported
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelQuery,
    ModelRequest,
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
    """Translate a message to the wire's, which has no windows.

    Raises Unsupported for other messages.
    """
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


def read_model_message(message: ModelSharingMessage) -> ModelMessage:
    """Translate a message from the wire's."""
    match message:
        case ModelQueryRequest(model):
            return ModelQuery(model)
        case ModelQueryResponse(model, available, size):
            return ModelAnswer(model, available, size)
        case ModelTransferRequest(transfer_id, model):
            return ModelRequest(transfer_id, model)
        case ModelTransferChunk(transfer_id, file_name, offset, data, last):
            return ModelChunk(transfer_id, file_name, offset, data, last)
        case ModelTransferComplete(transfer_id, model):
            return ModelDone(transfer_id, model)
