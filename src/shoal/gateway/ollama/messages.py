"""Translates Ollama's messages and tools to those of a chat.

Ollama's results of tools name the function, or nothing, where a chat's name the call:
each result belongs to the first call without one.

Source: Ollama's API reference, "Generate a chat completion".
"""

from collections.abc import Mapping, Sequence

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON
from shoal.gateway.generation.messages import (
    Message,
    assistant_message,
    check_tools,
    content_of,
    data_url,
    function_tool,
    image_part,
    text_part,
    tool_call,
    tool_result,
)
from shoal.gateway.http.decoding import (
    OBJECT_MAX,
    decode_object,
    is_given,
    size_of,
    unsupported,
)
from shoal.gateway.ollama.bodies import OllamaMessage, OllamaTool
from shoal.gateway.ollama.options import decoded_arguments

ROLES = ("system", "user", "assistant", "tool")

IMAGE_TYPES: Mapping[str, str] = {
    "iVBORw0KGgo": "image/png",
    "/9j/": "image/jpeg",
    "R0lGOD": "image/gif",
    "UklGR": "image/webp",
    "Qk": "image/bmp",
}
"""The type of an image by the beginning of its base64: Ollama's images have none."""


def translate_messages(messages: Sequence[OllamaMessage]) -> tuple[Message, ...]:
    """Return the messages of a chat.

    Raises InvalidRequest naming an invalid field.
    """
    translator = _Translator()
    return tuple(
        translator.translate(message, f"messages[{index}]")
        for index, message in enumerate(messages)
    )


def translate_tools(tools: Sequence[OllamaTool]) -> list[JSON]:
    """Return the option ``tools`` of a chat.

    Raises InvalidRequest.
    """
    if sum(size_of(tool.function.parameters) for tool in tools) > OBJECT_MAX:
        raise InvalidRequest(f"tools: more than {OBJECT_MAX} bytes", "tools")
    check_tools([tool.function.name for tool in tools], None)
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def user_content(text: str, images: Sequence[str], path: str) -> JSON:
    """Return the content of a user's message; ``path`` is where the images are.

    They come before the text, as Ollama shows them to a model.

    Raises InvalidRequest if one is none.
    """
    parts = [image_part(_image_url(each, path)) for each in images]
    return content_of([*parts, text_part(text)])


class _Translator:
    """Translates the messages of one chat, in their order."""

    def __init__(self) -> None:
        self._calls = 0  # so far
        self._unanswered: dict[str, str] = {}  # functions by the calls' ids

    def translate(self, message: OllamaMessage, path: str) -> Message:
        text = message.content or ""
        if message.role not in ROLES:
            raise InvalidRequest(
                f"{path}.role: expected one of {', '.join(ROLES)}, "
                f"got {message.role[:40]!r}",
                f"{path}.role",
            )
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest(
                f"{path}.tool_calls: only an assistant calls tools",
                f"{path}.tool_calls",
            )
        if message.images and message.role != "user":
            raise InvalidRequest(
                f"{path}.images: only a user sends images", f"{path}.images"
            )
        match message.role:
            case "assistant":
                calls = [
                    self._call(number, message, path)
                    for number in range(len(message.tool_calls or ()))
                ]
                return assistant_message(
                    text, reasoning=message.thinking or None, tool_calls=calls
                )
            case "tool":
                return tool_result(self._answered_call(message, path), text)
            case "user":
                images = message.images or ()
                content = user_content(text, images, f"{path}.images")
                return {"role": "user", "content": content}
            case _:
                return {"role": message.role, "content": text}

    def _call(
        self, number: int, message: OllamaMessage, path: str
    ) -> Mapping[str, JSON]:
        assert message.tool_calls is not None, "its calls are translated"
        given = message.tool_calls[number]
        name = given.function.name
        at = f"{path}.tool_calls[{number}].function.arguments"
        call_id = given.id or f"call_{self._calls}"
        self._calls += 1
        self._unanswered[call_id] = name
        return tool_call(call_id, name, decoded_arguments(given.function.arguments, at))

    def _answered_call(self, message: OllamaMessage, path: str) -> str:
        """Return the id of the call that a message has the result of."""
        named, call_id = message.tool_name, message.tool_call_id
        for each, function in self._unanswered.items():
            if (not call_id or each == call_id) and (not named or function == named):
                del self._unanswered[each]
                return each
        called = f" of {named[:40]!r}" if named else ""
        raise InvalidRequest(
            f"{path}: the result of a tool, but no call{called} before it is without "
            "one",
            path,
        )


def _tool(tool: OllamaTool, path: str) -> Mapping[str, JSON]:
    if tool.type != "function":
        raise unsupported(f"{path}.type", tool.type[:40])
    given = tool.function
    parameters = None
    if is_given(given.parameters):
        at = f"{path}.function.parameters"
        parameters = decode_object(given.parameters, at)
    return function_tool(
        given.name, description=given.description, parameters=parameters
    )


def _image_url(base64: str, path: str) -> str:
    for beginning, media_type in IMAGE_TYPES.items():
        if base64.startswith(beginning):
            return data_url(media_type, base64)
    raise InvalidRequest(
        f"{path}: expected PNG, JPEG, GIF, WebP or BMP images in base64", path
    )
