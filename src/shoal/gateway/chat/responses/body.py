"""The types of the body of a request for a response.

Source: OpenAI's API reference, "Create a model response".
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from shoal.domain.errors import StoreError
from shoal.domain.options import CHAT_OPTIONS
from shoal.domain.work import Chat
from shoal.gateway.chat import messages
from shoal.gateway.chat.options import StopStrings, body_type
from shoal.gateway.http import decoding

Id = Annotated[str, Meta(max_length=messages.CALL_ID_MAX)]
Name = Annotated[str, Meta(max_length=messages.FUNCTION_NAME_MAX)]
Word = Annotated[str, Meta(max_length=64)]


class ResponseInputPart(msgspec.Struct, frozen=True):
    """A part of a message, of a function's output or of reasoning."""

    type: Word
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class ItemKind(msgspec.Struct, frozen=True):
    """The type of an item; one without a type is a message, or a reference."""

    type: Word | None = None


class ResponseInputItem(ItemKind, frozen=True):
    """An item of the input."""

    id: Id | None = None
    role: Word | None = None
    content: str | list[ResponseInputPart] | None = None
    call_id: Id | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | list[ResponseInputPart] | None = None
    summary: list[ResponseInputPart] | None = None


RawItem = Annotated[
    Raw, Meta(extra_json_schema={"$ref": "#/components/schemas/ResponseInputItem"})
]
"""An item of the input.  Those of OpenAI's own tools have forms of their own."""


class ResponseFunction(msgspec.Struct, frozen=True):
    """A function that the model may call; other types of tools are rejected."""

    type: Word
    name: Name | None = None
    description: str | None = None
    parameters: decoding.FreeObject | UnsetType = UNSET
    strict: bool | None = None


class AllowedFunction(msgspec.Struct, frozen=True):
    type: Word
    name: Name | None = None


class ResponseToolChoice(msgspec.Struct, frozen=True):
    """The choice of one function, or of those that are allowed."""

    type: Word
    name: Name | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[AllowedFunction], Meta(max_length=messages.TOOLS_MAX)] = []


class ResponseTextFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: decoding.FreeObject | UnsetType = UNSET
    description: str | None = None
    strict: bool | None = None


class ResponseTextConfig(msgspec.Struct, frozen=True):
    format: ResponseTextFormat | None = None
    verbosity: Word | None = None


class ResponseReasoningConfig(msgspec.Struct, frozen=True):
    effort: Word | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseBody(msgspec.Struct, frozen=True):
    """A request for a response; unknown fields go to the engine."""

    # Its other options are added from the table ``CHAT_OPTIONS``.

    model: decoding.ModelName
    input: str | Annotated[list[RawItem], Meta(max_length=messages.MESSAGES_MAX)]
    instructions: str | None = None
    previous_response_id: Id | None = None
    max_output_tokens: decoding.TokenCount | None = None
    temperature: decoding.Temperature | None = None
    stop: StopStrings | None = None
    tools: (
        Annotated[list[ResponseFunction], Meta(max_length=messages.TOOLS_MAX)] | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    text: ResponseTextConfig | None = None
    reasoning: ResponseReasoningConfig | None = None
    include: Annotated[list[Word], Meta(max_length=64)] | None = None
    metadata: decoding.Metadata | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: Id | None = None
    safety_identifier: Id | None = None
    prompt_cache_key: str | None = None
    service_tier: Annotated[str, Meta(max_length=32)] | None = None
    stream_options: decoding.Ignored | UnsetType = UNSET
    # Untyped: what matters is only whether they ask for something.
    conversation: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    context_management: Raw | UnsetType = UNSET
    moderation: Raw | UnsetType = UNSET


_ELSEWHERE = frozenset(
    {"n", "logprobs", "reasoning_effort", "verbosity", "tool_choice", "tools"}
    | {"response_format", "stop"}
)
"""Options of a chat that a response has no field for, or one in another form."""

RESPONSE_OPTIONS = tuple(each for each in CHAT_OPTIONS if each.name not in _ELSEWHERE)

CreateResponse = body_type("CreateResponse", ResponseBody, RESPONSE_OPTIONS)


class ResponseFields(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a stored response returns of its request beside the chat.

    The chat has the tools, the format of the text and the instructions; what it cannot
    say is kept with the job, as ``JobTerms.api_fields``.

    ``created_at`` is in Unix seconds.

    ``instructed``: the first message of the chat has the ``instructions``.
    ``allowed_tools`` are the names of the functions that ``tool_choice`` allowed, if it
    named any: the chat has no others.  ``summary`` is the kind of summary that
    ``reasoning`` asked for.
    """

    created_at: int
    instructed: bool = False
    background: bool = False
    previous_response_id: str | None = None
    allowed_tools: list[str] | None = None
    summary: str | None = None
    metadata: Mapping[str, str] = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    def encode(self) -> str:
        """Return the text that ``decode_fields`` decodes."""
        return msgspec.json.encode(self).decode()

    def instructions_of(self, chat: Chat) -> str | None:
        """Return the instructions of a response."""
        if not self.instructed:
            return None
        content = chat.messages[0].get("content")
        return content if isinstance(content, str) else None

    def input_of(self, chat: Chat) -> Sequence[messages.Message]:
        """Return the messages of a response without its instructions."""
        return chat.messages[int(self.instructed) :]


_decoder = msgspec.json.Decoder(ResponseFields)


def decode_fields(text: str) -> ResponseFields | None:
    """Decode the fields of a job; None if it is not a stored response.

    Raises StoreError if they are damaged.
    """
    if not text:
        return None
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"the fields of a response are damaged: {error}") from error
