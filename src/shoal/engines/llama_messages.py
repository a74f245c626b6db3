"""The messages between the embedded engine and its child process.

Messages are MessagePack, each prefixed with its size as four big-endian bytes.  Both
ends are the same version, so there is no negotiation.
"""

import struct
from typing import Any, TypeAlias

import msgspec

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.work import JobKind

SIZE = struct.Struct("!I")
MESSAGE_MAX = 16 * 1024 * 1024  # bytes; ten times the largest context


# To the child.


class OpenModel(msgspec.Struct, frozen=True, tag=True):
    """The first message: open this model."""

    path: str
    slots: int
    context: int  # tokens per slot
    threads: int


class StartJob(msgspec.Struct, frozen=True, tag=True):
    """Start a job.  ``request`` is in OpenAI's format, without the beginning."""

    id: int
    kind: JobKind
    request: dict[str, Any]
    beginning: str = ""
    max_tokens: int | None = None
    prompts: int = 1


class AbortJob(msgspec.Struct, frozen=True, tag=True):
    """Abort a job; an AnswerEnded or JobRefused still follows."""

    id: int


ToChild: TypeAlias = OpenModel | StartJob | AbortJob


# To the engine.


class ModelOpened(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded: for text generation, or for ``embeddings`` only.

    ``context`` is in tokens per slot.
    """

    context: int
    embeddings: bool


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Loading failed and the child exits; llama.cpp logs why to standard error."""

    reason: str


class TextPiece(msgspec.Struct, frozen=True, tag=True):
    """A piece of an answer: whole characters, never empty."""

    id: int
    text: str


class FieldsPiece(msgspec.Struct, frozen=True, tag=True):
    """A piece of an answer that is more than text."""

    id: int
    choice: int
    fields: dict[str, Any]
    logprobs: Any = None
    finish_reason: str | None = None


class AnswerEnded(msgspec.Struct, frozen=True, tag=True):
    """The answer is complete; tokens are counted as the Engine port requires."""

    id: int
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class JobRefused(msgspec.Struct, frozen=True, tag=True):
    """The job failed or was aborted; ``code`` is an HTTP status."""

    id: int
    reason: str
    code: int = 500


ToEngine: TypeAlias = (
    ModelOpened | LoadFailed | TextPiece | FieldsPiece | AnswerEnded | JobRefused
)

_encoder = msgspec.msgpack.Encoder()
_to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def encode_message(message: ToChild | ToEngine) -> bytes:
    """Encode a message with its size prefix.

    Raises LimitExceeded if it is larger than the receiver accepts.
    """
    data = _encoder.encode(message)
    check_size(len(data))
    return SIZE.pack(len(data)) + data


def message_size(header: bytes) -> int:
    """Decode the size prefix of a message.

    Raises LimitExceeded if the message is too large.
    """
    (size,) = SIZE.unpack(header)
    assert isinstance(size, int)
    check_size(size)
    return size


def check_size(size: int) -> None:
    if size > MESSAGE_MAX:
        raise LimitExceeded("engine message", size, MESSAGE_MAX)


def decode_to_child(data: bytes) -> ToChild:
    """Decode a message of the engine.  Raises PeerError if it is invalid."""
    try:
        return _to_child.decode(data)
    except msgspec.MsgspecError as error:
        raise PeerError(str(error)) from error


def decode_to_engine(data: bytes) -> ToEngine:
    """Decode a message of the child.  Raises PeerError if it is invalid."""
    try:
        return _to_engine.decode(data)
    except msgspec.MsgspecError as error:
        raise PeerError(str(error)) from error
