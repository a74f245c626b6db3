"""The types of the bodies of Anthropic's Messages API.

Source: Anthropic's API reference, "Create a Message" and "Count tokens in a Message".
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from shoal.domain.options import SAMPLING_OPTIONS
from shoal.gateway.chat.messages import CALL_ID_MAX, MESSAGES_MAX, FunctionName
from shoal.gateway.chat.options import STOPS_MAX, body_type
from shoal.gateway.http.decoding import FreeObject, ModelName, TokenCount

TOOLS_MAX = 1024  # programs that offer the tools of many servers have hundreds

BlockType = Annotated[str, Meta(min_length=1, max_length=64)]
ToolCallId = Annotated[str, Meta(min_length=1, max_length=CALL_ID_MAX)]


class PlainBlock(msgspec.Struct, frozen=True):
    """A block where only text is allowed."""

    type: BlockType
    text: str | UnsetType = UNSET


class BlockSource(msgspec.Struct, frozen=True):
    """Where the data of an image or a document is, by ``type``."""

    type: BlockType
    media_type: Annotated[str, Meta(max_length=128)] | UnsetType = UNSET
    data: str | UnsetType = UNSET
    url: str | UnsetType = UNSET
    content: str | list[PlainBlock] | UnsetType = UNSET


class CitationsParam(msgspec.Struct, frozen=True):
    enabled: bool | None = None


class ReadableBlock(msgspec.Struct, frozen=True):
    """What the blocks of messages and of tool results have in common."""

    type: BlockType
    text: str | UnsetType = UNSET
    source: str | BlockSource | UnsetType = UNSET
    title: str | None = None
    context: str | None = None
    citations: CitationsParam | list[Raw] | None = None  # a list: those of an answer


class ResultBlock(ReadableBlock, frozen=True):
    """A block in the result of a tool."""

    content: list[PlainBlock] | UnsetType = UNSET
    tool_name: FunctionName | UnsetType = UNSET


class MessageBlock(ReadableBlock, frozen=True):
    """A block of a message; which fields it has depends on its type."""

    content: Raw | UnsetType = UNSET  # its form depends on the type
    id: ToolCallId | UnsetType = UNSET
    name: FunctionName | UnsetType = UNSET
    input: FreeObject | UnsetType = UNSET
    tool_use_id: ToolCallId | UnsetType = UNSET
    is_error: bool | None = None
    thinking: str | UnsetType = UNSET


class MessageParam(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class ToolParam(msgspec.Struct, frozen=True):
    name: FunctionName | UnsetType = UNSET
    type: BlockType | None = None
    description: str | None = None
    input_schema: FreeObject | UnsetType = UNSET
    strict: bool | None = None


class ToolChoiceParam(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | UnsetType = UNSET
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct, frozen=True):
    type: Annotated[str, Meta(max_length=32)]
    display: Annotated[str, Meta(max_length=32)] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: FreeObject | UnsetType = UNSET


class OutputConfig(msgspec.Struct, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessageMetadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class CountMessageTokens(msgspec.Struct, frozen=True):
    """A request to count the tokens of a message; unknown fields are ignored."""

    model: ModelName
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MESSAGES_MAX)]
    system: str | list[PlainBlock] | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the field's name as a beta
    # Untyped: what matters is only whether they ask for something.
    mcp_servers: Raw | UnsetType = UNSET
    container: Raw | UnsetType = UNSET
    thread: Raw | UnsetType = UNSET


class MessageBody(CountMessageTokens, frozen=True, kw_only=True):
    """A request for a message; unknown fields go to the engine."""

    # ``SAMPLING_OPTIONS`` are added.

    max_tokens: TokenCount
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=STOPS_MAX)] | None = None
    stream: bool | None = None
    metadata: MessageMetadata | None = None
    service_tier: Annotated[str, Meta(max_length=32)] | None = None


CreateMessage = body_type("CreateMessage", MessageBody, SAMPLING_OPTIONS)
