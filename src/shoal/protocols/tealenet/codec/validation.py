"""Validation of decoded messages beyond the types of their fields.

Source: what real peers refuse; see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from shoal.domain.answer_assembly import describe_invalid_fields
from shoal.domain.json_limits import NESTING_MAX, is_too_deep
from shoal.protocols.tealenet.codec.chats import describe_invalid_chat
from shoal.protocols.tealenet.codec.messages import (
    InferenceChunk,
    InferenceRequest,
    ModelTransferChunk,
)

Validator: TypeAlias = Callable[[Any, bytes], str | None]
"""Returns what is wrong with a message, given its text as well, or None."""


def _request_error(message: InferenceRequest, text: bytes) -> str | None:
    if _may_be_deep(text) and is_too_deep(message.request):
        return "request: nested too deeply"
    fault = describe_invalid_chat(message.request)
    return None if fault is None else f"request: {fault}"


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
