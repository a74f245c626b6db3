"""Decodes Ollama's chats and completions.

Source: Ollama's API reference, "Generate a completion" and "Generate a chat
completion".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON, Chat, Completion
from shoal.gateway.generation.messages import Message
from shoal.gateway.generation.request import GenerationRequest
from shoal.gateway.http.decoding import decode, is_requested, unsupported
from shoal.gateway.ollama.bodies import OllamaChat, OllamaGenerate, OllamaPrompt
from shoal.gateway.ollama.messages import (
    translate_messages,
    translate_tools,
    user_content,
)
from shoal.gateway.ollama.options import (
    answer_options,
    is_unload,
    thinking_options,
    token_limit,
)


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """A request without a prompt, which only loads a model, or unloads it.

    Here the workers decide what they have loaded: it is answered, and nothing happens.
    """

    model: str
    stream: bool
    reason: str  # load or unload


OllamaRequest: TypeAlias = GenerationRequest[Chat | Completion] | ModelLoad

_chats = msgspec.json.Decoder(OllamaChat)
_prompts = msgspec.json.Decoder(OllamaGenerate)


def decode_ollama_chat(data: bytes) -> OllamaRequest:
    """Decode the body of a chat.

    Raises InvalidRequest naming the invalid field.
    """
    body = decode(_chats, data)
    options = {**answer_options(body, data), **thinking_options(body.think)}
    if body.tools:
        options["tools"] = translate_tools(body.tools)
    if not body.messages:
        return _load(body)
    chat = Chat(
        body.model,
        translate_messages(body.messages),
        token_limit(body.options),
        None if body.options is None else body.options.temperature,
        options,
    )
    return GenerationRequest(chat, body.stream is not False)


def decode_ollama_prompt(data: bytes) -> OllamaRequest:
    """Decode the body of a completion.

    It is a chat, unless the prompt is ``raw``, or there is a ``suffix``: then the model
    continues the prompt itself.

    Raises InvalidRequest naming the invalid field.
    """
    body = decode(_prompts, data)
    if body.template:
        raise unsupported("template")
    if is_requested(body.context, ([],)):
        raise unsupported("context")
    options = answer_options(body, data)
    thinking = thinking_options(body.think)
    if not (body.prompt or body.suffix or body.images):
        return _load(body)
    if body.raw or body.suffix:
        work: Chat | Completion = _plain(body, options)
    else:
        work = _question(body, {**options, **thinking})
    return GenerationRequest(work, body.stream is not False)


def _plain(body: OllamaGenerate, options: dict[str, JSON]) -> Completion:
    """Return the work of a prompt that is no question in a conversation."""
    what = "raw" if body.raw else "suffix"
    for field in ("system", "images"):
        if getattr(body, field):
            raise InvalidRequest(f"{field}: not supported with {what}", field)
    if "response_format" in options:
        raise InvalidRequest(f"format: not supported with {what}", "format")
    if body.suffix:
        options["suffix"] = body.suffix
    return Completion(
        body.model,
        body.prompt or "",
        token_limit(body.options),
        None if body.options is None else body.options.temperature,
        options,
    )


def _question(body: OllamaGenerate, options: Mapping[str, JSON]) -> Chat:
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": body.system})
    content = user_content(body.prompt or "", body.images or (), "images")
    messages.append({"role": "user", "content": content})
    return Chat(
        body.model,
        tuple(messages),
        token_limit(body.options),
        None if body.options is None else body.options.temperature,
        options,
    )


def _load(body: OllamaPrompt) -> ModelLoad:
    reason = "unload" if is_unload(body) else "load"
    return ModelLoad(body.model, body.stream is not False, reason)
