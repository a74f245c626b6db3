"""Estimates how many tokens a chat takes to read: only its worker could count them."""

from shoal.domain.credentials import estimated_tokens, tokens_to_read
from shoal.domain.work import Chat
from shoal.gateway.http.responses import encode_json

IMAGE_TOKENS = 1024  # of an image, whose size is unknown; models differ by far


def estimated_input_tokens(chat: Chat) -> int:
    """Return the estimated tokens of the texts, tools, calls and images of a chat.

    The texts count as they do for the limits of keys.
    """
    tools = chat.options.get("tools")
    described = [] if tools is None else [tools]
    images = 0
    for message in chat.messages:
        if (calls := message.get("tool_calls")) is not None:
            described.append(calls)
        content = message.get("content")
        if isinstance(content, list):
            images += sum(part.get("type") == "image_url" for part in content)
    written = sum(estimated_tokens(encode_json(each).decode()) for each in described)
    return tokens_to_read(chat) + written + images * IMAGE_TOKENS
