"""Messages and tool calls in the form of ``Chat``, which dialects translate to.

Source: OpenAI's API reference, "Create chat completion".
"""

from collections.abc import Iterable, Mapping, Sequence

from shoal.domain.work import JSON

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
