"""Validation of decoded messages beyond the types of their fields.

Source: OpenAI's API reference, "Create chat completion", and what real peers refuse;
see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from shoal.domain.answer_assembly import describe_invalid_fields
from shoal.domain.json_limits import NESTING_MAX, is_too_deep
from shoal.protocols.tealenet.codec.messages import (
    InferenceChunk,
    InferenceRequest,
    ModelTransferChunk,
)
from shoal.protocols.tealenet.codec.scalars import Name

SEED_MAX = 2**63  # as in engines
CHOICES_ASKED_MAX = 128  # answers to one request, as at OpenAI

Validator: TypeAlias = Callable[[Any, bytes], str | None]
"""Returns what is wrong with a message, given its text as well, or None."""


class ChatMessageSchema(msgspec.Struct, frozen=True):
    """The fields of a chat message that must be valid before it is forwarded."""

    role: Name
    content: str | list[dict[str, Any]] | None = None


class ChatRequestSchema(msgspec.Struct, frozen=True):
    """The fields of OpenAI's chat completion request that must be valid.

    Integers may be written as 100.0.
    """

    messages: list[ChatMessageSchema]
    model: Name | None = None
    max_tokens: float | None = None
    max_completion_tokens: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[float, msgspec.Meta(ge=-SEED_MAX, le=SEED_MAX)] | None = None
    n: Annotated[float, msgspec.Meta(ge=1, le=CHOICES_ASKED_MAX)] | None = None
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: float | None = None
    top_k: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    user: str | None = None

    @property
    def field_with_fraction(self) -> str | None:
        """The name of a field that should be an integer and has a fraction, or None."""
        for name in ("max_tokens", "max_completion_tokens", "seed", "n"):
            if not float(getattr(self, name) or 0).is_integer():
                return name
        return None


def _request_error(message: InferenceRequest, text: bytes) -> str | None:
    if _may_be_deep(text) and is_too_deep(message.request):
        return "request: nested too deeply"
    try:
        chat = msgspec.convert(message.request, ChatRequestSchema)
    except msgspec.ValidationError as error:
        return f"request: {error}"
    if (name := chat.field_with_fraction) is not None:
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
