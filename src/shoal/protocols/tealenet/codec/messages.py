"""The cluster messages: the payload of each kind.

Source: TealeNet's "Cluster Messages", and what real peers do; see
``docs/protocols/tealenet.md``.  Fields that a Mac requires are written even at their
defaults; absent optional fields are left out, never ``null``.

The messages that copy models are those of ``domain/model_messages``.  Names and offsets
are checked by ``shoal.models``, not here.  The peer that sends a model sets the pace.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET

from shoal.domain.answer_assembly import CHOICES_MAX
from shoal.domain.errors import Unsupported
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelQuery,
    ModelRequest,
)
from shoal.protocols.seam.document_fields import Undocumented, Unread, Unwritten
from shoal.protocols.tealenet.codec import messages, scalars
from shoal.protocols.tealenet.codec.hardware import DeviceInfo

OFFSET_MAX = 2**63 - 1  # bytes
FILE_NAME_MAX = 1024  # characters


def _always_written(value: Any) -> Any:
    """Return a default that is written as well, because Macs require the field."""
    return msgspec.field(default_factory=lambda: value)


class _Payload(
    msgspec.Struct, frozen=True, omit_defaults=True, rename=scalars.wire_name
):
    """The base of all payloads: absent fields are omitted."""


class _Hello(_Payload, frozen=True):
    device_info: DeviceInfo
    protocol_version: scalars.Int
    loaded_models: scalars.Names = _always_written(())
    cluster_passcode_hash: scalars.Name | None = None
    owner_user_id: scalars.Name | None = None


class Hello(_Hello, frozen=True):
    """The first message: the device that dialled, and its models."""


class HelloAck(_Hello, frozen=True):
    """The answer to ``Hello``: the device that was dialled, and its models."""


class _Heartbeat(_Payload, frozen=True):
    device_id: Annotated[
        scalars.Id,
        Unread(
            "the connection names the peer; a Rust peer's id here differs from its "
            "`hello`"
        ),
    ]
    timestamp: Annotated[
        scalars.Date,
        Unread("the session's own clock decides liveness: a peer's may be wrong"),
    ]
    thermal_level: scalars.Name
    throttle_level: scalars.Int
    loaded_models: scalars.Names = _always_written(())
    is_generating: bool = _always_written(False)
    queue_depth: scalars.Int = _always_written(0)
    organization_id: scalars.Name | None = None
    owner_user_id: scalars.Name | None = None
    ewma_tokens_per_second: Annotated[
        float | None,
        Undocumented("only Rust peers send it, which tells them from Macs"),
        Unwritten("it would tell a Mac that this end is a Rust peer"),
    ] = None


class Heartbeat(_Heartbeat, frozen=True):
    """A peer's state; ``thermal_level`` may be unknown."""


class HeartbeatAck(_Heartbeat, frozen=True):
    """The answer to a heartbeat; a Mac's always has the same values."""


class InferenceRequest(_Payload, frozen=True):
    """A job for a peer; ``request`` is a complete OpenAI chat completion request."""

    request_id: scalars.Id
    request: dict[str, Any]
    streaming: bool = _always_written(False)


class ChunkUsage(msgspec.Struct, frozen=True):
    """Token usage.  A Mac requires all three fields."""

    prompt_tokens: scalars.Count = 0
    completion_tokens: scalars.Count = 0
    total_tokens: Annotated[scalars.Count, Unread("the sum of the other two")] = 0


class ChunkChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of one choice of an answer.

    Real peers leave an absent ``finish_reason`` out; the document writes null.
    """

    index: Annotated[int, msgspec.Meta(ge=0, lt=CHOICES_MAX)] = _always_written(0)
    delta: dict[str, Any] | None = _always_written({})
    logprobs: Annotated[Any, Undocumented("of OpenAI's chunk")] = None
    finish_reason: (
        Annotated[str, msgspec.Meta(max_length=64)] | msgspec.UnsetType | None
    ) = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of OpenAI's chat completion chunk that are read: see ``chunks``.

    The other fields differ between peers, and some peers omit them.
    """

    choices: list[ChunkChoice]
    usage: Annotated[ChunkUsage | None, Undocumented("of OpenAI's chunk")] = None


class InferenceChunk(_Payload, frozen=True):
    """A piece of the answer to a request."""

    request_id: scalars.Id
    chunk: ChatCompletionChunk


_OF_RUST_PEERS = Undocumented("Rust peers send it")
_NO_TOKENS = Unread("real peers count chunks, not tokens; the last chunk has the usage")


class InferenceComplete(_Payload, frozen=True):
    """The end of an answer.  Rust peers report the number of chunks as tokens."""

    request_id: scalars.Id
    tokens_in: Annotated[scalars.Count | None, _OF_RUST_PEERS, _NO_TOKENS] = None
    tokens_out: Annotated[scalars.Count | None, _OF_RUST_PEERS] = None


class InferenceError(_Payload, frozen=True):
    """The request failed or was refused; ``code`` may be unknown."""

    request_id: scalars.Id
    error_message: str
    code: Annotated[
        scalars.Name | None, Undocumented("real peers send it: `ErrorCode`")
    ] = None


class LoadModel(_Payload, frozen=True):
    """Asks a peer to load a model.  Rust peers read it, but no peer sends it."""

    request_id: scalars.Id
    model_id: scalars.Name


class ModelLoaded(_Payload, frozen=True):
    """The model is loaded; loading took ``load_time_ms`` milliseconds."""

    request_id: scalars.Id
    model_id: scalars.Name
    load_time_ms: scalars.Count


class ModelLoadError(_Payload, frozen=True):
    """The model could not be loaded."""

    request_id: scalars.Id
    model_id: scalars.Name
    reason: str


class ModelQueryRequest(_Payload, frozen=True):
    """Asks whether a peer has a model to copy."""

    model_id: scalars.Name


class ModelQueryResponse(_Payload, frozen=True):
    """Whether the model is available, and its approximate total size."""

    model_id: scalars.Name
    available: bool
    total_size_bytes: scalars.Count | None = None


class ModelTransferRequest(_Payload, frozen=True):
    """Requests a copy of a model; the requester chooses the transfer's id."""

    transfer_id: scalars.Uuid
    model_id: scalars.Name


class ModelTransferChunk(_Payload, frozen=True):
    """A chunk of a file, base64 on the wire; real peers send at most 1 MiB."""

    transfer_id: scalars.Uuid
    file_name: Annotated[str, msgspec.Meta(min_length=1, max_length=FILE_NAME_MAX)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)]
    data: bytes
    is_last_chunk: bool


class ModelTransferComplete(_Payload, frozen=True):
    """All files of the model were sent."""

    transfer_id: scalars.Uuid
    model_id: scalars.Name


SentMessage: TypeAlias = (
    Hello
    | HelloAck
    | Heartbeat
    | HeartbeatAck
    | InferenceRequest
    | InferenceComplete
    | InferenceError
    | LoadModel
    | ModelLoaded
    | ModelLoadError
    | ModelQueryRequest
    | ModelQueryResponse
    | ModelTransferRequest
    | ModelTransferChunk
    | ModelTransferComplete
)
"""The messages that ``encode`` writes; ``chunks`` writes ``inferenceChunk``."""

Message: TypeAlias = SentMessage | InferenceChunk

KINDS: Mapping[str, type[Message]] = {
    "hello": Hello,
    "helloAck": HelloAck,
    "heartbeat": Heartbeat,
    "heartbeatAck": HeartbeatAck,
    "inferenceRequest": InferenceRequest,
    "inferenceChunk": InferenceChunk,
    "inferenceComplete": InferenceComplete,
    "inferenceError": InferenceError,
    "loadModel": LoadModel,
    "modelLoaded": ModelLoaded,
    "modelLoadError": ModelLoadError,
    "modelQuery": ModelQueryRequest,
    "modelQueryResponse": ModelQueryResponse,
    "modelTransferRequest": ModelTransferRequest,
    "modelTransferChunk": ModelTransferChunk,
    "modelTransferComplete": ModelTransferComplete,
}


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
