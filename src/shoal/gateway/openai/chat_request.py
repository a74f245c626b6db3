"""Decodes OpenAI's chat requests.

Source: OpenAI's API reference, "Create chat completion".
"""

from collections.abc import Mapping

import msgspec
from msgspec import UNSET

from shoal.domain.errors import InvalidRequest
from shoal.domain.options import CHAT_OPTIONS
from shoal.domain.work import JSON, Chat
from shoal.gateway.generation.messages import check_tools
from shoal.gateway.generation.options import Encoder, requested_options, stop_strings
from shoal.gateway.generation.request import GenerationRequest
from shoal.gateway.http.decoding import (
    OBJECT_MAX,
    decode,
    decode_object,
    is_given,
    is_requested,
    size_of,
    unsupported,
)
from shoal.gateway.openai.chat_body import (
    ChatBody,
    ChatRequestMessage,
    ContentPart,
    CreateChatCompletion,
    ResponseFormat,
    Tool,
    ToolChoice,
)

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
    body: ChatBody = decode(_decoder, data)
    for field, harmless in UNSUPPORTED.items():
        if is_requested(getattr(body, field), harmless):
            raise unsupported(field)
    messages = tuple(
        _message(message, f"messages[{index}]")
        for index, message in enumerate(body.messages)
    )
    streaming = body.stream_options
    return GenerationRequest(
        Chat(
            body.model,
            messages,
            body.max_completion_tokens or body.max_tokens,
            body.temperature,
            _options(body),
        ),
        bool(body.stream),
        streaming is not None and bool(streaming.include_usage),
        body.prompt_cache_key or "",
        body.service_tier or "",
    )


def _options(body: ChatBody) -> Mapping[str, JSON]:
    options = requested_options(body, CHAT_OPTIONS, OPTION_ENCODERS)
    _check_tools(body, options)
    if options.get("top_logprobs") and not options.get("logprobs"):
        raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
    if not options.get("logprobs"):
        options.pop("top_logprobs", None)
    return options


def _tools(tools: list[Tool]) -> list[JSON]:
    sizes = (size_of(tool.function.parameters) for tool in tools)
    if sum(sizes) > OBJECT_MAX:
        raise InvalidRequest(f"tools: more than {OBJECT_MAX} bytes", "tools")
    encoded: list[JSON] = []
    for index, tool in enumerate(tools):
        given = tool.function
        function = msgspec.to_builtins(msgspec.structs.replace(given, parameters=UNSET))
        if is_given(given.parameters):
            path = f"tools[{index}].function.parameters"
            function["parameters"] = decode_object(given.parameters, path)
        encoded.append({"function": function, "type": tool.type})
    return encoded


def _format(format: ResponseFormat) -> JSON:
    if format.type != "json_schema":
        return {"type": format.type}
    field = "response_format.json_schema"
    given = format.json_schema
    if given is UNSET:
        raise InvalidRequest(f"{field}: required, but missing", field)
    described = msgspec.to_builtins(msgspec.structs.replace(given, schema=UNSET))
    if is_given(given.schema):
        described["schema"] = decode_object(given.schema, f"{field}.schema")
    return {"type": format.type, "json_schema": described}


OPTION_ENCODERS: Mapping[str, Encoder] = {
    "stop": stop_strings,
    "tools": _tools,
    "response_format": _format,
}


def _check_tools(body: ChatBody, options: dict[str, JSON]) -> None:
    if not body.tools:
        options.pop("parallel_tool_calls", None)
        if options.pop("tool_choice", "none") not in ("none", "auto"):
            raise InvalidRequest("tool_choice: there are no tools", "tool_choice")
        return
    chosen = body.tool_choice
    check_tools(
        [tool.function.name for tool in body.tools],
        chosen.function.name if isinstance(chosen, ToolChoice) else None,
    )


def _message(message: ChatRequestMessage, path: str) -> Mapping[str, JSON]:
    if is_requested(message.function_call, ("", {})):
        raise unsupported(f"{path}.function_call")
    if message.role == "function":
        raise unsupported(f"{path}.role", message.role)
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
            field = f"{path}.tool_call_id"
            raise InvalidRequest(f"{field}: required, but missing", field)
        decoded["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant":
            field = f"{path}.tool_calls"
            raise InvalidRequest(f"{field}: only an assistant calls tools", field)
        decoded["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    for field in ("refusal", "reasoning_content"):
        if (text := getattr(message, field)) is not None:
            decoded[field] = text
    return decoded


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
            raise InvalidRequest(f"{path}: only a user sends more than text", path)
        return parts
    texts = [part.get("text") for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _part(part: ContentPart, path: str, index: int) -> dict[str, JSON]:
    if part.type == "refusal" and part.refusal is not UNSET:
        return {"type": "text", "text": part.refusal}
    if part.type not in ("text", "image_url", "input_audio"):
        raise unsupported(f"{path}[{index}].type", part.type[:40])
    value = getattr(part, part.type)
    if value is UNSET:
        field = f"{path}[{index}].{part.type}"
        raise InvalidRequest(f"{field}: required, but missing", field)
    return {"type": part.type, part.type: msgspec.to_builtins(value)}
