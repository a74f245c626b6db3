"""Jobs as requests for inference, and back.

Source: TealeNet's "Cluster Messages", "inferenceRequest".  Peers of ours are told in
our field what the document cannot say.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from shoal.domain.errors import Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.nesting import is_deep
from shoal.domain.vocabulary import RunJob
from shoal.domain.work import (
    ANY_MODEL,
    Chat,
    Completion,
    Embedding,
    Kind,
    Task,
    Work,
)
from shoal.protocols.session import described
from shoal.protocols.tealenet.wire.chats import chat_of, chat_request, model_of
from shoal.protocols.tealenet.wire.messages import BadMessage, InferenceRequest
from shoal.protocols.tealenet.wire.scalars import EXACT_MAX, Count, Name, written


class More(msgspec.Struct, frozen=True, omit_defaults=True):
    """Our field in a request: the job as it is, but for its model and its messages.

    ``prompt`` is that of a completion, ``inputs`` are those of an embedding, ``name``
    and ``payload`` those of a task.  ``job`` is what a receipt is to call it.
    """

    lease: Annotated[int, msgspec.Meta(ge=0, lt=EXACT_MAX)]
    kind: Kind = Kind.CHAT
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
    """Return a job as a request; ``extended`` is for peers of ours.

    It always asks for a stream: of what came otherwise some real peers lose the text.

    Raises Unsupported for what only peers of ours can do.
    """
    work = job.work
    if extended:
        request, more = _exact(job)
        more = msgspec.structs.replace(more, job=job.job_id)
        shoal: Raw | UnsetType = Raw(written(more))
    elif isinstance(work, Chat):
        request, shoal = chat_request(work), UNSET
    else:
        raise Unsupported(f"a plain peer does no {work.kind.value} jobs")
    return InferenceRequest(request_id, request, True, shoal)


def read_request(message: InferenceRequest, *, extended: bool = False) -> RunJob:
    """Return the job that a peer asks for, under the peer's own id for it.

    ``extended`` is for peers of ours.  Others' jobs have the lease 1; one without a
    model goes to any, and a limit below 0 is none, as llama.cpp has it.

    Raises BadMessage saying what is wrong with it.
    """
    if extended and not isinstance(message.shoal, UnsetType):
        more = _more(message, message.shoal)
        work = _work(message, more)
        lease, continues = LeaseNumber(more.lease), more.continues
        return RunJob(JobId(message.request_id), lease, work, continues)
    return RunJob(JobId(message.request_id), LeaseNumber(1), chat_of(message.request))


def name_in_receipts(message: InferenceRequest) -> str:
    """Return what a peer of ours calls the job in receipts; empty, if it wants none."""
    if isinstance(message.shoal, UnsetType):
        return ""
    try:
        return _names.decode(bytes(message.shoal)).job
    except (ValueError, RecursionError):
        return ""


def wants_usage(message: InferenceRequest) -> bool:
    """Say whether a request asks for a chunk with the usage, after all others."""
    asked = message.request.get("stream_options")
    return isinstance(asked, dict) and asked.get("include_usage") is True


# Private parts, in the order in which they are called.


def _exact(job: RunJob) -> tuple[dict[str, Any], More]:
    """Return request and field that together say all there is to the work."""
    work, lease = described(job.work), job.lease
    request: dict[str, Any] = {"messages": [], "stream": True}
    if not isinstance(work, Task) and work.model != ANY_MODEL:
        request["model"] = work.model
    match work:
        case Chat(messages=messages):
            request["messages"] = messages
            more = More(lease)
        case Completion(prompt=prompt):
            more = More(lease, work.kind, prompt=prompt)
        case Embedding(inputs=inputs, options=options):
            return request, More(
                lease, work.kind, inputs=list(inputs), options=dict(options)
            )
        case Task(name=name, payload=payload):
            return request, More(lease, work.kind, name=name, payload=payload)
    return request, msgspec.structs.replace(
        more,
        max_tokens=work.max_tokens,
        temperature=work.temperature,
        options=dict(work.options),
        continues=job.continues,
    )


def _more(message: InferenceRequest, shoal: Raw) -> More:
    try:
        more: More = _mores.decode(shoal)
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        why = "nested too deeply" if deep else str(error)
        raise _bad(message, f"shoal: {why}") from error
    if is_deep([more.prompt, more.payload, more.options]):
        raise _bad(message, "shoal: nested too deeply")
    return more


def _work(message: InferenceRequest, more: More) -> Work:
    request = message.request
    model = model_of(request)
    limits = (more.max_tokens, more.temperature, more.options)
    match more.kind:
        case Kind.CHAT:
            return Chat(model, tuple(request["messages"]), *limits)
        case Kind.COMPLETION:
            return Completion(model, more.prompt, *limits)
        case Kind.EMBEDDING:
            return Embedding(model, tuple(more.inputs), more.options)
        case Kind.TASK:
            return Task(more.name, more.payload)
        case Kind.CALL | Kind.LANE:
            raise _bad(message, f"shoal.kind: no {more.kind.value} here")


def _bad(message: InferenceRequest, why: str) -> BadMessage:
    return BadMessage(why, "inferenceRequest", message.request_id)


class _Named(msgspec.Struct, frozen=True):
    job: Name = ""


_names = msgspec.json.Decoder(_Named)
_mores = msgspec.json.Decoder(More)
