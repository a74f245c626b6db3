"""Chats encoded as inference requests, and decoded from them.

The options come from the table ``shoal.domain.options``; only forms that differ on this
wire are listed here.  Source: TealeNet's "Cluster Messages", "inferenceRequest";
OpenAI's API reference, "Create chat completion", and the fields that real peers refuse
or drop; see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from shoal.domain.errors import Unsupported
from shoal.domain.options import CHAT_OPTIONS, Option, OptionType
from shoal.domain.vocabulary import RunJob
from shoal.domain.work import ANY_MODEL, JSON, Chat, message_text
from shoal.protocols.seam.document_fields import Unread
from shoal.protocols.tealenet.codec.messages import InferenceRequest
from shoal.protocols.tealenet.codec.scalars import Name

TOKENS_MAX = 2**31 - 1

ACCEPTED_OPTIONS = (*CHAT_OPTIONS, Option("user", OptionType.TEXT))
"""The options that are accepted from peers; others have no agreed meaning."""

INTEGER_OPTIONS = frozenset({"n", "seed"})
"""The options that must be integers in their range, as at real peers."""


def write_request(job: RunJob, request_id: str) -> InferenceRequest:
    """Encode a job.

    The request is always for a stream: otherwise some real peers lose the text.

    Raises Unsupported for jobs other than chats.
    """
    if not isinstance(job.work, Chat):
        raise Unsupported(f"TealeNet does not support {job.work.kind.value} jobs")
    return InferenceRequest(request_id, write_chat(job.work), True)


def wants_usage(message: InferenceRequest) -> bool:
    """Return whether a request asks for a final chunk with the usage."""
    options = message.request.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def write_chat(chat: Chat) -> dict[str, Any]:
    """Encode a chat in the form that all real peers accept, without nulls."""
    request: dict[str, Any] = {
        name: value
        for name, given in chat.options.items()
        if (value := _ENCODERS.get(name, _unchanged)(given)) is not None
    }
    if chat.model != ANY_MODEL:
        request["model"] = chat.model
    request["messages"] = [_message(message) for message in chat.messages]
    if chat.max_tokens is not None:
        request["max_tokens"] = min(max(1, chat.max_tokens), TOKENS_MAX)
    if chat.temperature is not None:
        request["temperature"] = chat.temperature
    request["stream"] = True
    request["stream_options"] = {
        **request.get("stream_options", {}),
        "include_usage": True,
    }
    return request


def read_chat(request: Mapping[str, Any]) -> Chat:
    """Decode the chat of a peer; ``decode`` has validated the types.

    Without a model it may use any, and a token limit below 0 means none, as in
    llama.cpp.
    """
    limit = request.get("max_completion_tokens") or request.get("max_tokens")
    options = {}
    for option in ACCEPTED_OPTIONS:
        name, value = option.name, request.get(option.name)
        if value is None or not option.is_requested(value):
            continue
        whole = isinstance(value, float) and value.is_integer()
        options[name] = int(value) if whole and name in INTEGER_OPTIONS else value
    if isinstance(stop := options.get("stop"), str):
        options["stop"] = [stop]
    if "tools" not in options:
        options.pop("tool_choice", None)
        options.pop("parallel_tool_calls", None)
    model = request.get("model")
    return Chat(
        model if isinstance(model, str) and model else ANY_MODEL,
        tuple(_with_content(message) for message in request["messages"]),
        None if limit is None or limit < 0 else int(min(max(1, limit), TOKENS_MAX)),
        request.get("temperature"),
        options,
    )


def describe_invalid_chat(request: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a peer's request, or None."""
    try:
        chat = msgspec.convert(request, _ChatRequestSchema)
    except msgspec.ValidationError as error:
        return str(error)
    for name in _WHOLE_FIELDS:
        if not float(getattr(chat, name) or 0).is_integer():
            return f"Expected `int`, got `float` - at `$.{name}`"
    return None


# Private parts, in the order in which they are called.


def _with_content(message: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return a message with a text: at a Mac an absent text is empty."""
    if message.get("content") is None and not message.get("tool_calls"):
        return {**message, "content": ""}
    return message


def _message(message: Mapping[str, JSON]) -> dict[str, Any]:
    """Return a message in the form that Macs accept: text parts are joined."""
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        fields["role"] = "user"
    elif role == "developer":  # the newer name of the same role
        fields["role"] = "system"
    content = fields.get("content")
    if not isinstance(content, str) and not _has_more_than_text(content):
        fields["content"] = message_text(message)  # Rust peers require the key
    for name in ("name", "tool_call_id"):
        if not isinstance(fields.get(name), str):
            fields.pop(name, None)
    calls = fields.pop("tool_calls", None)
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        fields["tool_calls"] = [
            {"index": index, **call}  # Macs require the index in messages, too
            for index, call in enumerate(calls)
            if isinstance(call, Mapping)
        ]
    return fields


def _has_more_than_text(content: JSON) -> bool:
    return isinstance(content, Sequence) and any(
        isinstance(part, Mapping) and part.get("type") != "text" for part in content
    )


def _unchanged(value: JSON) -> JSON:
    return value


def _number(value: JSON) -> JSON:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None


def _integer(value: JSON) -> JSON:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: JSON) -> JSON:
    return value if isinstance(value, str) else None


def _texts(value: JSON) -> JSON:
    """Return a list of texts: a Mac refuses a single text."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence):
        return None
    return [each for each in value if isinstance(each, str)] or None


def _list(value: JSON) -> JSON:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return value if is_list and value else None


def _flags(value: JSON) -> JSON:
    """Return the booleans: a Mac refuses other values in ``stream_options``."""
    if not isinstance(value, Mapping):
        return None
    return {name: flag for name, flag in value.items() if isinstance(flag, bool)}


def _omitted(value: JSON) -> JSON:
    return None


_ENCODERS_BY_TYPE: Mapping[OptionType, Callable[[JSON], JSON]] = {
    OptionType.NUMBER: _number,
    OptionType.INTEGER: _integer,
    OptionType.TEXT: _text,
}

_ENCODERS: Mapping[str, Callable[[JSON], JSON]] = {
    **{
        option.name: _ENCODERS_BY_TYPE[option.type]
        for option in ACCEPTED_OPTIONS
        if option.type in _ENCODERS_BY_TYPE
    },
    "stop": _texts,
    "tools": _list,
    "stream_options": _flags,
    "group_id": _text,
    # Encoded elsewhere.
    "messages": _omitted,
    "model": _omitted,
    "max_tokens": _omitted,
    "temperature": _omitted,
    "stream": _omitted,
}
"""The encoders of options; None omits an option.  Others are sent unchanged."""


_ONLY_CHECKED = Unread("only checked: `read_chat` takes the request as it is")


class _ChatMessageSchema(msgspec.Struct, frozen=True):
    """The fields of a chat message that must be valid before it is forwarded."""

    role: Annotated[Name, _ONLY_CHECKED]
    content: Annotated[str | list[dict[str, Any]] | None, _ONLY_CHECKED] = None


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


_ChatRequestSchema = msgspec.defstruct(
    "ChatRequestSchema",
    [
        ("messages", list[_ChatMessageSchema]),
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
