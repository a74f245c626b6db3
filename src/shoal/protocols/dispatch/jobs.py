"""Jobs on the wire: the coordinator encodes them, the worker decodes them.

Source: the WebSocket protocol document, "job_assign", what original coordinators send,
and what original workers read.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Raw

from shoal.domain import work as works
from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.job import Privacy
from shoal.domain.json_limits import is_too_deep
from shoal.domain.vocabulary import RunJob
from shoal.protocols.dispatch.ecmascript_json import (
    to_json,
    to_string,
    well_formed,
)
from shoal.protocols.dispatch.messages import JobIdText, JobType
from shoal.protocols.seam.document_fields import Unread

NEW_TOKENS = 1024  # limit of other clients' jobs without one, at original workers
ORIGINAL_TOKENS = 256  # limit of an original coordinator's jobs without one, as there
TOKENS_MAX = 2**31 - 1
UNSUPPORTED_PAYLOAD = "Unsupported job payload"  # as the original worker says


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


class JobAssignment(msgspec.Struct, frozen=True):
    """A job as it is received, with only the fields in use."""

    job_id: JobIdText
    job_type: Any = None
    payload: Any = None
    privacy_class: Any = None
    user_id: Any = None


def encode_job(job: RunJob) -> str:
    """Encode a job; one that a client submitted in the original form is verbatim.

    Raises Unsupported for what a worker of this wire cannot do.
    """
    if job.continues:
        raise Unsupported("this protocol cannot continue answers")
    work, terms = job.work, job.terms
    payload = well_formed(terms.form) if terms.form else to_json(_plain_payload(work))
    return to_json(
        _JobAssign(
            job.job_id,
            JobType.TASK if work.kind is works.JobKind.TASK else JobType.LLM_INFER,
            Raw(payload),
            terms.policy.name,
            terms.privacy.name,
            well_formed(terms.user),
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

    ``only_for`` names users, because an original coordinator has no other names; a job
    whose user or privacy class is missing is not accepted either.
    """
    if only_for and _user_name(message.user_id) not in only_for:
        raise PeerError("this worker accepts the jobs of some users only")
    if privacy is not None and message.privacy_class != privacy.name:
        raise PeerError(f"this worker accepts {privacy.value} jobs only")


def decode_job(message: JobAssignment, model: str) -> works.Chat | works.Task:
    """Return the work of a job, for the worker's model: jobs do not name one.

    Raises PeerError if the worker cannot run it.
    """
    payload = message.payload
    if is_too_deep(payload):
        raise PeerError("job_assign: nested too deeply")
    fields = payload if isinstance(payload, dict) else {}
    if message.job_type == JobType.TASK:
        name = fields.get("task_type")
        if not isinstance(name, str):
            raise PeerError(f"{UNSUPPORTED_PAYLOAD}: task_type is missing")
        return works.Task(name, payload)
    prompt = fields.get("prompt")
    if message.job_type != JobType.LLM_INFER or not isinstance(prompt, str):
        raise PeerError(f"{UNSUPPORTED_PAYLOAD}: prompt is missing")
    limit = _token_limit(fields.get("max_tokens"), ORIGINAL_TOKENS)
    return works.Chat(model, ({"role": "user", "content": prompt},), limit)


def conversation_prompt(messages: Sequence[Mapping[str, works.JSON]]) -> str:
    """Return a conversation as one text, for workers that accept only a prompt."""
    if len(messages) == 1 and messages[0].get("role") == "user":
        return works.message_text(messages[0])
    parts = []
    for message in messages:
        role, text = message.get("role"), works.message_text(message)
        if role in ("system", "developer"):
            parts.append(text)
        else:
            parts.append(f"{'Assistant' if role == 'assistant' else 'User'}: {text}")
    return "\n\n".join([*parts, "Assistant:"])


# Private parts, in the order in which they are called.

_assignments = msgspec.json.Decoder(JobAssignment)


def _user_name(user: object) -> str:
    """Return a user's name; original coordinators pass on what a client sends."""
    if isinstance(user, bool) or not isinstance(user, str | int | float):
        return ""
    return to_string(user)


def _plain_payload(work: works.Work) -> works.JSON:
    """Return the payload of work that is not in the original form."""
    match work:
        case works.Task(name=name, payload=payload):
            fields = payload if isinstance(payload, Mapping) else {"input": payload}
            return {"job_type": JobType.TASK, "task_type": name, **fields}
        case works.Chat(messages=messages, max_tokens=limit):
            return {
                "job_type": JobType.LLM_INFER,
                "prompt": conversation_prompt(messages),
                "max_tokens": _token_limit(limit, NEW_TOKENS),
            }
        case (
            works.Completion()
            | works.Embedding()
            | works.Rerank()
            | works.Transcription()
        ):
            raise Unsupported(f"this protocol carries no {work.kind.value} jobs")
        case works.Call() | works.CallStream():
            raise Unsupported("this protocol cannot call functions")


def _token_limit(limit: object, default: int) -> int:
    """Return a token limit; coordinators pass on any value that a client sends.

    Without a limit a model may write for longer than the client waits, and the worker
    takes no other job meanwhile.
    """
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        return default
    return int(min(max(1, limit), TOKENS_MAX))
