"""Jobs and their answers on the wire.

Source: the WebSocket protocol document, "job_assign" and "job_complete"; what original
coordinators and workers send, and what they and the coordinators' clients read.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Raw, UnsetType
from msgspec.structs import replace

from shoal.domain import work as works
from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.job import Privacy
from shoal.domain.json_limits import is_too_deep
from shoal.domain.receipts import SignedReceipt
from shoal.domain.vocabulary import Completed, Failed, RunJob
from shoal.protocols.dispatch import ecmascript_json
from shoal.protocols.dispatch.ecmascript_json import to_json, to_string, well_formed
from shoal.protocols.dispatch.messages import (
    MESSAGE_MAX,
    REASON_MAX,
    JobComplete,
    JobIdText,
    JobType,
)
from shoal.protocols.dispatch.receipts import HASH, hash_of, read_bundled, sign
from shoal.protocols.seam.context import Identity
from shoal.protocols.seam.document_fields import Unread

NEW_TOKENS = 1024  # limit of other clients' jobs without one, at original workers
ORIGINAL_TOKENS = 256  # limit of an original coordinator's jobs without one, as there
TOKENS_MAX = 2**31 - 1
UNSUPPORTED_PAYLOAD = "Unsupported job payload"  # as the original worker says
NO_TEXT = "the worker's answer has no text"


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


# Private parts of jobs, in the order in which they are called.

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
        case works.ModelOrder():
            raise Unsupported("this protocol cannot order models")


def _token_limit(limit: object, default: int) -> int:
    """Return a token limit; coordinators pass on any value that a client sends.

    Without a limit a model may write for longer than the client waits, and the worker
    takes no other job meanwhile.
    """
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        return default
    return int(min(max(1, limit), TOKENS_MAX))


class _TextOutput(msgspec.Struct, frozen=True):
    """The human-readable part of an output."""

    text: Any = None
    error: Any = None


# Answers, for the coordinator.


def read_answer(
    job: RunJob, message: JobComplete, early: SignedReceipt | None
) -> tuple[Completed | Failed, str]:
    """Decode the result of a job; also return a warning about the message, or "".

    ``early`` is a receipt that arrived separately, before the answer.

    Raises PeerError if the output is missing or invalid.
    """
    if isinstance(message.output, UnsetType):
        raise PeerError("job_complete: output is missing")
    sent = bytes(message.output)
    output = ecmascript_json.canonical(sent)
    warning = _mismatch(message, output)
    receipt = read_bundled(message.receipt, message.receipt_signature) or early
    done = Completed(job.job_id, job.lease, receipt=receipt)
    written = output.decode()
    if job.work.kind is works.JobKind.TASK:
        done = replace(done, rest=(written,))
    if warning and not _mismatch(message, sent):
        # A worker that is not in JavaScript hashes the output as it sends it.
        warning, written = "", sent.decode()
        done = replace(done, output=written)
    if job.work.kind is works.JobKind.TASK:
        return done, warning
    fields = _text_output(output)
    if isinstance(fields.text, str):
        rest = (ecmascript_json.well_formed(fields.text),) if fields.text else ()
        return replace(done, rest=rest, output=written), warning
    if job.terms.form:  # its client accepts any output
        return replace(done, output=written), warning
    error = fields.error if isinstance(fields.error, str) else ""
    reason = ecmascript_json.well_formed(error[:REASON_MAX]) or NO_TEXT
    return Failed(job.job_id, job.lease, reason), warning


# Answers, for the worker.


def encode_answer(job_id: str, output: bytes, identity: Identity, at: float) -> str:
    """Encode an answer with its receipt.

    Args:
        output: JSON as JavaScript serializes it.
        at: seconds since the epoch.

    Raises PeerError if the message exceeds the coordinator's size limit.
    """
    digest = hash_of(output)
    receipt, signature = sign(job_id, identity.public_key, digest, at, identity.sign)
    message = {
        "type": "job_complete",
        "job_id": job_id,
        "output": Raw(output),
        "output_hash": digest,
        "receipt": Raw(receipt),
        "receipt_signature": signature,
    }
    text = ecmascript_json.to_json(message)
    if len(text) * 4 > MESSAGE_MAX and len(text.encode()) > MESSAGE_MAX:
        raise PeerError(f"the answer exceeds the limit of {MESSAGE_MAX} bytes")
    return text


def output_of(kind: works.JobKind, model: str, text: str) -> bytes:
    """Return the output of a job as JavaScript serializes it.

    Raises PeerError if it is too large or nested too deeply, or if the answer of a
    task is not JSON.
    """
    if kind is not works.JobKind.TASK:
        return ecmascript_json.stringify({"text": text, "model": model})
    try:
        return ecmascript_json.canonical(ecmascript_json.well_formed(text))
    except ecmascript_json.NotJson as error:
        raise PeerError("the answer of the task is not JSON") from error


def error_output(error: str) -> bytes:
    """Return the output that original workers send for a failed job."""
    return ecmascript_json.stringify({"error": error[:REASON_MAX]})


# Private parts of answers, in the order in which they are called.

_text_outputs = msgspec.json.Decoder(_TextOutput)


def _mismatch(message: JobComplete, output: bytes) -> str:
    """Return a warning if ``output_hash`` is wrong, else "".

    The answer is valid all the same: only the signed hash counts.
    """
    if isinstance(message.output_hash, UnsetType):
        return ""
    digest = hash_of(output)
    expected = (f'"{digest}"'.encode(), f'"{digest.removeprefix(HASH)}"'.encode())
    if bytes(message.output_hash) in expected:
        return ""
    return f"job_complete: output_hash: expected {digest}"


def _text_output(output: bytes) -> _TextOutput:
    try:
        return _text_outputs.decode(output)
    except msgspec.DecodeError:  # not an object, or with a lone surrogate
        value = ecmascript_json.parse(output)
        if isinstance(value, str):
            return _TextOutput(value)
        fields = value if isinstance(value, dict) else {}
        return _TextOutput(fields.get("text"), fields.get("error"))
