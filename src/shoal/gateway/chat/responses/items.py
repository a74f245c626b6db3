"""Items of responses, translated to the messages of a chat and back.

What the assistant wrote is one item for each part: reasoning, text, refusals and
function calls.  A chat has one message for those that follow each other.

Source: OpenAI's API reference, "Create a model response", ``input``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from msgspec import Raw

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON, message_text
from shoal.gateway.chat import messages
from shoal.gateway.chat.answer_parts import Part, PartKind
from shoal.gateway.chat.responses import body
from shoal.gateway.http.decoding import (
    decode_field,
    decode_value,
    required,
    size_of,
    unsupported,
)

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",  # the newer name of the same role
    "user": "user",
}

ITEMS = (
    *("message", "function_call", "function_call_output"),
    *("reasoning", "item_reference"),
)
"""The types of items that a chat has a form for."""

CLIENTS_SUFFIXES = ("_output", "_response")
"""What the types of other items end with that are the client's."""

UNSHOWN = frozenset({"type", "id", "call_id", "status"})
"""Fields of other items that say nothing to a model."""

TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal"})


@dataclass(frozen=True, slots=True)
class ItemReference:
    """An item of an earlier response, by its id; ``path`` is where it is named."""

    id: str
    path: str


@dataclass(frozen=True, slots=True)
class ResultImages:
    """Parts that show the images in the output of a function, which came before."""

    parts: Sequence[Mapping[str, JSON]]


ChatItem: TypeAlias = Part | messages.Message | ResultImages
"""A part that the assistant wrote, another's message, or images in one."""

InputItem: TypeAlias = ChatItem | ItemReference
"""An item as a request has it: also a reference to a part."""


_kinds = msgspec.json.Decoder(body.ItemKind)
_items = msgspec.json.Decoder(body.ResponseInputItem)


def decode_item(raw: Raw, path: str) -> Sequence[InputItem]:
    """Decode an item of the input; one may have several parts.

    What OpenAI's servers did, and what a client did with their tools, is read as text.

    Raises InvalidRequest naming the invalid field.
    """
    size = size_of(raw)
    kind = decode_field(_kinds, raw, path, size).type
    if kind not in (None, *ITEMS):
        return [_server_item(kind, raw, path)]
    item = decode_field(_items, raw, path, size)
    match item.type:
        case None if item.role is None and item.id is not None:
            return [ItemReference(item.id, path)]
        case "message" | None:
            return _decode_message(item, path)
        case "function_call":
            name = required(item.name, f"{path}.name")
            call_id = required(item.call_id, f"{path}.call_id")
            arguments = required(item.arguments, f"{path}.arguments")
            return [Part(PartKind.TOOL_CALL, arguments, call_id, name)]
        case "function_call_output":
            return _decode_output(item, path)
        case "reasoning":
            return [Part(PartKind.REASONING, _reasoning_text(item))]
        case _:
            return [ItemReference(required(item.id, f"{path}.id"), path)]


def _server_item(kind: str, raw: Raw, path: str) -> ChatItem:
    fields = decode_value(raw, path)
    assert isinstance(fields, Mapping), "an item has a type"
    shown = {name: each for name, each in fields.items() if name not in UNSHOWN}
    text = messages.server_step(kind, shown)
    if kind.endswith(CLIENTS_SUFFIXES):
        return {"role": "user", "content": text}
    return Part(PartKind.TEXT, text)


def messages_of(items: Iterable[ChatItem]) -> list[messages.Message]:
    """Return the messages of a chat with these items.

    Images in the outputs of functions follow all outputs.
    """
    return list(_messages(items))


def items_of(conversation: Iterable[messages.Message]) -> list[Part | messages.Message]:
    """Return the items of a chat's messages: what ``messages_of`` translates."""
    items: list[Part | messages.Message] = []
    for message in conversation:
        if message.get("role") != "assistant":
            items.append(message)
            continue
        for kind in (PartKind.REASONING, PartKind.TEXT, PartKind.REFUSAL):
            if kind is PartKind.TEXT:
                text: JSON = message_text(message)
            else:
                text = message.get(kind.value)
            if isinstance(text, str) and text:
                items.append(Part(kind, text))
        calls = message.get(PartKind.TOOL_CALL.value)
        if isinstance(calls, Sequence) and not isinstance(calls, str):
            items += [_call_part(call) for call in calls if isinstance(call, Mapping)]
    return items


def _messages(items: Iterable[ChatItem]) -> Iterator[messages.Message]:
    draft: list[Part] = []
    images: list[JSON] = []
    for item in items:
        if isinstance(item, ResultImages):
            images += item.parts
            continue
        if images and (isinstance(item, Part) or item.get("role") != "tool"):
            yield {"role": "user", "content": images}
            images = []
        if isinstance(item, Part):
            if draft and _order(item) < _order(draft[-1]):
                yield _assistant(draft)
                draft = []
            draft.append(item)
            continue
        if draft:
            yield _assistant(draft)
            draft = []
        yield item
    if draft:
        yield _assistant(draft)
    if images:
        yield {"role": "user", "content": images}


_ORDER = (PartKind.REASONING, PartKind.TEXT, PartKind.REFUSAL, PartKind.TOOL_CALL)


def _order(part: Part) -> int:
    return _ORDER.index(part.kind)


def _assistant(parts: Sequence[Part]) -> messages.Message:
    texts = {
        kind: "\n\n".join(part.text for part in parts if part.kind is kind)
        for kind in _ORDER
    }
    return messages.assistant_message(
        texts[PartKind.TEXT],
        reasoning=texts[PartKind.REASONING] or None,
        refusal=texts[PartKind.REFUSAL] or None,
        tool_calls=[
            messages.tool_call(part.call_id, part.name, part.text)
            for part in parts
            if part.kind is PartKind.TOOL_CALL
        ],
    )


def _call_part(call: Mapping[str, JSON]) -> Part:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    return Part(
        PartKind.TOOL_CALL,
        str(function.get("arguments", "")),
        str(call.get("id", "")),
        str(function.get("name", "")),
    )


def _decode_message(item: body.ResponseInputItem, path: str) -> Sequence[InputItem]:
    role = required(item.role, f"{path}.role")
    content = item.content if item.content is not None else ""
    if role == "assistant":
        return list(_assistant_parts(content, f"{path}.content"))
    if role not in ROLES:
        expected = ", ".join([*ROLES, "assistant"])
        raise InvalidRequest(
            f"{path}.role: expected one of {expected}, got {role[:40]!r}",
            f"{path}.role",
        )
    if isinstance(content, str):
        return [{"role": ROLES[role], "content": content}]
    parts = [
        _decode_part(part, f"{path}.content[{index}]")
        for index, part in enumerate(content)
    ]
    decoded = messages.content_of(parts)
    if role != "user" and not isinstance(decoded, str):
        field = f"{path}.content"
        raise InvalidRequest(
            f"{field}: only a user's message may have more than text", field
        )
    return [{"role": ROLES[role], "content": decoded}]


def _assistant_parts(
    content: str | Sequence[body.ResponseInputPart], path: str
) -> Iterator[Part]:
    if isinstance(content, str):
        yield Part(PartKind.TEXT, content)
        return
    for index, part in enumerate(content):
        field = f"{path}[{index}]"
        if part.type == "refusal":
            yield Part(PartKind.REFUSAL, required(part.refusal, f"{field}.refusal"))
        elif part.type in TEXT_PARTS:
            yield Part(PartKind.TEXT, _text(part, field))
        else:
            yield Part(PartKind.TEXT, messages.server_step(part.type, part.text))


def _decode_part(part: body.ResponseInputPart, path: str) -> Mapping[str, JSON]:
    if part.type == "input_image":
        return messages.image_part(
            required(part.image_url, f"{path}.image_url"), part.detail
        )
    return messages.text_part(_text(part, path))


def _decode_output(item: body.ResponseInputItem, path: str) -> Sequence[ChatItem]:
    call_id, output = required(item.call_id, f"{path}.call_id"), item.output
    if output is None or isinstance(output, str):
        return [messages.tool_result(call_id, required(output, f"{path}.output"))]
    parts = [
        _output_part(part, f"{path}.output[{index}]")
        for index, part in enumerate(output)
    ]
    images = [part for part in parts if part["type"] != "text"]
    text = message_text({"content": parts})
    message, shown = messages.result_with_images(call_id, text, images)
    return [message, ResultImages(shown)] if shown else [message]


def _output_part(part: body.ResponseInputPart, path: str) -> Mapping[str, JSON]:
    """Return a part of a function's output.

    A program has put it there: an error would refuse its conversation for ever.
    """
    if part.type in TEXT_PARTS or part.image_url is not None:
        return _decode_part(part, path)
    return messages.text_part(messages.unreadable(part.type))


def _reasoning_text(item: body.ResponseInputItem) -> str:
    """Return the text of reasoning, or else that of its summary."""
    content = item.content
    if isinstance(content, str):
        return content
    texts = [part.text or "" for part in content or ()]
    return "".join(texts) or "\n\n".join(part.text or "" for part in item.summary or ())


def _text(part: body.ResponseInputPart, path: str) -> str:
    if part.type not in TEXT_PARTS:
        raise unsupported(f"{path}.type", part.type[:40])
    return required(part.text, f"{path}.text")
