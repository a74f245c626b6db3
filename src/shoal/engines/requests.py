"""Encodes a job as a request to an OpenAI-compatible server.

Some servers refuse every field that they do not know, and some a value.  A request that
was refused for one of these parts is repeated without it, or with another in its place,
and the server gets no other for this model any more.  No part is left out without which
the answer would mean something else: then the client gets the server's error.

Servers of unknown kinds silently ignore what they do not know.  So they are believed as
far as their answers show it.

Source: OpenAI API reference, "Create chat completion", "Create completion", "Create
embeddings" and "Create transcription"; for rerankings, the API that vLLM, llama-server
and others share; for refusals, errors of real servers, in their issue trackers.
"""

import base64
import binascii
import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias, TypeGuard

import msgspec
from msgspec.structs import replace

from shoal.domain import errors
from shoal.domain.options import OPTIONS
from shoal.domain.outcome import Delta
from shoal.domain.work import (
    JSON,
    Chat,
    Completion,
    Embedding,
    Feature,
    Inference,
    Rerank,
    Transcription,
    message_text,
)
from shoal.engines.engine import Finished, Item
from shoal.engines.messages import LATE_SYSTEM, SYSTEM, engine_messages, refusable_parts
from shoal.engines.server_errors import NotServed
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
    """A POST request: its path below the base URL, and JSON of ``fields`` or a form."""

    path: str
    body: bytes = b""
    form: AudioForm | None = None
    fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def parts(self) -> set[str]:
        """What the server may refuse of it; see ``refused_part``."""
        parts = removable_fields(self.fields)
        if isinstance(messages := self.fields.get("messages"), list):
            parts |= refusable_parts(messages)
        return parts


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

JSON_BEGINS = '{["-0123456789tfn'  # the first characters of values
STOPS_TAKEN = 4  # stop strings that servers with a limit take, as OpenAI's

OWN = frozenset({"stream_options", "encoding_format"})
"""Fields that are sent without having been asked for."""

STYLE = frozenset(
    option.name
    for option in OPTIONS
    if option.needs is None
    and option.name
    not in ("echo", "suffix", "best_of", "tool_choice", "parallel_tool_calls")
).union({"temperature", "reasoning"})
"""Options that only influence how a model answers, and its thoughts in a history."""

REPLACED = frozenset({"max_tokens", "n", "stop", "stream"})
"""The first has another name at some servers.  Choices and stop strings that the server
does not get are made here, and an answer that is not streamed is read as well."""

_UNKNOWN = re.compile(
    r"unknown|unrecogni[sz]ed|unexpected|unsupported|not support|\bextra\b|additional"
    r"|(only|is|are) supported|supports|not (yet )?implemented|not (permitted|allowed)"
    r"|invalid (field|parameter|argument)|cannot|can't",
    re.IGNORECASE,
)
_TOO_MANY = re.compile(r"up to|at most|maximum|too (many|long)|fewer", re.IGNORECASE)
_SYSTEM = re.compile(
    r"system (message|role|prompt)|roles?\b.{0,60}\balternat|conversation roles|jinja"
    r"|chat.?template|only .{0,20}user.{0,20}assistant",
    re.IGNORECASE | re.DOTALL,
)


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
    return EngineRequest(path, msgspec.json.encode(fields), fields=fields)


TRANSCRIPTION_FIELDS = ("language", "prompt", "temperature")


def _transcription_form(work: Transcription, model: str) -> AudioForm:
    """Return the form.

    Raises InvalidRequest if the audio is not in base64.
    """
    try:
        audio = base64.b64decode(work.audio, validate=True)
    except binascii.Error as error:
        raise errors.InvalidRequest(f"file: not in base64: {error}", "file") from error
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
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return False
    return bool(message_text(last))


def choice_count(options: Mapping[str, JSON]) -> int:
    """Return the number of requested choices per prompt."""
    n = options.get("n")
    return n if isinstance(n, int) and n > 1 else 1


def single_choice(work: TextWork, number: int) -> TextWork:
    """Return the work that makes one choice, for servers that make one at a time.

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
    if not isinstance(prompt, str) and isinstance(prompt, Sequence):
        texts = [part for part in prompt if not isinstance(part, int)]
        return max(1, len(texts))
    return 1


def reject_ignored_options(work: Inference, server: ServerKind) -> None:
    """Raise InvalidRequest for an option that the server silently ignores."""
    for option in server.ignores & work.options.keys():
        value = work.options[option]
        if value is True or value not in (None, False, "", 1, {}, "auto"):
            raise errors.InvalidRequest(
                f"{server.name} does not know {option!r}", option
            )


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


def removable_fields(body: Mapping[str, object]) -> set[str]:
    """Return the fields of a request that ``without_refused`` can do without."""
    fields = body.keys() & (OWN | STYLE | REPLACED)
    if body.get("parallel_tool_calls") is True:  # the default
        fields.add("parallel_tool_calls")
    if body.get("tool_choice") == "auto":
        fields.add("tool_choice")
    prompt, stops = body.get("prompt"), body.get("stop")
    if "best_of" in body or not isinstance(prompt, str | None):
        fields.discard("n")
    count = len(stops) if isinstance(stops, list | tuple) else 0
    if count <= STOPS_TAKEN or not is_single_text(body):
        fields.discard("stop")
    return fields


def is_single_text(body: Mapping[str, object]) -> bool:
    """Return whether the answer is one text, which can be cut at a stop string."""
    several = "n" in body or not isinstance(body.get("prompt"), str | None)
    return not several and "logprobs" not in body


def without_refused(body: Mapping[str, object], refused: Set[str]) -> dict[str, object]:
    """Return the body of a request without what the server refuses."""
    if not refused:
        return {**body}
    removed = refused & removable_fields(body)
    fields = {name: value for name, value in body.items() if name not in removed}
    if "stream" in removed:
        fields.pop("stream_options", None)
    if "max_tokens" in removed:
        fields["max_completion_tokens"] = body["max_tokens"]
    stops = body.get("stop")
    if "stop" in removed and isinstance(stops, list | tuple):
        fields["stop"] = stops[:STOPS_TAKEN]
    return fields


def refused_part(error: errors.ShoalError, parts: Collection[str]) -> str | None:
    """Return which of these parts of a request the server refused; None if none.

    They are fields, or what ``messages`` names.
    """
    if isinstance(error, errors.ContextExceeded) or not (
        isinstance(error, errors.InvalidRequest | errors.JobError)
        or (isinstance(error, NotServed) and not error.model)
    ):
        return None
    message = str(error)
    field = error.field if isinstance(error, errors.InvalidRequest) else None
    words: set[str] = set(re.findall(r"\w+", f"{message} {field or ''}"))
    if "reasoning_content" in words:
        words.add("reasoning")
    unknown = _UNKNOWN.search(message) is not None
    # The longest first: "stream_options" is also about a stream.
    for part in sorted(words.intersection(parts), key=len, reverse=True):
        too_many = part == "stop" and _TOO_MANY.search(message)
        if part in OWN or unknown or too_many:
            return part
    if _SYSTEM.search(message):
        return next((each for each in (LATE_SYSTEM, SYSTEM) if each in parts), None)
    return None


class FieldIgnored(errors.CannotDo):
    """The server ignored a field, and so lacks a feature.

    A model that was to call a tool, and did not, may call one all the same.
    """

    def __init__(self, field: str, feature: Feature | None = None) -> None:
        super().__init__(
            f"{field}: the model server ignored it. Repeat the request, which other "
            "workers may do, or `shoal join` an engine that does: see docs/engines.md",
            field,
        )
        self.feature = feature


def check_heeded(
    work: Inference, items: AsyncGenerator[Item, None]
) -> AsyncGenerator[Item, None]:
    """Return the ``items`` of an answer.

    They raise FieldIgnored at the first that shows that the server ignored a field.
    """
    if not work.options:
        return items
    must_call = work.options.get("tool_choice") not in (None, "auto", "none")
    needs = work.needs & {Feature.LOGPROBS, Feature.SCHEMA}
    return _checked(items, needs, must_call) if must_call or needs else items


async def _checked(
    items: AsyncGenerator[Item, None], needs: Set[Feature], must_call: bool
) -> AsyncGenerator[Item, None]:
    begun = called = False
    async with aclosing(items) as answer:
        async for item in answer:
            if isinstance(item, Finished):
                if must_call and not called and item.finish_reason == "stop":
                    raise FieldIgnored("tool_choice")
            elif not called and (must_call or not begun):
                delta = item if isinstance(item, Delta) else Delta(0, {"content": item})
                called = "tool_calls" in delta.fields
                text = str(delta.fields.get("content") or "").lstrip()
                checked = text and not begun
                if checked and Feature.LOGPROBS in needs and delta.logprobs is None:
                    raise FieldIgnored("logprobs", Feature.LOGPROBS)
                if checked and Feature.SCHEMA in needs and text[0] not in JSON_BEGINS:
                    raise FieldIgnored("response_format", Feature.SCHEMA)
                begun = begun or bool(text)
            yield item
