"""Decodes Ollama's chats and completions.

Ollama's results of tools name the function, or nothing, where a chat's name the call:
each result belongs to the first call without one.  A result without a call is read all
the same: clients cut the beginning of long conversations off.

Source: Ollama's API reference, "Generate a completion" and "Generate a chat
completion"; its Modelfile reference, "Valid parameters and values".
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from msgspec import Raw, UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON, Chat, Completion
from shoal.gateway.chat import messages
from shoal.gateway.chat.job_answers import GenerationRequest
from shoal.gateway.chat.messages import Message
from shoal.gateway.chat.ollama import bodies
from shoal.gateway.chat.ollama.bodies import OllamaMessage, OllamaTool
from shoal.gateway.chat.options import (
    Encoder,
    foreign_options,
    requested_options,
    stop_strings,
)
from shoal.gateway.http import decoding
from shoal.gateway.http.decoding import decode_object, is_given, unsupported


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


ROLES = ("system", "user", "assistant", "tool")

IMAGE_TYPES: Mapping[str, str] = {
    "iVBORw0KGgo": "image/png",
    "/9j/": "image/jpeg",
    "R0lGOD": "image/gif",
    "UklGR": "image/webp",
    "Qk": "image/bmp",
}
"""The type of an image by the beginning of its base64: Ollama's images have none."""


def translate_messages(
    conversation: Sequence[OllamaMessage],
) -> tuple[messages.Message, ...]:
    """Return the messages of a chat.

    Raises InvalidRequest naming an invalid field.
    """
    translator = _Translator()
    return tuple(
        translator.translate(message, f"messages[{index}]")
        for index, message in enumerate(conversation)
    )


def translate_tools(tools: Sequence[OllamaTool]) -> list[JSON]:
    """Return the option ``tools`` of a chat.

    Raises InvalidRequest.
    """
    return messages.function_tools(
        [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    )


def user_content(text: str, images: Sequence[str], path: str) -> JSON:
    """Return the content of a user's message; ``path`` is where the images are.

    They come before the text, as Ollama shows them to a model.

    Raises InvalidRequest if one is none.
    """
    parts = [messages.image_part(_image_url(each, path)) for each in images]
    return messages.content_of([*parts, messages.text_part(text)])


@dataclass(slots=True)
class _Call:
    """A call, which at most one result follows."""

    id: str
    function: str
    answered: bool = False


class _Translator:
    """Translates the messages of one chat, in their order."""

    def __init__(self) -> None:
        self._calls = 0  # so far
        # All calls in order, and those of a function.  A call is in several: once it is
        # answered, each drops it when it is the first.
        self._all: deque[_Call] = deque()
        self._by_function: defaultdict[str, deque[_Call]] = defaultdict(deque)
        self._by_id: dict[str, _Call] = {}  # the last of each id

    def translate(self, message: OllamaMessage, path: str) -> messages.Message:
        text = message.content or ""
        if message.role not in ROLES:
            raise InvalidRequest(
                f"{path}.role: expected one of {', '.join(ROLES)}, "
                f"got {message.role[:40]!r}",
                f"{path}.role",
            )
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest(
                f"{path}.tool_calls: only an assistant's message may call tools",
                f"{path}.tool_calls",
            )
        if message.images and message.role != "user":
            raise InvalidRequest(
                f"{path}.images: only a user's message may have images",
                f"{path}.images",
            )
        match message.role:
            case "assistant":
                calls = [
                    self._call(number, message, path)
                    for number in range(len(message.tool_calls or ()))
                ]
                return messages.assistant_message(
                    text, reasoning=message.thinking or None, tool_calls=calls
                )
            case "tool":
                return messages.tool_result(self._answered_call(message), text)
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
        next_id = self._next_id()  # also if it is not used: a client may count them
        call = _Call(given.id or next_id, name)
        if (replaced := self._by_id.get(call.id)) is not None:
            replaced.answered = True  # a result of this id is the new one's
        self._by_id[call.id] = call
        self._all.append(call)
        self._by_function[name].append(call)
        return messages.tool_call(
            call.id, name, decoded_arguments(given.function.arguments, at)
        )

    def _answered_call(self, message: OllamaMessage) -> str:
        """Return the id of the call that a message has the result of, or a new one."""
        named, call_id = message.tool_name, message.tool_call_id
        if call_id:
            call = self._by_id.get(call_id)
        else:
            call = _first_open(self._by_function[named] if named else self._all)
        if call is None or call.answered:
            next_id = self._next_id()
            return call_id or next_id
        call.answered = True
        return call.id

    def _next_id(self) -> str:
        self._calls += 1
        return f"call_{self._calls - 1}"


def _first_open(calls: "deque[_Call]") -> _Call | None:
    """Return the first call without a result; drops those before it."""
    while calls and calls[0].answered:
        calls.popleft()
    return calls[0] if calls else None


def _function(tool: OllamaTool, path: str) -> messages.RequestedFunction:
    if tool.type != "function":
        raise unsupported(f"{path}.type", tool.type[:40])
    given = tool.function
    at = f"{path}.function.parameters"
    return messages.RequestedFunction(
        given.name, at, given.parameters, given.description
    )


def _image_url(base64: str, path: str) -> str:
    for beginning, media_type in IMAGE_TYPES.items():
        if base64.startswith(beginning):
            return messages.data_url(media_type, base64)
    raise InvalidRequest(
        f"{path}: expected PNG, JPEG, GIF, WebP or BMP images in base64", path
    )


def decoded_arguments(raw: Raw | UnsetType, path: str) -> str:
    """Return the arguments of a tool call as JSON text.  Raises InvalidRequest."""
    arguments = decode_object(raw, path) if is_given(raw) else {}
    return msgspec.json.encode(arguments).decode()
