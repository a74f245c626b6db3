"""GrandSage's small messages: text frames, stops, and Shoal's extension messages.

Source: the WebSocket protocol document between API server and node, and exchanges
recorded with real servers and nodes; ``docs/protocols/grandsage.md`` has the details.
All functions are pure; tasks are in ``tasks.py``.
"""

import json
import re
import struct
from codecs import utf_8_decode
from dataclasses import astuple
from typing import Annotated, Any, TypeAlias

import msgspec

from shoal.domain.answer_assembly import describe_invalid_fields
from shoal.domain.errors import PeerError
from shoal.domain.json_limits import is_too_deep, may_be_too_deep
from shoal.domain.outcome import Delta, Fault, Usage

TASK_ID = struct.Struct(">I")  # the document says Int32BE; real peers decode unsigned
TASK_ID_MAX = 2**32 - 1
FRAME_MAX = 1 << 20  # bytes; every binary frame is smaller
REASON_MAX = 1000  # characters of an error or reason that are kept
CHOICES_MAX = 2048  # choices in one answer of a node

_LONE = re.compile("[\ud800-\udfff]")

TaskId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=TASK_ID_MAX)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


def well_formed(text: str) -> str:
    """Return ``text`` with lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE.sub("\ufffd", text)
    return text


# Binary frames, node to server.


def encode_text(task_id: int, text: str) -> list[bytes]:
    """Encode generated text as frames smaller than ``FRAME_MAX`` bytes.

    Empty text yields no frame: an id alone means that the task is finished.
    """
    head = TASK_ID.pack(task_id)
    data = well_formed(text).encode()
    if len(head) + len(data) < FRAME_MAX:
        return [head + data] if data else []
    step = FRAME_MAX // 4 - len(head)  # a character takes four bytes at most
    pieces = (text[at : at + step] for at in range(0, len(text), step))
    return [head + well_formed(piece).encode() for piece in pieces]


def encode_end(task_id: int) -> bytes:
    """Encode the end of a task: its id alone."""
    return TASK_ID.pack(task_id)


def decode_frame(data: bytes) -> tuple[str, bytes]:
    """Decode the next bytes of a task; return the text and an incomplete character.

    Invalid bytes become U+FFFD; a byte order mark is kept.  The caller prepends the
    returned bytes, at most three, to the next piece.
    """
    text, used = utf_8_decode(data, "replace", False)
    return text, data[used:]


# Text frames, both ways.


def encode_stop(task_id: int) -> str:
    """Encode a stop of a task; the document omits this message."""
    return f'{{"id":{task_id},"stop":true}}'


class UsageCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token usage on the wire, as in ``Usage``."""

    prompt_tokens: _Count
    completion_tokens: _Count
    cached_tokens: _Count | None = None
    reasoning_tokens: _Count | None = None


class AnswerPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of an answer that is more than text."""

    choice: Annotated[int, msgspec.Meta(ge=0, lt=CHOICES_MAX)] = 0
    fields: dict[str, Any] = {}
    logprobs: Any = None
    finish_reason: Annotated[str, msgspec.Meta(max_length=64)] | None = None


class TextMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """An extension message of one of Shoal's nodes.  It has one of five meanings.

    For one task: a ``delta`` of the answer; its ending (``usage``, ``finish_reason``),
    just before the end frame; it is ``rejected``; or it has ``failed``, with the
    ``fault``.  Without a task: the node is ``draining``.
    """

    id: TaskId | None = None
    delta: AnswerPiece | None = None
    usage: UsageCounts | None = None
    finish_reason: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    rejected: str | None = None
    failed: str | None = None
    fault: Fault = Fault.WORKER
    draining: str | None = None


_text_messages = msgspec.json.Decoder(TextMessage)


def encode_ending(task_id: int, finish_reason: str, usage: Usage | None) -> str:
    """Encode the finish reason and usage of a task."""
    tokens = None
    if usage is not None:
        tokens = UsageCounts(*astuple(usage))
    return encode_text_message(
        TextMessage(
            id=task_id, usage=tokens, finish_reason=well_formed(finish_reason)[:64]
        )
    )


def encode_delta(task_id: int, delta: Delta) -> str:
    """Encode a piece that is more than text.

    Raises RecursionError if it is nested more deeply than the coordinator accepts.
    """
    piece = AnswerPiece(
        delta.choice, dict(delta.fields), delta.logprobs, delta.finish_reason
    )
    message = TextMessage(id=task_id, delta=piece)
    try:
        text = encode_text_message(message)
    except UnicodeEncodeError:  # lone surrogate in a nested value
        text = well_formed(json.dumps(msgspec.to_builtins(message), ensure_ascii=False))
    if may_be_too_deep(text) and is_too_deep([piece.fields, piece.logprobs]):
        raise RecursionError
    return text


def encode_text_message(message: TextMessage) -> str:
    """Encode an extension message; its texts must be well formed."""
    return msgspec.json.encode(message).decode()


def decode_text_message(text: str) -> TextMessage | None:
    """Decode an extension message; return None if all its fields are unknown.

    Newer nodes may send unknown fields, so that is not an error.

    Raises PeerError if it is malformed, or has several meanings at once.
    """
    try:
        message: TextMessage = _text_messages.decode(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"text of the extension: {validation_error(error)}") from error
    ending = message.usage or message.finish_reason
    meanings = [
        message.delta,
        ending,
        message.rejected,
        message.failed,
        message.draining,
    ]
    count = sum(part is not None for part in meanings)
    if count > 1:
        raise PeerError("text of the extension says several things at once")
    if count and message.id is None and message.draining is None:
        raise PeerError("text of the extension names no task")
    if message.delta is not None:
        _check_piece(message.delta, text)
    return message if count else None


def _check_piece(piece: AnswerPiece, text: str) -> None:
    if (fault := describe_invalid_fields(piece.fields)) is not None:
        raise PeerError(f"text of the extension: {fault}")
    if may_be_too_deep(text) and is_too_deep([piece.fields, piece.logprobs]):
        raise PeerError("text of the extension: nested too deeply")


def validation_error(error: Exception) -> str:
    """Describe the error in a JSON text without quoting from it."""
    if isinstance(error, msgspec.ValidationError):
        return str(error)
    return "nested too deeply" if isinstance(error, RecursionError) else "not JSON"
