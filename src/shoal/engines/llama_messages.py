"""The messages between the embedded engine and its child process.

Messages are msgpack, each after its size as four bytes, most significant first.  Both
ends are of one version, so there is nothing to negotiate.
"""

import struct
from typing import Any, TypeAlias

import msgspec

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.work import JobKind

SIZE = struct.Struct("!I")
MESSAGE_MAX = 16 * 1024 * 1024  # bytes; the largest of contexts is a tenth of it


# To the child.


class OpenModel(msgspec.Struct, frozen=True, tag=True):
    """The first message: open this model."""

    path: str
    slots: int
    context: int  # tokens of each slot
    threads: int


class StartJob(msgspec.Struct, frozen=True, tag=True):
    """Do a job.  ``request`` is in OpenAI's form, without the beginning."""

    id: int
    kind: JobKind
    request: dict[str, Any]
    beginning: str = ""
    max_tokens: int | None = None
    prompts: int = 1


class AbortJob(msgspec.Struct, frozen=True, tag=True):
    """Stop working; an Ended or Refused still follows."""

    id: int


ToChild: TypeAlias = OpenModel | StartJob | AbortJob


# To the engine.


class ModelOpened(msgspec.Struct, frozen=True, tag=True):
    """Jobs are welcome: texts, or ``embeddings`` and nothing else.

    ``context`` is in tokens, of each slot.
    """

    context: int
    embeddings: bool


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The child ends now; what llama.cpp says of it is on its standard error."""

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
    """The answer is over; tokens are counted as the Engine port wants them."""

    id: int
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class JobRefused(msgspec.Struct, frozen=True, tag=True):
    """The job cannot be done, or was aborted; ``code`` is as in HTTP."""

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
    """Return the message with its size in front.

    Raises LimitExceeded if it is larger than the other end accepts.
    """
    data = _encoder.encode(message)
    check_size(len(data))
    return SIZE.pack(len(data)) + data


def message_size(header: bytes) -> int:
    """Return the size announced by the four bytes of ``header``.

    Raises LimitExceeded if so large a message is not accepted.
    """
    (size,) = SIZE.unpack(header)
    assert isinstance(size, int)
    check_size(size)
    return size


def check_size(size: int) -> None:
    if size > MESSAGE_MAX:
        raise LimitExceeded("engine message", size, MESSAGE_MAX)


def decode_to_child(data: bytes) -> ToChild:
    """Decode what the engine sent.  Raises PeerError if it is none of its messages."""
    try:
        return _to_child.decode(data)
    except msgspec.MsgspecError as error:
        raise PeerError(str(error)) from error


def decode_to_engine(data: bytes) -> ToEngine:
    """Decode what the child sent.  Raises PeerError if it is none of its messages."""
    try:
        return _to_engine.decode(data)
    except msgspec.MsgspecError as error:
        raise PeerError(str(error)) from error
