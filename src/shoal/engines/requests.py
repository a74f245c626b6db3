"""Encodes a job as the request of an OpenAI-compatible server.

Source: OpenAI API reference, "Create chat completion", "Create completion", "Create
embeddings" and "Create transcription"; for rerankings, the API that vLLM, llama-server
and others share.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeGuard

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import (
    JSON,
    Chat,
    Completion,
    Embedding,
    Inference,
    Rerank,
    Transcription,
    message_text,
)
from shoal.engines.messages import engine_messages, refusable_parts
from shoal.engines.refused_parts import (
    STOPS_TAKEN,
    is_single_text,
    removable_fields,
    without_refused,
)
from shoal.engines.server_kinds import ServerKind

TextWork: TypeAlias = Chat | Completion


@dataclass(frozen=True, slots=True)
class AudioForm:
    """A form with a file of audio, and with text in its other fields."""

    fields: tuple[tuple[str, str], ...]
    audio: bytes
    file_name: str


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A POST request: the path below the base URL, and JSON or a form.

    The server may refuse ``parts`` of it; see ``refused_parts``.
    """

    path: str
    body: bytes = b""
    form: AudioForm | None = None
    parts: frozenset[str] = frozenset()


# Fields that the engine sets; an option must not override them.
RESERVED = frozenset(
    {
        *("messages", "prompt", "input", "model", "stream", "stream_options"),
        *("temperature", "max_tokens", "max_completion_tokens", "n_predict"),
        *("add_generation_prompt", "continue_final_message", "return_progress"),
        *("encoding_format",),
    }
)


CONTINUE_FLAGS: Mapping[str, JSON] = {
    "add_generation_prompt": False,
    "continue_final_message": True,
}
"""Fields of a chat whose last message is the beginning of the answer, for vLLM and its
relatives, which begin a new turn without them."""


def openai_request(
    work: Inference,
    model: str,
    flags: Mapping[str, JSON] | None = None,
    refused: Set[str] = frozenset(),
) -> EngineRequest:
    """Return the job as a request to ``model``, streamed if possible.

    ``flags`` are more fields of a chat; ``refused`` are parts that the server refuses.
    """
    body: dict[str, object] = {
        name: value for name, value in work.options.items() if name not in RESERVED
    }
    body["model"] = model
    match work:
        case Embedding():
            # Lists of numbers are far larger; servers without support for base64 send
            # those instead.
            body |= {"input": work.inputs, "encoding_format": "base64"}
            return _json_request("/embeddings", body, refused)
        case Rerank():
            body |= {"query": work.query, "documents": work.documents}
            return _json_request("/rerank", body, refused)
        case Transcription():
            return EngineRequest(
                "/audio/transcriptions", form=_transcription_form(work, model)
            )
        case Chat():
            path = "/chat/completions"
            body["messages"] = engine_messages(work.messages, refused)
            body |= flags or {}
        case Completion():
            path = "/completions"
            body["prompt"] = work.prompt
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if work.max_tokens is not None:
        body["max_tokens"] = work.max_tokens
    if work.temperature is not None:
        body["temperature"] = work.temperature
    return _json_request(path, body, refused)


def _json_request(
    path: str, body: Mapping[str, object], refused: Set[str]
) -> EngineRequest:
    fields = without_refused(body, refused)
    parts = removable_fields(fields)
    if isinstance(messages := fields.get("messages"), list):
        parts |= refusable_parts(messages)
    return EngineRequest(
        path, msgspec.json.encode(fields), parts=frozenset(parts - refused)
    )


TRANSCRIPTION_FIELDS = ("language", "prompt", "temperature")


def _transcription_form(work: Transcription, model: str) -> AudioForm:
    """Return the form.

    Raises InvalidRequest if the audio is not in base64.
    """
    try:
        audio = base64.b64decode(work.audio, validate=True)
    except binascii.Error as error:
        raise InvalidRequest(f"file: not in base64: {error}", "file") from error
    fields = [("model", model)]
    for name in TRANSCRIPTION_FIELDS:
        if (value := work.options.get(name)) is not None:
            fields.append((name, str(value)))
    granularities = work.options.get("timestamps")
    if isinstance(granularities, Sequence) and not isinstance(granularities, str):
        fields.append(("response_format", "verbose_json"))
        fields += [("timestamp_granularities[]", str(each)) for each in granularities]
    else:
        fields.append(("response_format", "json"))
    return AudioForm(tuple(fields), audio, f"audio.{work.format}")


def is_begun(work: Inference) -> TypeGuard[Chat]:
    """Return whether a chat ends with the beginning of its answer."""
    if not isinstance(work, Chat) or not work.messages:
        return False
    last = work.messages[-1]
    is_text = bool(message_text(last)) and not last.get("tool_calls")
    return is_text and last.get("role") == "assistant"


def choice_count(options: Mapping[str, JSON]) -> int:
    """Return the number of requested choices per prompt."""
    n = options.get("n")
    return n if isinstance(n, int) and n > 1 else 1


def single_choice(work: TextWork, number: int) -> TextWork:
    """Return the work that makes one choice, for a server that makes one at a time.

    With the seed of the others, it would be the same.
    """
    options = {name: value for name, value in work.options.items() if name != "n"}
    if isinstance(seed := options.get("seed"), int):
        options["seed"] = seed + number
    return replace(work, options=options)


def unsent_stops(work: Inference, refused: Set[str]) -> Sequence[str]:
    """Return the stop strings that a server does not get which ``refused`` them."""
    prompt = work.prompt if isinstance(work, Completion) else None
    stops = work.options.get("stop") if "stop" in refused else None
    if not (
        isinstance(stops, list | tuple)
        and is_single_text({**work.options, "prompt": prompt})
    ):
        return []
    return [each for each in stops[STOPS_TAKEN:] if isinstance(each, str)]


def prompt_count(work: Inference) -> int:
    """Return the number of prompts; a list of numbers is one, in tokens."""
    prompt = work.prompt if isinstance(work, Completion) else ""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        texts = [part for part in prompt if not isinstance(part, int)]
        return max(1, len(texts))
    return 1


def reject_ignored_options(work: Inference, server: ServerKind) -> None:
    """Raise InvalidRequest for an option that the server silently ignores."""
    for option in server.ignores & work.options.keys():
        value = work.options[option]
        if value is True or value not in (None, False, "", 1, {}, "auto"):
            raise InvalidRequest(f"{server.name} does not know {option!r}", option)


def with_chosen_tools(work: Inference) -> Inference:
    """Return the job with the tools that its ``tool_choice`` leaves, for llama-server.

    That ignores the name of one tool: it gets this one alone, and must call one.  For
    "none", it would show the tools to the model and pass on its calls as text.
    """
    choice, tools = work.options.get("tool_choice"), work.options.get("tools")
    if not isinstance(tools, Sequence) or choice in (None, "auto", "required"):
        return work
    options = dict(work.options)
    if isinstance(choice, Mapping):
        chosen = function_name(choice)
        options["tools"] = [tool for tool in tools if function_name(tool) == chosen]
        options["tool_choice"] = "required"
    else:
        del options["tools"], options["tool_choice"]
    return replace(work, options=options)


def function_name(tool: JSON) -> str | None:
    """Return the name of the function in a tool, or in the choice of one."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
