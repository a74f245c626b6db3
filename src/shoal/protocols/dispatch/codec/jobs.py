"""Jobs on the wire: the coordinator encodes them, the worker decodes them.

Source: the WebSocket protocol document, "job_assign", what original coordinators send,
and what original workers read.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.ids import LeaseNumber
from shoal.domain.job import Privacy
from shoal.domain.json_limits import is_too_deep
from shoal.domain.vocabulary import RunJob
from shoal.domain.work import (
    JSON,
    Chat,
    Completion,
    Embedding,
    JobKind,
    Rerank,
    Task,
    Transcription,
    Work,
    message_text,
)
from shoal.protocols.dispatch.codec.ecmascript_json import (
    to_json,
    to_string,
    well_formed,
)
from shoal.protocols.dispatch.codec.messages import JobIdText, JobType, Lease
from shoal.protocols.seam.document_fields import Undocumented, Unread
from shoal.protocols.seam.input_work import input_prompt, input_work, inputs_of
from shoal.protocols.seam.session import without_calls

NEW_TOKENS = 1024  # limit of other clients' jobs without one, at original workers
ORIGINAL_TOKENS = 256  # limit of an original coordinator's jobs without one, as there
TOKENS_MAX = 2**31 - 1
UNSUPPORTED_PAYLOAD = "Unsupported job payload"  # as the original worker says

_MAX = sys.float_info.max
_Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-_MAX, le=_MAX)]
_SHOAL = Undocumented("what the payload cannot express: `JobExtension`")


class JobExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """Extension field of a job: what the payload cannot express."""

    lease: Lease
    kind: JobKind | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: Any = ""
    inputs: list[str] = []
    name: str = ""
    max_tokens: int | None = None
    temperature: _Finite | None = None
    options: dict[str, Any] = {}
    continues: str = ""
    thoughts: str = ""


class _JobAssign(msgspec.Struct, frozen=True, tag="job_assign"):
    """A job as it is sent, its fields in the original order."""

    job_id: str
    job_type: str
    payload: Raw
    policy: Annotated[
        str,
        Unread("the coordinator has decided by it; nothing at a worker depends on it"),
    ]
    privacy_class: str
    user_id: str
    shoal: Annotated[Raw | UnsetType, _SHOAL] = UNSET


class JobAssignment(msgspec.Struct, frozen=True):
    """A job as it is received, with only the fields in use."""

    job_id: JobIdText
    job_type: Any = None
    payload: Any = None
    privacy_class: Any = None
    user_id: Any = None
    shoal: Annotated[Raw | UnsetType, _SHOAL] = UNSET


def encode_job(job: RunJob, *, extended: bool) -> str:
    """Encode a job; ``extended`` adds the extension field.

    An original worker gets work that a client submitted in the original form verbatim.
    """
    work, terms = job.work, job.terms
    if extended:
        payload, extension = _extended_payload(job)
        shoal: Raw | UnsetType = Raw(to_json(extension))
    else:
        payload, shoal = _plain_payload(work), UNSET
    verbatim = terms.form and not extended
    return to_json(
        _JobAssign(
            job.job_id,
            JobType.TASK if work.kind is JobKind.TASK else JobType.LLM_INFER,
            Raw(well_formed(terms.form) if verbatim else to_json(payload)),
            terms.policy.name,
            terms.privacy.name,
            well_formed(terms.user),
            shoal,
        )
    )


def decode_assignment(text: str) -> JobAssignment:
    """Decode a job assignment.  Raises PeerError if it is invalid."""
    try:
        return _assignments.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"job_assign: {error}") from error


def check_restrictions(
    message: JobAssignment, only_for: Collection[str], privacy: Privacy | None
) -> None:
    """Raise PeerError if a worker's owner does not accept the job.

    ``only_for`` names users, for an original coordinator has no other names; a job
    whose user or privacy class is missing is not accepted either.
    """
    if only_for and _user_name(message.user_id) not in only_for:
        raise PeerError("this worker accepts the jobs of some users only")
    if privacy is not None and message.privacy_class != privacy.name:
        raise PeerError(f"this worker accepts {privacy.value} jobs only")


def decode_job(
    message: JobAssignment, model: str, *, extended: bool
) -> tuple[Work, LeaseNumber, str, str]:
    """Return the work of a job, its lease, and its answer so far: text and thoughts.

    ``model`` is the worker's model, because jobs do not name one.

    Raises PeerError if the worker cannot run it.
    """
    if not extended or isinstance(message.shoal, UnsetType):
        _check_depth(message.payload)
        return _work(message, None, model), LeaseNumber(0), "", ""
    try:
        extension = _extensions.decode(message.shoal)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"job_assign: shoal: {error}") from error
    _check_depth(
        message.payload, extension.messages, extension.prompt, extension.options
    )
    return (
        _work(message, extension, model),
        LeaseNumber(extension.lease),
        extension.continues,
        extension.thoughts,
    )


def conversation_prompt(messages: Sequence[Mapping[str, JSON]]) -> str:
    """Return a conversation as one text, for workers that accept only a prompt."""
    if len(messages) == 1 and messages[0].get("role") == "user":
        return message_text(messages[0])
    parts = []
    for message in messages:
        role, text = message.get("role"), message_text(message)
        if role in ("system", "developer"):
            parts.append(text)
        else:
            parts.append(f"{'Assistant' if role == 'assistant' else 'User'}: {text}")
    return "\n\n".join([*parts, "Assistant:"])


# Private parts, in the order in which they are called.

_assignments = msgspec.json.Decoder(JobAssignment)
_extensions = msgspec.json.Decoder(JobExtension)


def _check_depth(*values: object) -> None:
    if any(is_too_deep(value) for value in values):
        raise PeerError("job_assign: nested too deeply")


def _user_name(user: object) -> str:
    """Return a user's name; original coordinators pass on what a client sends."""
    if isinstance(user, bool) or not isinstance(user, str | int | float):
        return ""
    return to_string(user)


def _extended_payload(job: RunJob) -> tuple[JSON, JobExtension]:
    """Return the payload and the extension field that together carry all the work."""
    work, lease = without_calls(job.work), job.lease
    payload: dict[str, JSON] = {"job_type": JobType.LLM_INFER}
    match work:
        case Chat(messages=messages):
            prompt = conversation_prompt(messages)
            carried: list[dict[str, Any]] | None = [dict(each) for each in messages]
            if carried == _user_message(prompt):
                payload["prompt"] = prompt
                carried = None
            extension = JobExtension(lease, messages=carried)
        case Completion(prompt=text):
            extension = JobExtension(lease, kind=work.kind, prompt=text)
        case Embedding() | Rerank() | Transcription():
            return payload, JobExtension(
                lease,
                work.kind,
                prompt=input_prompt(work),
                inputs=inputs_of(work),
                options=dict(work.options),
            )
        case Task(name=name):
            return work.payload, JobExtension(lease, kind=work.kind, name=name)
    return payload, msgspec.structs.replace(
        extension,
        max_tokens=work.max_tokens,
        temperature=work.temperature,
        options=dict(work.options),
        continues=job.continues,
        thoughts=job.thoughts,
    )


def _plain_payload(work: Work) -> JSON:
    """Return the payload for an original worker, of work not in the original form.

    Scheduling assigns original workers only jobs that need nothing but text.
    """
    match without_calls(work):
        case Task(name=name, payload=payload):
            fields = payload if isinstance(payload, Mapping) else {"input": payload}
            return {"job_type": JobType.TASK, "task_type": name, **fields}
        case Chat(messages=messages, max_tokens=limit):
            prompt: JSON = conversation_prompt(messages)
        case Completion(prompt=prompt, max_tokens=limit):
            pass
        case Embedding() | Rerank() | Transcription():
            raise Unsupported(
                f"a worker without the extension cannot run {work.kind.value} jobs"
            )
    tokens = _token_limit(limit, NEW_TOKENS)
    return {"job_type": JobType.LLM_INFER, "prompt": prompt, "max_tokens": tokens}


def _work(message: JobAssignment, extension: JobExtension | None, model: str) -> Work:
    payload = message.payload
    fields = payload if isinstance(payload, dict) else {}
    if extension is not None:
        limits = (extension.max_tokens, extension.temperature, extension.options)
        match extension.kind:
            case JobKind.COMPLETION:
                return Completion(model, extension.prompt, *limits)
            case JobKind.EMBEDDING | JobKind.RERANK | JobKind.TRANSCRIPTION as kind:
                carried = extension.prompt, extension.inputs, extension.options
                return input_work(kind, model, *carried)
            case JobKind.TASK:
                return Task(extension.name, payload)
            case JobKind.CALL | JobKind.CALL_STREAM:
                raise PeerError(
                    f"job_assign: shoal.kind: no {extension.kind.value} here"
                )
            case JobKind.CHAT | None:
                messages = extension.messages
    else:
        messages = None
        limits = (_token_limit(fields.get("max_tokens")), None, {})
        if message.job_type == JobType.TASK:
            name = fields.get("task_type")
            if not isinstance(name, str):
                raise PeerError(f"{UNSUPPORTED_PAYLOAD}: task_type is missing")
            return Task(name, payload)
    if messages is None:
        prompt = fields.get("prompt")
        if message.job_type != JobType.LLM_INFER or not isinstance(prompt, str):
            raise PeerError(f"{UNSUPPORTED_PAYLOAD}: prompt is missing")
        messages = _user_message(prompt)
    return Chat(model, tuple(messages), *limits)


def _user_message(prompt: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}]


def _token_limit(limit: object, default: int = ORIGINAL_TOKENS) -> int:
    """Return a token limit; coordinators pass on any value that a client sends.

    Without a limit a model may write for longer than the client waits, and the worker
    takes no other job meanwhile.
    """
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        return default
    return int(min(max(1, limit), TOKENS_MAX))
