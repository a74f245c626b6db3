"""Translates how a model is to answer: Ollama's options, format and thinking.

Source: Ollama's API reference, "Generate a chat completion"; its Modelfile reference,
"Valid parameters and values".
"""

from collections.abc import Mapping

import msgspec
from msgspec import Raw, UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON
from shoal.gateway.generation.options import (
    Encoder,
    foreign_options,
    requested_options,
    stop_strings,
)
from shoal.gateway.http.decoding import (
    decode_object,
    is_given,
    raw_fields,
    size_of,
    unsupported,
)
from shoal.gateway.ollama.bodies import (
    OPTIONS,
    ModelOptions,
    OllamaOptions,
    OllamaPrompt,
)

EFFORTS = ("low", "medium", "high", "max")

SCHEMA_NAME = "answer"  # the chat form names schemas, Ollama does not

_ENCODERS: Mapping[str, Encoder] = {"stop": stop_strings}
_JSON_NAMES = (b'"json"', b'""')


def token_limit(options: ModelOptions | None) -> int | None:
    """Return the limit of an answer's tokens; with Ollama, 0 and less mean none."""
    limit = None if options is None else options.num_predict
    return None if limit is None or limit <= 0 else limit


def answer_options(body: OllamaPrompt, data: bytes) -> dict[str, JSON]:
    """Return the options of the work that a body asks for; ``data`` is its text.

    Raises InvalidRequest naming an invalid field.
    """
    if body.logprobs:
        raise unsupported("logprobs")
    found: dict[str, JSON] = {}
    if body.options is not None:
        found |= requested_options(body.options, OPTIONS, _ENCODERS)
        found |= foreign_options(bytes(raw_fields(data)["options"]), OllamaOptions)
    found |= foreign_options(data, type(body))
    if (form := response_format(body.format)) is not None:
        found["response_format"] = form
    return found


def response_format(given: Raw | UnsetType) -> JSON:
    """Return the option ``response_format``; None: the answer is any text.

    Raises InvalidRequest.
    """
    if not is_given(given):
        return None
    if size_of(given) <= 8 and (text := bytes(given).strip()) in _JSON_NAMES:
        return None if text == b'""' else {"type": "json_object"}
    if not bytes(given).lstrip().startswith(b"{"):
        raise InvalidRequest('format: expected "json" or a JSON schema', "format")
    schema = decode_object(given, "format")
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


def is_unload(body: OllamaPrompt) -> bool:
    """Say whether a body without a prompt asks to unload the model."""
    return body.keep_alive in (0, "0", "0s", "0m")


def decoded_arguments(raw: Raw | UnsetType, path: str) -> str:
    """Return the arguments of a tool call as JSON text.  Raises InvalidRequest."""
    arguments = decode_object(raw, path) if is_given(raw) else {}
    return msgspec.json.encode(arguments).decode()
