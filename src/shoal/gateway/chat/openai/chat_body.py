"""The types of the body of OpenAI's chat request.

Source: OpenAI's API reference, "Create chat completion".
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from shoal.domain.options import CHAT_OPTIONS
from shoal.gateway.chat.messages import (
    CALL_ID_MAX,
    CALLS_MAX,
    FUNCTION_NAME_MAX,
    MESSAGES_MAX,
    TOOLS_MAX,
    FunctionName,
)
from shoal.gateway.chat.options import StopStrings, body_type
from shoal.gateway.http.decoding import (
    FreeObject,
    Ignored,
    ModelName,
    Temperature,
    TokenCount,
)


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
    parameters: FreeObject | UnsetType = UNSET
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
    schema: FreeObject | UnsetType = UNSET
    description: str | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class ResponseFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | UnsetType = UNSET
    schema: FreeObject | UnsetType = UNSET  # llama.cpp's, with ``json_object``


class ChatBody(msgspec.Struct, frozen=True):
    """A chat completion request; unknown fields go to the engine."""

    # Its other options are added from the table ``CHAT_OPTIONS``.

    model: ModelName
    messages: Annotated[
        list[ChatRequestMessage], Meta(min_length=1, max_length=MESSAGES_MAX)
    ]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    stop: StopStrings | None = None
    tools: Annotated[list[Tool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored | UnsetType = UNSET  # a text, or Open WebUI's object
    prompt_cache_key: str | None = None
    service_tier: Annotated[str, Meta(max_length=32)] | None = None
    # Untyped: what matters is only whether they ask for something.
    functions: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET
    modalities: Raw | UnsetType = UNSET
    web_search_options: Raw | UnsetType = UNSET


CreateChatCompletion = body_type("CreateChatCompletion", ChatBody, CHAT_OPTIONS)
