"""Encodes jobs for clients of the job API."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw

from shoal.domain.errors import InvalidRequest
from shoal.domain.facts import Fact, JobCancelled, JobExpired, JobFailed
from shoal.domain.job import Gang, TimeLimit
from shoal.domain.money import dollars
from shoal.domain.outcome import Outcome
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.work import Call, JobKind, Work
from shoal.gateway.http.responses import encode_text, well_formed
from shoal.ledger.canonical import to_base64
from shoal.ledger.receipts import output_of
from shoal.pool.lifecycle import ENDED, JobState
from shoal.pool.trust import NO_TRUSTED_WORKER
from shoal.store.ledger import LoggedReceipt
from shoal.store.port import Store, StoredJob, StoredJobSummary, summarize
from shoal.tasks.json_calls import contents_as_json

JobStatus: TypeAlias = Literal["pending", "assigned", "completed", "failed"]

STATUSES: Mapping[JobState, JobStatus] = {
    JobState.QUEUED: "pending",
    JobState.LEASED: "assigned",
    JobState.STREAMING: "assigned",
    JobState.DONE: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "failed",
    JobState.EXPIRED: "failed",
}

JobType: TypeAlias = Literal[
    "LLM_INFER",
    "TASK",
    "COMPLETION",
    "EMBEDDING",
    "RERANK",
    "TRANSCRIPTION",
    "CALL",
    "MODEL",
]

NO_WORKER = "no_eligible_worker"
WORKER_LOST = "worker_disconnected"
CANCELLED = "cancelled"
WITHHELD = "content_filter"

Anything = Annotated[Raw, Meta(extra_json_schema={})]

NULL = Raw(b"null")


class CoordinatorReceipt(msgspec.Struct, frozen=True):
    """The coordinator's receipt: its index in the log, and the signed text."""

    index: int
    body: str
    signature: str  # base64


class JobListEntry(msgspec.Struct, frozen=True):
    """A job in a list.  Times are in UTC; ``detail`` says what went wrong.

    ``name`` is that of a function that is called.
    """

    id: str
    status: JobStatus
    created_at: str
    completed_at: str | None
    job_type: JobType
    user_id: str
    policy: str
    privacy_class: str
    price: str
    attempts: int
    detail: str | None
    name: str | None


class JobInfo(msgspec.Struct, frozen=True):
    """A job; the first six fields are those of the original, in its order.

    ``receipt`` has what the worker signed, the signature, whether that proves the
    result, and the verdict in a word.  Of a job that failed, ``result`` has an
    ``error`` for programs, and ``detail`` says the same to people.
    """

    id: str
    status: JobStatus
    result: Anything
    receipt: Anything
    created_at: str
    completed_at: str | None
    job_type: JobType
    user_id: str
    policy: str
    privacy_class: str
    price: str
    attempts: int
    detail: str | None
    name: str | None
    coordinator_receipt: CoordinatorReceipt | None
    gang: Gang | None


async def encode_stored_job(
    store: Store, stored: StoredJob, *, withheld: bool = False
) -> bytes:
    """Encode a job as JSON; a ``withheld`` result is replaced by an error.

    Raises StoreError.
    """
    filed: Sequence[LoggedReceipt] = ()
    result = NULL
    fields = msgspec.structs.asdict(list_entry(summarize(stored)))
    if stored.outcome is not None:
        filed = await store.ledger.receipts_of(stored.job.id)
        result = Raw(_result(stored.job.work, stored.outcome))
        if withheld:
            result = _error(WITHHELD)
            fields["detail"] = "the result matches the moderation list"
    elif stored.state in ENDED:
        facts = await store.history(stored.job.id)
        result = _error(_failure_code(stored, [each.fact for each in facts]))
    shown = JobInfo(
        **fields,
        result=result,
        receipt=_receipt(filed),
        coordinator_receipt=_coordinator_receipt(filed),
        gang=stored.job.terms.gang,
    )
    return msgspec.json.encode(shown)


def list_entry(job: StoredJobSummary) -> JobListEntry:
    """Return the entry of a job in a list."""
    terms = job.terms
    done = job.ended_at if job.state is JobState.DONE else None
    return JobListEntry(
        job.id,
        STATUSES[job.state],
        format_time(job.submitted_at),
        None if done is None else format_time(done),
        job_type_of(job.kind),
        terms.user,
        terms.policy.name,
        terms.privacy.name,
        dollars(terms.price),
        job.lease,
        _detail(job.error),
        well_formed(job.model) if job.kind is JobKind.CALL else None,
    )


STORED_KINDS = tuple(kind for kind in JobKind if kind is not JobKind.CALL_STREAM)


def job_type_of(kind: JobKind) -> JobType:
    """Return the job type of a stored kind, as clients write it."""
    match kind:
        case JobKind.CHAT:
            return "LLM_INFER"
        case JobKind.TASK:
            return "TASK"
        case JobKind.COMPLETION:
            return "COMPLETION"
        case JobKind.EMBEDDING:
            return "EMBEDDING"
        case JobKind.RERANK:
            return "RERANK"
        case JobKind.TRANSCRIPTION:
            return "TRANSCRIPTION"
        case JobKind.CALL:
            return "CALL"
        case JobKind.MODEL:
            return "MODEL"
        case JobKind.CALL_STREAM:
            raise AssertionError("call streams are not stored")


def format_time(at: float) -> str:
    """Format a Unix time as the original does: in UTC, to the second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def error_code(end: JobFailed | JobCancelled | JobExpired) -> str:
    """Return the code of a failure: the original's where it has one."""
    match end:
        case JobCancelled():
            return CANCELLED
        case JobExpired(limit=TimeLimit.QUEUE):
            return NO_WORKER
        case JobFailed(error=error) if error.startswith(NO_TRUSTED_WORKER):
            return NO_TRUSTED_WORKER
        case JobFailed(lost=True):
            return WORKER_LOST
        case JobFailed(error=error) | JobExpired(error=error):
            return well_formed(error)


def encode_value(outcome: Outcome) -> bytes:
    """Encode a function's result, or its digest if JSON cannot represent it."""
    value = outcome.value
    if not value and outcome.blobs:
        return msgspec.json.encode({"sha256": outcome.blobs[0].hex()})
    try:
        return contents_as_json(value)
    except InvalidRequest:
        digest = hashlib.sha256(value).hexdigest()
        return msgspec.json.encode({"sha256": digest, "size": len(value)})


# Private parts, in the order in which they are called.


_whole = msgspec.json.Decoder(Raw)
_objects = msgspec.json.Decoder(dict[str, Raw])


def _result(work: Work, outcome: Outcome) -> bytes:
    if isinstance(work, Call):
        return encode_value(outcome)
    output = output_of(work, outcome)
    try:
        _whole.decode(output)
    except (msgspec.DecodeError, RecursionError):
        # A task's answer should be JSON, but workers are not trusted.
        return encode_text(output.decode(errors="replace"))
    return output


def _error(code: str) -> Raw:
    return Raw(b'{"error":' + encode_text(code) + b"}")


def _failure_code(stored: StoredJob, facts: Sequence[Fact]) -> str:
    for fact in reversed(facts):
        if isinstance(fact, JobFailed | JobCancelled | JobExpired):
            return error_code(fact)
    return _detail(stored.error) or stored.state.value  # its history was just pruned


def _detail(error: str | None) -> str | None:
    return None if error is None else well_formed(error)


def _receipt(filed: Sequence[LoggedReceipt]) -> Raw:
    """Encode a worker's receipt as the original does, with Shoal's verdict."""
    given = [each for each in filed if each.claims.worker_receipt is not None]
    if not given:
        return NULL
    claims = given[-1].claims
    receipt = claims.worker_receipt
    assert receipt is not None, "only those were looked for"
    check = {
        "signature": to_base64(receipt.signature),
        "verified": claims.verdict is Verdict.VALID,
        "verdict": claims.verdict.name.lower(),
    }
    return Raw(msgspec.json.encode(_fields(receipt) | check))


def _fields(receipt: SignedReceipt) -> dict[str, object]:
    """Return the signed fields in their order; empty if the body is not JSON."""
    try:
        return {**_objects.decode(receipt.body)}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _coordinator_receipt(filed: Sequence[LoggedReceipt]) -> CoordinatorReceipt | None:
    if not filed:
        return None
    newest = filed[-1]
    return CoordinatorReceipt(
        newest.index, newest.body.decode(), to_base64(newest.signature)
    )
