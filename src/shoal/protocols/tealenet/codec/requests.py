"""Jobs encoded as inference requests, and decoded from them.

Source: TealeNet's "Cluster Messages", "inferenceRequest".  Between Shoal peers the
field ``shoal`` has the complete job; other peers support chats only.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from shoal.domain.errors import Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.json_limits import is_too_deep
from shoal.domain.vocabulary import RunJob
from shoal.domain.work import (
    ANY_MODEL,
    Chat,
    Completion,
    Embedding,
    JobKind,
    Rerank,
    Task,
    Transcription,
    Work,
)
from shoal.protocols.seam.document_fields import Unread
from shoal.protocols.seam.input_work import input_prompt, input_work, inputs_of
from shoal.protocols.seam.session import without_calls
from shoal.protocols.tealenet.codec.chats import read_chat, requested_model, write_chat
from shoal.protocols.tealenet.codec.envelope import BadMessage
from shoal.protocols.tealenet.codec.messages import InferenceRequest
from shoal.protocols.tealenet.codec.scalars import EXACT_MAX, Count, Name, encode_json


class InferenceRequestExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """Shoal's field in a request: the job except for its model and its messages.

    ``prompt`` belongs to a completion, or is the query of a reranking; ``inputs``
    belong to an embedding or a reranking, ``name`` and ``payload`` to a task.  ``job``
    is the job's id for the receipt, and ``trace`` the ``traceparent`` of the attempt.
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
    thoughts: str = ""
    job: Annotated[
        Name, Unread("`_ReceiptName` decodes the same field, and reads it")
    ] = ""
    trace: Name = ""


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
        more = msgspec.structs.replace(more, job=job.job_id, trace=job.trace)
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
        begun = more.continues, more.thoughts
        request_id, lease = JobId(message.request_id), LeaseNumber(more.lease)
        return RunJob(request_id, lease, work, *begun, trace=more.trace)
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
        case Embedding() | Rerank() | Transcription():
            return request, InferenceRequestExtension(
                *(lease, work.kind, input_prompt(work) or None),
                inputs=inputs_of(work),
                options=dict(work.options),
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
        thoughts=job.thoughts,
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
        case JobKind.EMBEDDING | JobKind.RERANK | JobKind.TRANSCRIPTION as kind:
            return input_work(kind, model, more.prompt, more.inputs, more.options)
        case JobKind.TASK:
            return Task(more.name, more.payload)
        case JobKind.CALL | JobKind.CALL_STREAM:
            raise _bad_request(message, f"shoal.kind: no {more.kind.value} here")


def _bad_request(message: InferenceRequest, why: str) -> BadMessage:
    return BadMessage(why, "inferenceRequest", message.request_id)


class _ReceiptName(msgspec.Struct, frozen=True):
    """The one field of ``InferenceRequestExtension`` that names a receipt."""

    job: Name = ""


_names = msgspec.json.Decoder(_ReceiptName)
_job_extensions = msgspec.json.Decoder(InferenceRequestExtension)
