"""Messages, tool calls and tools in the form of ``Chat``, which dialects translate to.

Source: OpenAI's API reference, "Create chat completion".
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import UNSET, Meta, Raw, UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON
from shoal.gateway.http.decoding import OBJECT_MAX, decode_object, is_given, size_of

MESSAGES_MAX = 16_384  # far more than any context holds

Message = Mapping[str, JSON]


def text_part(text: str) -> Mapping[str, JSON]:
    """Return a part of a message's content that is text."""
    return {"type": "text", "text": text}


def image_part(url: str, detail: str | None = None) -> Mapping[str, JSON]:
    """Return an image, by its URL, which may be a ``data_url``."""
    image: dict[str, JSON] = {"url": url}
    if detail is not None:
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def data_url(media_type: str, base64: str) -> str:
    """Return the URL that contains the data itself."""
    return f"data:{media_type};base64,{base64}"


def content_of(parts: Sequence[Mapping[str, JSON]]) -> JSON:
    """Return the content of a message: a text, if its parts are no more than that."""
    texts = [part.get("text") for part in parts if part.get("type") == "text"]
    if len(texts) < len(parts):
        return list(parts)
    return "".join(text for text in texts if isinstance(text, str))


def tool_call(call_id: str, name: str, arguments: str) -> Mapping[str, JSON]:
    """Return a call by the assistant; ``arguments`` is an object as JSON text."""
    return {
        "id": call_id,
        "function": {"name": name, "arguments": arguments},
        "type": "function",
    }


def assistant_message(
    text: str,
    *,
    reasoning: str | None = None,
    refusal: str | None = None,
    tool_calls: Sequence[Mapping[str, JSON]] = (),
) -> Message:
    """Return a message of the assistant."""
    message: dict[str, JSON] = {"role": "assistant", "content": text}
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    if refusal is not None:
        message["refusal"] = refusal
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


def tool_result(call_id: str, text: str) -> Message:
    """Return the message with the result of a call."""
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def result_with_images(
    call_id: str, text: str, images: Sequence[Mapping[str, JSON]]
) -> tuple[Message, Sequence[Mapping[str, JSON]]]:
    """Return the message with the result of a call, and parts that show its images.

    The parts belong into a message of the user after all results: a chat has images
    nowhere else.
    """
    if not images:
        return tool_result(call_id, text), []
    shown = text_part(f"Image in the result of {call_id}:")
    text = text or "The result is the image in the next message."
    return tool_result(call_id, text), [shown, *images]


def joined(texts: Iterable[str]) -> str:
    """Return texts of one message as one, each in lines of its own."""
    return "\n\n".join(text for text in texts if text)


WORD_MAX = 1024
"""Characters without a space, beyond which a text is an image or encrypted."""


def server_step(name: str, *values: JSON) -> str:
    """Return the text of a step: its name, and what can be read of its values.

    A step is what a vendor's servers did in an earlier turn: they search the web, run
    code and so on within an answer, and clients send what they did with the history.
    No chat has a form for it, and a model can still read it.
    """
    shown = [_readable(value) for value in values]
    texts = [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in shown
        if not _is_empty(value)
    ]
    return f"[{' '.join([name, *texts])}]"


def unreadable(what: str) -> str:
    """Return the text of something in a history that no model here can read."""
    return f"[{what}: it cannot be read here]"


def _readable(value: JSON) -> JSON:
    match value:
        case str():
            return value if len(value) <= WORD_MAX or len(value.split()) > 1 else None
        case Mapping():
            fields = {
                name: _readable(each)
                for name, each in value.items()
                if not name.startswith("encrypted")
            }
            return {name: each for name, each in fields.items() if not _is_empty(each)}
        case Sequence():
            items = [_readable(each) for each in value]
            return [each for each in items if not _is_empty(each)]
        case _:
            return value


def _is_empty(value: JSON) -> bool:
    return value is None or value == "" or value == [] or value == {}


TOOLS_MAX = 128
CALLS_MAX = 1024  # of one message
CALL_ID_MAX = 256  # characters
FUNCTION_NAME_MAX = 128  # characters

FunctionName = Annotated[str, Meta(min_length=1, max_length=FUNCTION_NAME_MAX)]


@dataclass(frozen=True, slots=True)
class RequestedFunction:
    """A function that a body describes.

    ``parameters`` are a JSON schema; ``path`` is where the body has it.
    """

    name: str
    path: str
    parameters: Raw | UnsetType = UNSET
    description: str | None = None
    strict: bool | None = None


def function_tools(functions: Sequence[RequestedFunction]) -> list[JSON]:
    """Return the option ``tools`` of a chat.

    Raises InvalidRequest if two functions have the same name, or a schema is not an
    object or too large.
    """
    if len({each.name for each in functions}) < len(functions):
        raise InvalidRequest("tools: two functions have the same name", "tools")
    if sum(size_of(each.parameters) for each in functions) > OBJECT_MAX:
        raise InvalidRequest(f"tools: more than {OBJECT_MAX} bytes", "tools")
    return [_function_tool(each) for each in functions]


def chosen_tool(name: str) -> Mapping[str, JSON]:
    """Return the option ``tool_choice`` that makes the model call one function."""
    return {"type": "function", "function": {"name": name}}


def check_chosen(name: str, names: Sequence[str]) -> None:
    """Check that a chosen function is among those of the request.

    Raises InvalidRequest.
    """
    if name not in names:
        raise InvalidRequest(f"tool_choice: there is no tool {name!r}", "tool_choice")


def no_tools() -> InvalidRequest:
    """Return the error for a choice of tools in a request without any."""
    return InvalidRequest("tool_choice: there are no tools", "tool_choice")


def _function_tool(given: RequestedFunction) -> Mapping[str, JSON]:
    function: dict[str, JSON] = {"name": given.name}
    if given.description is not None:
        function["description"] = given.description
    if is_given(given.parameters):
        function["parameters"] = decode_object(given.parameters, given.path)
    if given.strict is not None:
        function["strict"] = given.strict
    return {"type": "function", "function": function}
