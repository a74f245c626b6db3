"""Translates the messages of Anthropic's API to those of a chat.

A chat has a message for each result of a tool, and images only in messages of the user:
the images of a result follow in the user's message, each after its call's id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON
from shoal.gateway.chat.anthropic.message_body import (
    BlockSource,
    CitationsParam,
    MessageBlock,
    MessageParam,
    PlainBlock,
    ReadableBlock,
    ResultBlock,
)
from shoal.gateway.chat.messages import (
    Message,
    assistant_message,
    data_url,
    image_part,
    joined,
    result_with_images,
    server_step,
    text_part,
    tool_call,
    unreadable,
)
from shoal.gateway.http import decoding
from shoal.gateway.http.responses import encode_json

MessagePart = Message  # of a message's content


OF_USERS = ("image", "document", "search_result", "tool_result", "container_upload")
"""The types of blocks that are in no answer."""


@dataclass(frozen=True, slots=True)
class _UserTurn:
    """A message of the user, as long as it may grow."""

    parts: list[MessagePart] = field(default_factory=list)


Turns = list[Message | _UserTurn]


def chat_messages(
    system: str | Sequence[PlainBlock] | None, messages: Sequence[MessageParam]
) -> tuple[Message, ...]:
    """Return the messages of a chat; the system prompt is the first.

    Messages of the user that follow one another are joined, as Anthropic does.  Texts
    of several blocks are separated by an empty line.

    Raises InvalidRequest naming a block that no engine could read.
    """
    instructions = [_plain_text(system, "system")] if system else []
    turns: Turns = []
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        match message.role:
            case "user":
                _add_user_message(turns, message.content, path)
            case "assistant":
                turns.append(_assistant_message(message.content, path))
            case "system":
                text = _text_of(_parts(message.content, path), path)
                if turns:
                    # Many templates accept no system message but the first.
                    tagged = text_part(f"<system>\n{text}\n</system>")
                    _user_parts(turns).append(tagged)
                else:
                    instructions.append(text)
    if not turns:
        raise InvalidRequest("messages: all of them are system prompts", "messages")
    found = [
        {"role": "user", "content": _content_of(turn.parts)}
        if isinstance(turn, _UserTurn)
        else turn
        for turn in turns
    ]
    if text := joined(instructions):
        return {"role": "system", "content": text}, *found
    return tuple(found)


def _user_parts(turns: Turns) -> list[MessagePart]:
    """Return the parts of the user's message at the end, which begins if needed."""
    if turns and isinstance(last := turns[-1], _UserTurn):
        return last.parts
    turns.append(turn := _UserTurn())
    return turn.parts


def _add_user_message(
    turns: Turns, content: str | list[MessageBlock], path: str
) -> None:
    """Add the results of tools, and then everything else as the user's message."""
    if isinstance(content, str):
        _user_parts(turns).append(text_part(content))
        return
    results: list[Message] = []
    parts: list[MessagePart] = []
    for index, block in enumerate(content):
        at = f"{path}[{index}]"
        if block.type == "tool_result":
            message, images = _tool_result(block, at)
            results.append(message)
            parts += images
        else:
            parts.append(_part(block, at))
    turns += results
    if parts or not results:
        _user_parts(turns).extend(parts)


def _assistant_message(content: str | list[MessageBlock], path: str) -> Message:
    if isinstance(content, str):
        return assistant_message(content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for index, block in enumerate(content):
        at = f"{path}[{index}]"
        match block.type:
            case "text":
                texts.append(decoding.required(block.text, f"{at}.text"))
            case "thinking":
                thoughts.append(decoding.required(block.thinking, f"{at}.thinking"))
            case "redacted_thinking":
                pass  # encrypted: only Anthropic can read it
            case "tool_use":
                calls.append(_tool_call(block, at))
            case _ if block.type in OF_USERS:
                raise decoding.unsupported(f"{at}.type", block.type)
            case _:
                texts.append(_server_step(block, at))
    reasoning = joined(thoughts) or None
    return assistant_message(joined(texts), reasoning=reasoning, tool_calls=calls)


def _tool_call(block: MessageBlock, at: str) -> Message:
    given = (
        decoding.decode_object(block.input, f"{at}.input")
        if decoding.is_given(block.input)
        else {}
    )
    return tool_call(
        decoding.required(block.id, f"{at}.id"),
        decoding.required(block.name, f"{at}.name"),
        encode_json(given).decode(),
    )


def _tool_result(block: MessageBlock, at: str) -> tuple[Message, list[MessagePart]]:
    """Return the message with the text of a result, and the parts of its images."""
    call_id = decoding.required(block.tool_use_id, f"{at}.tool_use_id")
    path = f"{at}.content"
    content = _decoded_content(block, path) if decoding.is_given(block.content) else ""
    if isinstance(content, str):
        parts = [text_part(content)]
    else:
        parts = [
            _result_part(each, f"{path}[{index}]") for index, each in enumerate(content)
        ]
    text = _joined_texts(parts)
    if block.is_error:
        text = f"Error: {text}"
    images = [part for part in parts if part["type"] != "text"]
    message, shown = result_with_images(call_id, text, images)
    return message, [*shown]


_contents: msgspec.json.Decoder[str | list[ResultBlock]] = msgspec.json.Decoder(
    str | list[ResultBlock]
)


def _decoded_content(block: MessageBlock, path: str) -> str | list[ResultBlock]:
    raw = block.content
    if not decoding.is_given(raw):
        raise decoding.missing(path)
    return decoding.decode_field(_contents, raw, path, decoding.size_of(raw))


READABLE = {"image": ("base64", "url"), "document": ("text", "content")}
"""The types of sources that a block can be read from."""


def _result_part(block: ResultBlock, at: str) -> MessagePart:
    """Return a part of a tool's result.

    A program has put it there: an error would refuse its conversation for ever.
    """
    match block.type:
        case "text" | "search_result":
            return _part(block, at)
        case "image" | "document" if _source(block, at).type in READABLE[block.type]:
            return _part(block, at)
        case "tool_reference":
            name = decoding.required(block.tool_name, f"{at}.tool_name")
            return text_part(f"The tool {name} is available.")
        case _:
            source = block.source
            media = source.media_type if isinstance(source, BlockSource) else ""
            what = f"{block.type} as {media}" if media else block.type
            return text_part(unreadable(what))


def _server_step(block: MessageBlock, at: str) -> str:
    """Return what Anthropic's servers did within an answer: a call, or its result."""
    given: list[JSON] = []
    if decoding.is_given(block.input):
        given.append(decoding.decode_object(block.input, f"{at}.input"))
    if decoding.is_given(block.content):
        given.append(decoding.decode_value(block.content, f"{at}.content"))
    name = block.type if isinstance(block.name, UnsetType) else block.name
    text = "" if isinstance(block.text, UnsetType) else block.text
    return server_step(name, *given, text)


def _parts(
    content: str | Sequence[MessageBlock | ResultBlock], path: str
) -> list[MessagePart]:
    if isinstance(content, str):
        return [text_part(content)]
    return [_part(block, f"{path}[{index}]") for index, block in enumerate(content)]


def _part(block: MessageBlock | ResultBlock, at: str) -> MessagePart:
    match block.type:
        case "text":
            return text_part(decoding.required(block.text, f"{at}.text"))
        case "image":
            return image_part(_image_url(_source(block, at), f"{at}.source"))
        case "document":
            return text_part(_document_text(block, at))
        case "search_result":
            return text_part(_search_result_text(block, at))
        case _:
            raise decoding.unsupported(f"{at}.type", block.type)


def _image_url(source: BlockSource, at: str) -> str:
    match source.type:
        case "base64":
            media_type = decoding.required(source.media_type, f"{at}.media_type")
            return data_url(media_type, decoding.required(source.data, f"{at}.data"))
        case "url":
            return decoding.required(source.url, f"{at}.url")
        case _:
            raise decoding.unsupported(f"{at}.type", source.type)


def _document_text(block: ReadableBlock, at: str) -> str:
    """Return the text of a document; of other formats than text there is none."""
    _check_citations(block, at)
    source, path = _source(block, at), f"{at}.source"
    match source.type:
        case "text":
            text = decoding.required(source.data, f"{path}.data")
        case "content":
            text = _plain_text(source.content, f"{path}.content")
        case _:
            what = source.media_type or source.type
            raise decoding.unsupported(f"{path}.type", f"a document as {what}")
    return joined([block.title or "", block.context or "", text])


def _search_result_text(block: MessageBlock | ResultBlock, at: str) -> str:
    _check_citations(block, at)
    source = block.source if isinstance(block.source, str) else ""
    path = f"{at}.content"
    if isinstance(block, MessageBlock):
        text = _plain_text(_decoded_content(block, path), path)
    else:
        text = _plain_text(block.content, path)
    return joined([block.title or "", source, text])


def _check_citations(block: ReadableBlock, at: str) -> None:
    if isinstance(block.citations, CitationsParam) and block.citations.enabled:
        raise decoding.unsupported(f"{at}.citations")


def _source(block: ReadableBlock, at: str) -> BlockSource:
    if not isinstance(block.source, BlockSource):
        field = f"{at}.source"
        raise InvalidRequest(f"{field}: required, an object", field)
    return block.source


def _plain_text(
    content: str | Sequence[PlainBlock | ResultBlock] | UnsetType, path: str
) -> str:
    if isinstance(content, UnsetType):
        raise decoding.missing(path)
    if isinstance(content, str):
        return content
    return joined(
        _plain_block_text(block, f"{path}[{index}]")
        for index, block in enumerate(content)
    )


def _plain_block_text(block: PlainBlock | ResultBlock, at: str) -> str:
    if block.type != "text":
        raise decoding.unsupported(f"{at}.type", block.type)
    return decoding.required(block.text, f"{at}.text")


def _text_of(parts: Sequence[MessagePart], path: str) -> str:
    if any(part["type"] != "text" for part in parts):
        raise InvalidRequest(
            f"{path}: only a user's message may have more than text", path
        )
    return _joined_texts(parts)


def _content_of(parts: list[MessagePart]) -> JSON:
    """Return the text, or the parts if there is more than text in them."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return _joined_texts(parts)


def _joined_texts(parts: Sequence[MessagePart]) -> str:
    texts = [part.get("text") for part in parts]
    return joined(text for text in texts if isinstance(text, str))
