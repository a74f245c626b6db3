"""The cluster messages: the payload of each kind.

Source: TealeNet's "Cluster Messages", and what real peers do; see
``docs/protocols/tealenet.md``.  Fields that a Mac requires are written even at their
defaults; absent optional fields are left out, never ``null``.  The name of a payload's
class is its kind on the wire.
"""

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET

from shoal.domain.answer_assembly import CHOICES_MAX
from shoal.protocols.tealenet.codec.hardware import DeviceInfo
from shoal.protocols.tealenet.codec.scalars import (
    Count,
    Date,
    Id,
    Int,
    Name,
    Names,
    ShoalField,
    Uuid,
    wire_name,
)

OFFSET_MAX = 2**63 - 1  # bytes
FILE_NAME_MAX = 1024  # characters


def _always_written(value: Any) -> Any:
    """Return a default for reading that is written all the same, for Macs want it."""
    return msgspec.field(default_factory=lambda: value)


class _Hello(msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name):
    device_info: DeviceInfo
    protocol_version: Int
    loaded_models: Names = _always_written(())
    cluster_passcode_hash: Name | None = None
    owner_user_id: Name | None = None
    shoal: ShoalField = UNSET


class Hello(_Hello, frozen=True):
    """Who dialled, and what it has."""


class HelloAck(_Hello, frozen=True):
    """Who was dialled, and what it has."""


class _Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name):
    device_id: Id
    timestamp: Date
    thermal_level: Name
    throttle_level: Int
    loaded_models: Names = _always_written(())
    is_generating: bool = _always_written(False)
    queue_depth: Int = _always_written(0)
    organization_id: Name | None = None
    owner_user_id: Name | None = None
    ewma_tokens_per_second: float | None = None
    shoal: ShoalField = UNSET


class Heartbeat(_Heartbeat, frozen=True):
    """How a peer is doing; any word may stand for how hot it is."""


class HeartbeatAck(_Heartbeat, frozen=True):
    """The same; a Mac's says nothing but that it is there."""


class InferenceRequest(
    msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name
):
    """Work for a peer; ``request`` is OpenAI's chat completion request, whole."""

    request_id: Id
    request: dict[str, Any]
    streaming: bool = _always_written(False)
    shoal: ShoalField = UNSET


class ChunkUsage(msgspec.Struct, frozen=True):
    """Usage.  A Mac wants all three."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    total_tokens: Count = 0


class ChunkChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of one of a request's answers.

    ``shoal`` marks what a peer of ours gives as it is: nothing in it is left out.
    """

    index: Annotated[int, msgspec.Meta(ge=0, lt=CHOICES_MAX)] = _always_written(0)
    delta: dict[str, Any] | None = _always_written({})
    logprobs: Any = None
    finish_reason: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    shoal: Any = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """OpenAI's chat completion chunk, as far as it is read: see ``chunks``.

    Peers fill in the rest as they like, and some not at all.
    """

    choices: list[ChunkChoice]
    usage: ChunkUsage | None = None


class InferenceChunk(msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name):
    """A piece of the answer to a request."""

    request_id: Id
    chunk: ChatCompletionChunk


class InferenceComplete(
    msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name
):
    """The answer is whole.  Rust peers count chunks and call them tokens."""

    request_id: Id
    tokens_in: Count | None = None
    tokens_out: Count | None = None
    shoal: ShoalField = UNSET


class InferenceError(msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name):
    """The request was not done, or not to the end; ``code`` may be any word."""

    request_id: Id
    error_message: str
    code: Name | None = None
    shoal: ShoalField = UNSET


class InferenceCancel(msgspec.Struct, frozen=True, rename=wire_name):
    """Ours: nobody waits for the answer any more."""

    request_id: Id


class LoadModel(msgspec.Struct, frozen=True, rename=wire_name):
    """Make a model ready.  Rust peers know it, but none sends it."""

    request_id: Id
    model_id: Name


class ModelLoaded(msgspec.Struct, frozen=True, rename=wire_name):
    """The model is ready; it took ``load_time_ms`` milliseconds."""

    request_id: Id
    model_id: Name
    load_time_ms: Count


class ModelLoadError(msgspec.Struct, frozen=True, rename=wire_name):
    """The model cannot be made ready."""

    request_id: Id
    model_id: Name
    reason: str


class ModelQuery(msgspec.Struct, frozen=True, rename=wire_name):
    """Do you have this model, to be copied?"""

    model_id: Name


class ModelQueryResponse(
    msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name
):
    """Whether it is there, and how many bytes it has in all, about."""

    model_id: Name
    available: bool
    total_size_bytes: Count | None = None


class ModelTransferRequest(msgspec.Struct, frozen=True, rename=wire_name):
    """Send this model, under this id."""

    transfer_id: Uuid
    model_id: Name


class ModelTransferChunk(msgspec.Struct, frozen=True, rename=wire_name):
    """A piece of a file, in base64 on the wire; real peers' have 1 MiB at most."""

    transfer_id: Uuid
    file_name: Annotated[str, msgspec.Meta(min_length=1, max_length=FILE_NAME_MAX)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)]
    data: bytes
    is_last_chunk: bool
    shoal: ShoalField = UNSET


class ModelTransferComplete(msgspec.Struct, frozen=True, rename=wire_name):
    """All files of the model have been sent."""

    transfer_id: Uuid
    model_id: Name


SentMessage: TypeAlias = (
    Hello
    | HelloAck
    | Heartbeat
    | HeartbeatAck
    | InferenceRequest
    | InferenceComplete
    | InferenceError
    | InferenceCancel
    | LoadModel
    | ModelLoaded
    | ModelLoadError
    | ModelQuery
    | ModelQueryResponse
    | ModelTransferRequest
    | ModelTransferChunk
    | ModelTransferComplete
)
"""What ``encode`` writes; chunks are written by ``chunks``."""

Message: TypeAlias = SentMessage | InferenceChunk
