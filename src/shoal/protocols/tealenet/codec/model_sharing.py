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
from shoal.protocols.tealenet.codec import messages

ModelSharingMessage = (
    messages.ModelQueryRequest
    | messages.ModelQueryResponse
    | messages.ModelTransferRequest
    | messages.ModelTransferChunk
    | messages.ModelTransferComplete
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
            return messages.ModelQueryRequest(model)
        case ModelAnswer(model, available, size):
            return messages.ModelQueryResponse(
                model, available, size if available else 0
            )
        case ModelRequest(transfer_id, model):
            return messages.ModelTransferRequest(transfer_id, model)
        case ModelChunk(transfer_id, file_name, offset, data, last):
            return messages.ModelTransferChunk(
                transfer_id, file_name, offset, data, last
            )
        case ModelDone(transfer_id, model):
            return messages.ModelTransferComplete(transfer_id, model)
        case _:
            raise Unsupported(f"TealeNet has no message for {type(message).__name__}")


def read_model_message(message: ModelSharingMessage) -> ModelMessage:
    """Translate a message from the wire's."""
    match message:
        case messages.ModelQueryRequest(model):
            return ModelQuery(model)
        case messages.ModelQueryResponse(model, available, size):
            return ModelAnswer(model, available, size)
        case messages.ModelTransferRequest(transfer_id, model):
            return ModelRequest(transfer_id, model)
        case messages.ModelTransferChunk(transfer_id, file_name, offset, data, last):
            return ModelChunk(transfer_id, file_name, offset, data, last)
        case messages.ModelTransferComplete(transfer_id, model):
            return ModelDone(transfer_id, model)
