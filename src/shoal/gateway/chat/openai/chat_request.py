"""OpenAI's chat requests: the types of their bodies, and the chats that they ask for.

Source: OpenAI's API reference, "Create chat completion".
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.options import CHAT_OPTIONS
from shoal.domain.work import JSON, Chat
from shoal.gateway.chat.job_answers import GenerationRequest
from shoal.gateway.chat.messages import (
    CALL_ID_MAX,
    CALLS_MAX,
    FUNCTION_NAME_MAX,
    MESSAGES_MAX,
    TOOLS_MAX,
    FunctionName,
    RequestedFunction,
    check_chosen,
    function_tools,
    no_tools,
)
from shoal.gateway.chat.options import (
    Encoder,
    StopStrings,
    body_type,
    extra_options,
    requested_options,
    stop_strings,
)
from shoal.gateway.http import decoding


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class ImageUrl(msgspec.Struct, frozen=True, omit_defaults=True):
    url: Annotated[str, Meta(min_length=1)]
    detail: Literal["auto", "low", "high", "original"] | UnsetType = UNSET


class InputAudio(msgspec.Struct, frozen=True):
    data: str
    format: Annotated[str, Meta(max_length=16)]


class ContentPart(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Annotated[str, Meta(max_length=64)]
    text: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    image_url: ImageUrl | UnsetType = UNSET
    input_audio: InputAudio | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(max_length=FUNCTION_NAME_MAX)]
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: Annotated[str, Meta(max_length=CALL_ID_MAX)]
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatRequestMessage(msgspec.Struct, frozen=True):
    role: Annotated[str, Meta(max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Raw | UnsetType = UNSET  # vLLM's name, for which others have objects
    tool_calls: Annotated[list[ToolCall], Meta(max_length=CALLS_MAX)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=CALL_ID_MAX)] | None = None
    function_call: Raw | UnsetType = UNSET


class FunctionDefinition(msgspec.Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: decoding.FreeObject | UnsetType = UNSET
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class ChosenFunction(msgspec.Struct, frozen=True):
    name: FunctionName


class ToolChoice(msgspec.Struct, frozen=True):
    function: ChosenFunction
    type: Literal["function"] = "function"


class JsonSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    name: FunctionName  # of the same length as a function's
    schema: decoding.FreeObject | UnsetType = UNSET
    description: str | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class ResponseFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | UnsetType = UNSET
    schema: decoding.FreeObject | UnsetType = UNSET  # llama.cpp's, with ``json_object``


class ChatBody(msgspec.Struct, frozen=True):
    """A chat completion request; unknown fields go to the engine."""

    # Its other options are added from the table ``CHAT_OPTIONS``.

    model: decoding.ModelName
    messages: Annotated[
        list[ChatRequestMessage], Meta(min_length=1, max_length=MESSAGES_MAX)
    ]
    max_tokens: decoding.TokenCount | None = None
    max_completion_tokens: decoding.TokenCount | None = None
    temperature: decoding.Temperature | None = None
    stop: StopStrings | None = None
    tools: Annotated[list[Tool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: decoding.EndUser | UnsetType = UNSET
    prompt_cache_key: str | None = None
    service_tier: Annotated[str, Meta(max_length=32)] | None = None
    # Untyped: what matters is only whether they ask for something.
    functions: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET
    modalities: Raw | UnsetType = UNSET
    web_search_options: Raw | UnsetType = UNSET


CreateChatCompletion = body_type("CreateChatCompletion", ChatBody, CHAT_OPTIONS)


ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",  # the newer name of the same role
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

UNSUPPORTED: Mapping[str, tuple[JSON, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": ([], ["text"]),
    "web_search_options": (),
}
"""Fields that no worker supports, with their neutral values.

A request for one is an error: an answer that ignored it would be wrong.
"""


_decoder = msgspec.json.Decoder(CreateChatCompletion)


def decode_chat_request(data: bytes) -> GenerationRequest[Chat]:
    """Decode a body.

    Raises InvalidRequest naming the invalid field.
    """
    body: ChatBody = decoding.decode(_decoder, data)
    for field, harmless in UNSUPPORTED.items():
        raw = getattr(body, field)
        if raw is not UNSET and decoding.is_requested(raw, harmless):
            raise decoding.unsupported(field)
    messages = tuple(
        [
            _message(message, f"messages[{index}]")
            for index, message in enumerate(body.messages)
        ]
    )
    begun = messages[-1]["role"] == "assistant"
    streaming = body.stream_options
    return GenerationRequest(
        Chat(
            body.model,
            messages,
            body.max_completion_tokens or body.max_tokens,
            body.temperature,
            {
                **_options(body),
                **extra_options(data, CreateChatCompletion, begun=begun),
            },
        ),
        bool(body.stream),
        streaming is not None and bool(streaming.include_usage),
        body.prompt_cache_key or "",
        body.service_tier or "",
        decoding.end_user(body.user),
    )


def _options(body: ChatBody) -> Mapping[str, JSON]:
    options = requested_options(body, CHAT_OPTIONS, OPTION_ENCODERS)
    _check_tool_choice(body, options)
    if options.get("top_logprobs") and not options.get("logprobs"):
        raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
    if not options.get("logprobs"):
        options.pop("top_logprobs", None)
    return options


def _tools(tools: list[Tool]) -> list[JSON]:
    return function_tools(
        [
            RequestedFunction(
                tool.function.name,
                f"tools[{index}].function.parameters",
                tool.function.parameters,
                tool.function.description,
                tool.function.strict,
            )
            for index, tool in enumerate(tools)
        ]
    )


def _format(format: ResponseFormat) -> JSON:
    if format.type == "json_object" and decoding.is_given(format.schema):
        schema = decoding.decode_object(format.schema, "response_format.schema")
        # Most servers know the first form, and ignore the other.
        described: JSON = {"name": "answer", "schema": schema}
        return {"type": "json_schema", "json_schema": described, "schema": schema}
    if format.type != "json_schema":
        return {"type": format.type}
    field = "response_format.json_schema"
    given = decoding.required(format.json_schema, field)
    fields = msgspec.to_builtins(msgspec.structs.replace(given, schema=UNSET))
    if decoding.is_given(given.schema):
        fields["schema"] = decoding.decode_object(given.schema, f"{field}.schema")
    return {"type": format.type, "json_schema": fields}


OPTION_ENCODERS: Mapping[str, Encoder] = {
    "stop": stop_strings,
    "tools": _tools,
    "response_format": _format,
}


def _check_tool_choice(body: ChatBody, options: dict[str, JSON]) -> None:
    if not body.tools:
        options.pop("parallel_tool_calls", None)
        if options.pop("tool_choice", "none") not in ("none", "auto"):
            raise no_tools()
        return
    if isinstance(body.tool_choice, ToolChoice):
        names = [tool.function.name for tool in body.tools]
        check_chosen(body.tool_choice.function.name, names)


def _message(message: ChatRequestMessage, path: str) -> Mapping[str, JSON]:
    function_call = message.function_call
    if function_call is not UNSET and decoding.is_requested(function_call, ("", {})):
        raise decoding.unsupported(f"{path}.function_call")
    if message.role == "function":
        raise decoding.unsupported(f"{path}.role", message.role)
    if message.role not in ROLES:
        expected = ", ".join(ROLES)
        raise InvalidRequest(
            f"{path}.role: expected one of {expected}, got {message.role[:40]!r}",
            f"{path}.role",
        )
    decoded: dict[str, JSON] = {
        "role": ROLES[message.role],
        "content": _content(message, f"{path}.content"),
    }
    if message.name:
        decoded["name"] = message.name
    if message.role == "tool":
        if not message.tool_call_id:
            raise decoding.missing(f"{path}.tool_call_id")
        decoded["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant":
            field = f"{path}.tool_calls"
            raise InvalidRequest(
                f"{field}: only an assistant's message may call tools", field
            )
        decoded["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    if message.refusal is not None:
        decoded["refusal"] = message.refusal
    if (thoughts := _thoughts(message)) is not None:
        decoded["reasoning_content"] = thoughts
    return decoded


def _thoughts(message: ChatRequestMessage) -> str | None:
    """Return the thoughts in a history, under either of their names."""
    if message.reasoning_content is not None or not decoding.is_given(
        message.reasoning
    ):
        return message.reasoning_content
    thoughts = msgspec.json.decode(message.reasoning)
    return thoughts if isinstance(thoughts, str) else None


def _content(message: ChatRequestMessage, path: str) -> JSON:
    """Return the text, or the parts if there is more than text in them."""
    content = message.content
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [_part(part, path, index) for index, part in enumerate(content)]
    if any(part["type"] != "text" for part in parts):
        if message.role != "user":
            raise InvalidRequest(
                f"{path}: only a user's message may have more than text", path
            )
        return parts
    texts = [part.get("text") for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _part(part: ContentPart, path: str, index: int) -> dict[str, JSON]:
    if part.type == "refusal" and part.refusal is not UNSET:
        return {"type": "text", "text": part.refusal}
    if part.type not in ("text", "image_url", "input_audio"):
        raise decoding.unsupported(f"{path}[{index}].type", part.type[:40])
    value = decoding.required(getattr(part, part.type), f"{path}[{index}].{part.type}")
    return {"type": part.type, part.type: msgspec.to_builtins(value)}
