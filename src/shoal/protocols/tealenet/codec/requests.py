"""Jobs encoded as inference requests, and decoded from them.

Source: TealeNet's "Cluster Messages", "inferenceRequest"; OpenAI's API reference,
"Create chat completion"; and the fields that real peers refuse or drop, see
``docs/protocols/tealenet.md``.  Between Shoal peers the field ``shoal`` has the
complete job; other peers support chats only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from shoal.domain.errors import Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.json_limits import is_too_deep
from shoal.domain.options import OptionType
from shoal.domain.vocabulary import RunJob
from shoal.domain.work import (
    ANY_MODEL,
    JSON,
    Chat,
    Completion,
    Embedding,
    JobKind,
    Task,
    Work,
    message_text,
)
from shoal.protocols.seam.session import without_calls
from shoal.protocols.tealenet.codec.envelope import BadMessage
from shoal.protocols.tealenet.codec.messages import InferenceRequest
from shoal.protocols.tealenet.codec.scalars import EXACT_MAX, Count, Name, encode_json
from shoal.protocols.tealenet.codec.validation import ACCEPTED_OPTIONS, INTEGER_OPTIONS

TOKENS_MAX = 2**31 - 1


def write_chat(chat: Chat) -> dict[str, Any]:
    """Encode a chat in the form that all real peers accept, without nulls."""
    request: dict[str, Any] = {
        name: value
        for name, given in chat.options.items()
        if (value := _ENCODERS.get(name, _unchanged)(given)) is not None
    }
    if chat.model != ANY_MODEL:
        request["model"] = chat.model
    request["messages"] = [_message(message) for message in chat.messages]
    if chat.max_tokens is not None:
        request["max_tokens"] = min(max(1, chat.max_tokens), TOKENS_MAX)
    if chat.temperature is not None:
        request["temperature"] = chat.temperature
    request["stream"] = True
    request["stream_options"] = {
        **request.get("stream_options", {}),
        "include_usage": True,
    }
    return request


def read_chat(request: Mapping[str, Any]) -> Chat:
    """Decode the chat of a plain peer; ``decode`` has validated the types."""
    limit = request.get("max_completion_tokens") or request.get("max_tokens")
    options = {}
    for option in ACCEPTED_OPTIONS:
        name, value = option.name, request.get(option.name)
        if value is None or not option.is_requested(value):
            continue
        whole = isinstance(value, float) and value.is_integer()
        options[name] = int(value) if whole and name in INTEGER_OPTIONS else value
    if isinstance(stop := options.get("stop"), str):
        options["stop"] = [stop]
    if "tools" not in options:
        options.pop("tool_choice", None)
        options.pop("parallel_tool_calls", None)
    return Chat(
        requested_model(request),
        tuple(_with_content(message) for message in request["messages"]),
        None if limit is None or limit < 0 else int(min(max(1, limit), TOKENS_MAX)),
        request.get("temperature"),
        options,
    )


def requested_model(request: Mapping[str, Any]) -> str:
    """Return the model that a request names; ANY_MODEL if it names none."""
    model = request.get("model")
    return model if isinstance(model, str) and model else ANY_MODEL


# Private parts, in the order in which they are called.


def _with_content(message: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return a message with a text: at a Mac an absent text is empty."""
    if message.get("content") is None and not message.get("tool_calls"):
        return {**message, "content": ""}
    return message


def _message(message: Mapping[str, JSON]) -> dict[str, Any]:
    """Return a message in the form that Macs accept: text parts are joined."""
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        fields["role"] = "user"
    elif role == "developer":  # the newer name of the same role
        fields["role"] = "system"
    content = fields.get("content")
    if not isinstance(content, str) and not _has_more_than_text(content):
        fields["content"] = message_text(message)  # Rust peers require the key
    for name in ("name", "tool_call_id"):
        if not isinstance(fields.get(name), str):
            fields.pop(name, None)
    calls = fields.pop("tool_calls", None)
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        fields["tool_calls"] = [
            {"index": index, **call}  # Macs require the index in messages, too
            for index, call in enumerate(calls)
            if isinstance(call, Mapping)
        ]
    return fields


def _has_more_than_text(content: JSON) -> bool:
    return isinstance(content, Sequence) and any(
        isinstance(part, Mapping) and part.get("type") != "text" for part in content
    )


def _unchanged(value: JSON) -> JSON:
    return value


def _number(value: JSON) -> JSON:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None


def _integer(value: JSON) -> JSON:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: JSON) -> JSON:
    return value if isinstance(value, str) else None


def _texts(value: JSON) -> JSON:
    """Return a list of texts: a Mac refuses a single text."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence):
        return None
    return [each for each in value if isinstance(each, str)] or None


def _list(value: JSON) -> JSON:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return value if is_list and value else None


def _flags(value: JSON) -> JSON:
    """Return the booleans: a Mac refuses other values in ``stream_options``."""
    if not isinstance(value, Mapping):
        return None
    return {name: flag for name, flag in value.items() if isinstance(flag, bool)}


def _omitted(value: JSON) -> JSON:
    return None


_ENCODERS_BY_TYPE: Mapping[OptionType, Callable[[JSON], JSON]] = {
    OptionType.NUMBER: _number,
    OptionType.INTEGER: _integer,
    OptionType.TEXT: _text,
}

_ENCODERS: Mapping[str, Callable[[JSON], JSON]] = {
    **{
        option.name: _ENCODERS_BY_TYPE[option.type]
        for option in ACCEPTED_OPTIONS
        if option.type in _ENCODERS_BY_TYPE
    },
    "stop": _texts,
    "tools": _list,
    "stream_options": _flags,
    "group_id": _text,
    # Encoded elsewhere.
    "messages": _omitted,
    "model": _omitted,
    "max_tokens": _omitted,
    "temperature": _omitted,
    "stream": _omitted,
}
"""The encoders of options; None omits an option.  Others are sent unchanged."""


class InferenceRequestExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """Shoal's field in a request: the job except for its model and its messages.

    ``prompt`` belongs to a completion, ``inputs`` to an embedding, ``name`` and
    ``payload`` to a task.  ``job`` is the job's id for the receipt.
    """

    lease: Annotated[int, msgspec.Meta(ge=0, lt=EXACT_MAX)]
    kind: JobKind = JobKind.CHAT
    prompt: Any = None
    inputs: list[str] = []
    name: str = ""
    payload: Any = None
    max_tokens: Count | None = None
    temperature: float | None = None
    options: dict[str, Any] = {}
    continues: str = ""
    job: Name = ""


def write_request(
    job: RunJob, request_id: str, *, extended: bool = False
) -> InferenceRequest:
    """Encode a job; ``extended``: for a Shoal peer.

    The request is always for a stream: otherwise some real peers lose the text.

    Raises Unsupported for jobs that plain peers cannot do.
    """
    work = job.work
    if extended:
        request, more = _extended(job)
        more = msgspec.structs.replace(more, job=job.job_id)
        shoal: Raw | UnsetType = Raw(encode_json(more))
    elif isinstance(work, Chat):
        request, shoal = write_chat(work), UNSET
    else:
        raise Unsupported(f"a plain peer does not support {work.kind.value} jobs")
    return InferenceRequest(request_id, request, True, shoal)


def read_request(message: InferenceRequest, *, extended: bool = False) -> RunJob:
    """Decode a peer's job, under the peer's id for it.

    ``extended``: from a Shoal peer.  A plain peer's job has the lease 1; without a
    model it may use any, and a token limit below 0 means none, as in llama.cpp.

    Raises BadMessage if the request is invalid.
    """
    if extended and not isinstance(message.shoal, UnsetType):
        more = _job_extension(message, message.shoal)
        work = _work(message, more)
        lease, continues = LeaseNumber(more.lease), more.continues
        return RunJob(JobId(message.request_id), lease, work, continues)
    return RunJob(JobId(message.request_id), LeaseNumber(1), read_chat(message.request))


def receipt_job_name(message: InferenceRequest) -> str:
    """Return a Shoal peer's job id for the receipt; empty: no receipt is wanted."""
    if isinstance(message.shoal, UnsetType):
        return ""
    try:
        return _names.decode(bytes(message.shoal)).job
    except (ValueError, RecursionError):
        return ""


def wants_usage(message: InferenceRequest) -> bool:
    """Return whether a request asks for a final chunk with the usage."""
    options = message.request.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


# Private parts, in the order in which they are called.


def _extended(job: RunJob) -> tuple[dict[str, Any], InferenceRequestExtension]:
    """Return the request and the extension that together describe the complete job."""
    work, lease = without_calls(job.work), job.lease
    request: dict[str, Any] = {"messages": [], "stream": True}
    if not isinstance(work, Task) and work.model != ANY_MODEL:
        request["model"] = work.model
    match work:
        case Chat(messages=messages):
            request["messages"] = messages
            more = InferenceRequestExtension(lease)
        case Completion(prompt=prompt):
            more = InferenceRequestExtension(lease, work.kind, prompt=prompt)
        case Embedding(inputs=inputs, options=options):
            return request, InferenceRequestExtension(
                lease, work.kind, inputs=list(inputs), options=dict(options)
            )
        case Task(name=name, payload=payload):
            return request, InferenceRequestExtension(
                lease, work.kind, name=name, payload=payload
            )
    return request, msgspec.structs.replace(
        more,
        max_tokens=work.max_tokens,
        temperature=work.temperature,
        options=dict(work.options),
        continues=job.continues,
    )


def _job_extension(message: InferenceRequest, shoal: Raw) -> InferenceRequestExtension:
    try:
        more: InferenceRequestExtension = _job_extensions.decode(shoal)
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        why = "nested too deeply" if deep else str(error)
        raise _bad_request(message, f"shoal: {why}") from error
    if is_too_deep([more.prompt, more.payload, more.options]):
        raise _bad_request(message, "shoal: nested too deeply")
    return more


def _work(message: InferenceRequest, more: InferenceRequestExtension) -> Work:
    request = message.request
    model = requested_model(request)
    limits = (more.max_tokens, more.temperature, more.options)
    match more.kind:
        case JobKind.CHAT:
            return Chat(model, tuple(request["messages"]), *limits)
        case JobKind.COMPLETION:
            return Completion(model, more.prompt, *limits)
        case JobKind.EMBEDDING:
            return Embedding(model, tuple(more.inputs), more.options)
        case JobKind.TASK:
            return Task(more.name, more.payload)
        case JobKind.CALL | JobKind.CALL_STREAM:
            raise _bad_request(message, f"shoal.kind: no {more.kind.value} here")


def _bad_request(message: InferenceRequest, why: str) -> BadMessage:
    return BadMessage(why, "inferenceRequest", message.request_id)


class _ReceiptName(msgspec.Struct, frozen=True):
    job: Name = ""


_names = msgspec.json.Decoder(_ReceiptName)
_job_extensions = msgspec.json.Decoder(InferenceRequestExtension)
