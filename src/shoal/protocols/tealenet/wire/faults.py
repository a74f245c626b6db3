"""What is wrong with what messages carry, where their types are right.

Source: OpenAI's API reference, "Create chat completion", and what real peers refuse;
see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from shoal.domain.assembly import fault_in
from shoal.domain.nesting import NESTING_MAX, is_deep
from shoal.protocols.tealenet.wire.payloads import (
    InferenceChunk,
    InferenceRequest,
    ModelTransferChunk,
)
from shoal.protocols.tealenet.wire.scalars import Name

SEED_MAX = 2**63  # as engines have it
CHOICES_ASKED_MAX = 128  # answers to one request, as OpenAI has it

Check: TypeAlias = Callable[[Any, bytes], str | None]
"""Takes a message and its text; says what is wrong with it, or None."""


class ChatMessage(msgspec.Struct, frozen=True):
    """A message of a conversation, as far as it must be right to be passed on."""

    role: Name
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(msgspec.Struct, frozen=True):
    """OpenAI's chat completion request, as far as it must be right to be passed on.

    Integers may be written as 100.0.
    """

    messages: list[ChatMessage]
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
    def fraction(self) -> str | None:
        """The name of a field that should be an integer and has a fraction, or None."""
        for name in ("max_tokens", "max_completion_tokens", "seed", "n"):
            if not float(getattr(self, name) or 0).is_integer():
                return name
        return None


def _fault_in_request(message: InferenceRequest, text: bytes) -> str | None:
    if _may_be_deep(text) and is_deep(message.request):
        return "request: nested too deeply"
    try:
        chat = msgspec.convert(message.request, ChatRequest)
    except msgspec.ValidationError as error:
        return f"request: {error}"
    if (name := chat.fraction) is not None:
        return f"request: Expected `int`, got `float` - at `$.{name}`"
    return None


def _fault_in_chunk(message: InferenceChunk, text: bytes) -> str | None:
    more = []  # than text
    for choice in message.chunk.choices:
        delta = choice.delta or {}
        plain = len(delta) == 1 and isinstance(delta.get("content"), str)
        if plain and choice.logprobs is None:
            continue
        if (fault := fault_in(delta)) is not None:
            return f"chunk: {fault}"
        more.append([delta, choice.logprobs])
    if more and _may_be_deep(text) and is_deep(more):
        return "chunk: nested too deeply"
    return None


def _fault_in_file(message: ModelTransferChunk, text: bytes) -> str | None:
    """Say what is wrong with a file's name: a path must lead nowhere else."""
    name = message.file_name
    steps = name.split("/")
    if "\\" in name or not name.isprintable() or {"", ".", ".."} & set(steps):
        return "fileName: expected a name within the model's folder"
    return None


def _may_be_deep(text: bytes) -> bool:
    return text.count(b"{") + text.count(b"[") > NESTING_MAX


CHECKS: Mapping[type, Check] = {
    InferenceRequest: _fault_in_request,
    InferenceChunk: _fault_in_chunk,
    ModelTransferChunk: _fault_in_file,
}
"""What else is to be right about messages of these types."""
