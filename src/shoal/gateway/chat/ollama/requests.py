"""Decodes Ollama's chats and completions.

Source: Ollama's API reference, "Generate a completion" and "Generate a chat
completion"; its Modelfile reference, "Valid parameters and values".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from msgspec import Raw, UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON, Chat, Completion
from shoal.gateway.chat.job_answers import GenerationRequest
from shoal.gateway.chat.messages import Message
from shoal.gateway.chat.ollama import bodies
from shoal.gateway.chat.ollama.messages import (
    translate_messages,
    translate_tools,
    user_content,
)
from shoal.gateway.chat.options import (
    Encoder,
    foreign_options,
    requested_options,
    stop_strings,
)
from shoal.gateway.http import decoding


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """A request without a prompt, which only loads a model, or unloads it."""

    model: str
    stream: bool
    reason: str  # load or unload


OllamaRequest: TypeAlias = GenerationRequest[Chat | Completion] | ModelLoad

_chats = msgspec.json.Decoder(bodies.OllamaChat)
_prompts = msgspec.json.Decoder(bodies.OllamaGenerate)


def decode_ollama_chat(data: bytes) -> OllamaRequest:
    """Decode the body of a chat.

    Raises InvalidRequest naming the invalid field.
    """
    body = decoding.decode(_chats, data)
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
    body = decoding.decode(_prompts, data)
    if body.template:
        raise decoding.unsupported("template")
    if decoding.is_requested(body.context, ([],)):
        raise decoding.unsupported("context")
    options = answer_options(body, data)
    thinking = thinking_options(body.think)
    if not (body.prompt or body.suffix or body.images):
        return _load(body)
    if body.raw or body.suffix:
        work: Chat | Completion = _plain(body, options)
    else:
        work = _question(body, {**options, **thinking})
    return GenerationRequest(work, body.stream is not False)


def _plain(body: bodies.OllamaGenerate, options: dict[str, JSON]) -> Completion:
    """Return the work of a prompt that is not a question in a conversation."""
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


def _question(body: bodies.OllamaGenerate, options: Mapping[str, JSON]) -> Chat:
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


def _load(body: bodies.OllamaPrompt) -> ModelLoad:
    reason = "unload" if is_unload(body) else "load"
    return ModelLoad(body.model, body.stream is not False, reason)


EFFORTS = ("low", "medium", "high", "max")

SCHEMA_NAME = "answer"  # the chat form names schemas, Ollama does not

_ENCODERS: Mapping[str, Encoder] = {"stop": stop_strings}
_JSON_NAMES = (b'"json"', b'""')


def token_limit(options: bodies.ModelOptions | None) -> int | None:
    """Return the limit of an answer's tokens; with Ollama, 0 and less mean none."""
    limit = None if options is None else options.num_predict
    return None if limit is None or limit <= 0 else limit


def answer_options(body: bodies.OllamaPrompt, data: bytes) -> dict[str, JSON]:
    """Return the options of the work that a body asks for; ``data`` is its text.

    Raises InvalidRequest naming an invalid field.
    """
    if body.logprobs:
        raise decoding.unsupported("logprobs")
    found: dict[str, JSON] = {}
    if body.options is not None:
        found |= requested_options(body.options, bodies.OPTIONS, _ENCODERS)
        found |= foreign_options(
            bytes(decoding.raw_fields(data)["options"]), bodies.OllamaOptions
        )
    found |= foreign_options(data, type(body))
    if (form := response_format(body.format)) is not None:
        found["response_format"] = form
    return found


def response_format(given: Raw | UnsetType) -> JSON:
    """Return the option ``response_format``; None: the answer is any text.

    Raises InvalidRequest.
    """
    if not decoding.is_given(given):
        return None
    if decoding.size_of(given) <= 8 and (text := bytes(given).strip()) in _JSON_NAMES:
        return None if text == b'""' else {"type": "json_object"}
    if not bytes(given).lstrip().startswith(b"{"):
        raise InvalidRequest('format: expected "json" or a JSON schema', "format")
    schema = decoding.decode_object(given, "format")
    named: dict[str, JSON] = {"name": SCHEMA_NAME, "schema": schema}
    return {"type": "json_schema", "json_schema": named}


def thinking_options(think: bool | str | None) -> Mapping[str, JSON]:
    """Return the options of a chat that switch reasoning, or set its effort.

    Servers of models know one of the two, and ignore the other.

    Raises InvalidRequest for an unknown effort.
    """
    match think:
        case None:
            return {}
        case bool():
            return {"chat_template_kwargs": {"enable_thinking": think}}
        case str() if think in EFFORTS:
            return {"reasoning_effort": think}
        case str():
            expected = ", ".join(f'"{each}"' for each in EFFORTS)
            message = f"think: expected true, false, {expected}"
            raise InvalidRequest(message, "think")


def is_unload(body: bodies.OllamaPrompt) -> bool:
    """Say whether a body without a prompt asks to unload the model."""
    return body.keep_alive in (0, "0", "0s", "0m")
