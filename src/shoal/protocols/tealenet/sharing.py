"""The words of sharing models, and the messages that they are.

Source: TealeNet's "Cluster Messages", "Model Sharing".  Names and offsets are checked
by whoever shares, not here.
"""

from shoal.domain.errors import Unsupported
from shoal.domain.sharing import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelRequest,
    ModelWord,
)
from shoal.domain.sharing import ModelQuery as Query
from shoal.protocols.tealenet.messages import (
    ModelQuery,
    ModelQueryResponse,
    ModelTransferChunk,
    ModelTransferComplete,
    ModelTransferRequest,
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
        case ModelTransferChunk(transfer_id, file_name, offset, data, last):
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
