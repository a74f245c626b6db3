"""Validation of decoded messages beyond the types of their fields.

Source: OpenAI's API reference, "Create chat completion", and what real peers refuse;
see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from shoal.domain.answer_assembly import describe_invalid_fields
from shoal.domain.json_limits import NESTING_MAX, is_too_deep
from shoal.domain.options import CHAT_OPTIONS, Option, OptionType
from shoal.protocols.tealenet.codec.messages import (
    InferenceChunk,
    InferenceRequest,
    ModelTransferChunk,
)
from shoal.protocols.tealenet.codec.scalars import Name

Validator: TypeAlias = Callable[[Any, bytes], str | None]
"""Returns what is wrong with a message, given its text as well, or None."""


class ChatMessageSchema(msgspec.Struct, frozen=True):
    """The fields of a chat message that must be valid before it is forwarded."""

    role: Name
    content: str | list[dict[str, Any]] | None = None


ACCEPTED_OPTIONS = (*CHAT_OPTIONS, Option("user", OptionType.TEXT))
"""The options that are accepted from plain peers; others have no agreed meaning."""

INTEGER_OPTIONS = frozenset({"n", "seed"})
"""The options that must be integers in their range, as at real peers."""

_STRUCTURED_TYPES: Mapping[str, Any] = {
    "stop": str | list[str],
    "tools": list[dict[str, Any]],
    "tool_choice": str | dict[str, Any],
    "response_format": dict[str, Any],
}


def _option_type(option: Option) -> Any:
    match option.type:
        case OptionType.NUMBER | OptionType.INTEGER:
            if option.name in INTEGER_OPTIONS:
                return Annotated[
                    float, msgspec.Meta(ge=option.minimum, le=option.maximum)
                ]
            return float
        case OptionType.FLAG:
            return bool
        case OptionType.TEXT:
            return str
        case OptionType.OBJECT | OptionType.NUMBERS:
            return dict[str, Any]
        case OptionType.STRUCTURED:
            return _STRUCTURED_TYPES.get(option.name, Any)


ChatRequestSchema = msgspec.defstruct(
    "ChatRequestSchema",
    [
        ("messages", list[ChatMessageSchema]),
        ("model", Name | None, None),
        ("max_tokens", float | None, None),
        ("max_completion_tokens", float | None, None),
        ("temperature", float | None, None),
        ("stream_options", dict[str, Any] | None, None),
        *((each.name, _option_type(each) | None, None) for each in ACCEPTED_OPTIONS),
    ],
    frozen=True,
)
"""The fields of OpenAI's chat completion request that must be valid.

Integers may be written as 100.0.
"""

_WHOLE_FIELDS = ("max_tokens", "max_completion_tokens", *sorted(INTEGER_OPTIONS))


def _request_error(message: InferenceRequest, text: bytes) -> str | None:
    if _may_be_deep(text) and is_too_deep(message.request):
        return "request: nested too deeply"
    try:
        chat = msgspec.convert(message.request, ChatRequestSchema)
    except msgspec.ValidationError as error:
        return f"request: {error}"
    for name in _WHOLE_FIELDS:
        if not float(getattr(chat, name) or 0).is_integer():
            return f"request: Expected `int`, got `float` - at `$.{name}`"
    return None


def _chunk_error(message: InferenceChunk, text: bytes) -> str | None:
    structured = []
    for choice in message.chunk.choices:
        delta = choice.delta or {}
        is_text = len(delta) == 1 and isinstance(delta.get("content"), str)
        if is_text and choice.logprobs is None:
            continue
        if (fault := describe_invalid_fields(delta)) is not None:
            return f"chunk: {fault}"
        structured.append([delta, choice.logprobs])
    if structured and _may_be_deep(text) and is_too_deep(structured):
        return "chunk: nested too deeply"
    return None


def _file_error(message: ModelTransferChunk, text: bytes) -> str | None:
    """Return what is wrong with a file's name: a path must not leave the folder."""
    name = message.file_name
    parts = name.split("/")
    if "\\" in name or not name.isprintable() or {"", ".", ".."} & set(parts):
        return "fileName: expected a name within the model's folder"
    return None


def _may_be_deep(text: bytes) -> bool:
    return text.count(b"{") + text.count(b"[") > NESTING_MAX


VALIDATORS: Mapping[type, Validator] = {
    InferenceRequest: _request_error,
    InferenceChunk: _chunk_error,
    ModelTransferChunk: _file_error,
}
"""The validators of the types that need more than type checks."""
