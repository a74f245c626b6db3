"""OpenAI's chat request: JSON in, a chat and how it is to be answered out.

Source: OpenAI's API reference, "Create chat completion".
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON, Chat
from shoal.gateway.text import well_formed

MESSAGES_MAX = 16_384  # far more than any context holds
MODEL_MAX = 256  # characters of a model's name
TOKENS_MAX = 2**31 - 1

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",  # the newer name of the same role
    "user": "user",
    "assistant": "assistant",
}

UNSUPPORTED: Mapping[str, tuple[JSON, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "audio": (),
    "modalities": ([], ["text"]),
    "web_search_options": (),
}
"""Fields whose meaning nothing here can carry out, with the values that ask nothing.

Whoever asks for such a thing gets an error: an answer that leaves it out is wrong.
"""

_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asked for."""

    chat: Chat
    stream: bool = False
    include_usage: bool = False


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


_Tokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class _Request(msgspec.Struct, frozen=True):
    """The body.  Fields that are not here are ignored, as OpenAI's clients expect."""

    model: Annotated[str, Meta(min_length=1, max_length=MODEL_MAX)]
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # Untyped, for all that matters is whether they ask for something.
    tools: Any = None
    functions: Any = None
    response_format: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    logit_bias: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None


_decoder = msgspec.json.Decoder(_Request)


def decode_chat_request(data: bytes) -> ChatRequest:
    """Decode a body.

    Raises InvalidRequest naming the field that is no good.
    """
    if not data:
        raise InvalidRequest("the body is empty: send a JSON object")
    request = _decode(data)
    for field, harmless in UNSUPPORTED.items():
        value = getattr(request, field)
        if value is not None and value not in harmless:
            raise _unsupported(field)
    if request.n not in (None, 1):
        raise InvalidRequest("n: expected 1, more answers are not supported yet", "n")
    messages = tuple(
        _message(message, f"messages[{index}]")
        for index, message in enumerate(request.messages)
    )
    options = request.stream_options
    return ChatRequest(
        Chat(
            request.model,
            messages,
            request.max_completion_tokens or request.max_tokens,
            request.temperature,
            _options(request),
        ),
        bool(request.stream),
        options is not None and bool(options.include_usage),
    )


def _decode(data: bytes) -> _Request:
    try:
        data.decode()
        try:
            return _decoder.decode(data)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if not _ESCAPED_HALF.search(data):
                raise
            # JavaScript writes half a character where it cut a text in two.
            text = json.dumps(json.loads(data), ensure_ascii=False)
            return _decoder.decode(well_formed(text))
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error.reason}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def _misfit(text: str) -> InvalidRequest:
    """Translate msgspec's words, which put the field last and call the body ``$``."""
    found = _AT.match(text)
    assert found is not None  # it matches anything
    what, path = found["what"], (found["path"] or "").removeprefix("$").lstrip(".")
    if missing := _MISSING.match(what):
        path = f"{path}.{missing['field']}".lstrip(".")
        what = "required, but missing"
    if not path:
        return InvalidRequest(f"the body: {what[0].lower()}{what[1:]}")
    return InvalidRequest(f"{path}: {what[0].lower()}{what[1:]}", path)


def _message(message: _Message, path: str) -> Mapping[str, JSON]:
    for field in ("tool_calls", "function_call"):
        if getattr(message, field):
            raise _unsupported(f"{path}.{field}")
    if message.role in ("tool", "function"):
        raise _unsupported(f"{path}.role", message.role)
    if message.role not in ROLES:
        expected = ", ".join(ROLES)
        raise InvalidRequest(
            f"{path}.role: expected one of {expected}, got {message.role[:40]!r}",
            f"{path}.role",
        )
    said: dict[str, JSON] = {
        "role": ROLES[message.role],
        "content": _content(message.content, f"{path}.content"),
    }
    if message.name:
        said["name"] = message.name
    return said


def _content(content: str | list[_Part] | None, path: str) -> str:
    """Return the text; parts are joined, for that is what models are given."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise _unsupported(f"{path}[{index}].type", part.type[:40])
        if part.text is None:
            field = f"{path}[{index}].text"
            raise InvalidRequest(f"{field}: required, but missing", field)
        texts.append(part.text)
    return "".join(texts)


def _options(request: _Request) -> Mapping[str, JSON]:
    options: dict[str, JSON] = {}
    for field in ("top_p", "seed", "presence_penalty", "frequency_penalty"):
        if (value := getattr(request, field)) is not None:
            options[field] = value
    given = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if stop := [text for text in given if text]:
        options["stop"] = stop
    return options


def _unsupported(field: str, value: str = "") -> InvalidRequest:
    what = f"{field}: {value}" if value else field
    return InvalidRequest(f"{what} is not supported yet", field)
