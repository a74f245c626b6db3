"""Runs requests of any dialect as jobs, and writes answers of text in their form.

Both are moderated; what a stored job has answered is when it is shown.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace

from shoal.coordinator.answer_reader import AnswerCursor
from shoal.domain import errors
from shoal.domain.credentials import usage_of
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.job_kinds import NUMBER_KINDS
from shoal.domain.moderation import BLOCKED, FILTERED, AnswerModerator
from shoal.domain.outcome import AnswerPiece, Outcome, Usage
from shoal.domain.work import Chat, Completion, Inference, InputWork, Work
from shoal.gateway.context import JobsGateway
from shoal.gateway.http import responses
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.errors import error_status
from shoal.gateway.http.request_record import RequestRecord, record_of, worker_headers
from shoal.gateway.jobs.job_options import build_job
from shoal.pool.lifecycle import JobState
from shoal.store.port import StoredJob


class StreamEncoder(Protocol):
    """Writes the stream of one answer.

    Whichever method is called first also writes what begins a stream.
    """

    def encode(self, pieces: Sequence[AnswerPiece]) -> bytes:
        """Write what came."""

    def encode_end(self, outcome: Outcome) -> bytes:
        """Write what comes after the last piece of a whole answer."""

    def encode_error(self, error: errors.ShoalError) -> bytes:
        """Write how an answer ends that breaks off."""


class AnswerForm(msgspec.Struct, frozen=True):
    """The encoders of the answer to one job.

    Both take the job's id and the time in Unix seconds.  A stream is of the type
    ``media``; ``keepalive`` is written where it has been silent, if it is not empty.
    If it ``names_workers``, a comment precedes what another worker writes than the one
    in the headers.
    """

    encode: Callable[[JobId, Outcome, int], bytes]
    stream: Callable[[JobId, int], StreamEncoder]
    media: str = responses.SSE_TYPE
    keepalive: bytes = responses.SSE_KEEPALIVE
    names_workers: bool = False


W = TypeVar("W", bound=Chat | Completion)
W_co = TypeVar("W_co", bound=Chat | Completion, covariant=True)


class InputsAnswer(NamedTuple):
    """The outcome of work on inputs to show; ``model`` is the one that did it."""

    job_id: JobId
    outcome: Outcome
    usage: Usage
    model: str


class GenerationRequest(msgspec.Struct, Generic[W_co], frozen=True):
    """A request for text, and how to answer it.

    ``include_usage``: a stream of chunks ends with the usage.  ``session`` is the
    client's name for related requests, and ``end_user`` that for its user; ``tier`` is
    the service tier that it asks for.
    """

    work: W_co
    stream: bool = False
    include_usage: bool = False
    session: str = ""
    tier: str = ""
    end_user: str = ""


HEADERS_AFTER = 10.0  # seconds for an error to become the status instead of an event


def answer(
    gateway: JobsGateway,
    request: web.Request,
    caller: ApiCaller,
    decoded: GenerationRequest[W],
    form_of: Callable[[W], AnswerForm],
    *,
    field: str,
) -> Awaitable[web.StreamResponse]:
    """Have the work done, and return the answer in its form.

    ``form_of`` gets the work with the model that does it, where it names an alias.
    ``field`` is the body's field with the texts that the model reads, for the error if
    they match the moderation list.

    Raises what ``build_job`` and ``Access.submit`` raise, and how the job ended if that
    is before the first piece of a stream.
    """
    check_work(gateway, caller.key.name, decoded.work, field)
    job = build_job(
        *(gateway, request, decoded.work, caller),
        session=decoded.session,
        tier=decoded.tier,
        whole=not decoded.stream,
        end_user=decoded.end_user,
    )
    work = decoded.work
    form = form_of(replace(work, model=job.model) if job.terms.alias else work)
    if decoded.stream:
        return stream_answer(gateway, request, caller, job, form)
    return answer_whole(gateway, request, caller, job, form)


async def answer_inputs(
    gateway: JobsGateway,
    request: web.Request,
    caller: ApiCaller,
    work: InputWork,
    *,
    field: str,
    end_user: str = "",
) -> InputsAnswer:
    """Have work on inputs done.

    ``field``, and what is raised, are as in ``answer``; ``end_user`` is as in
    ``build_job``.
    """
    check_work(gateway, caller.name, work, field)
    job = build_job(gateway, request, work, caller, end_user=end_user)
    return InputsAnswer(*await run_whole(gateway, request, caller, job), job.model)


async def answer_whole(
    gateway: JobsGateway,
    request: web.Request,
    caller: ApiCaller,
    job: Job,
    form: AnswerForm,
) -> web.Response:
    """Have ``job`` done, and return its answer; an error is raised."""
    job_id, outcome, _ = await run_whole(gateway, request, caller, job)
    return responses.json_bytes_response(
        form.encode(job_id, outcome, int(gateway.clock.wall()))
    )


async def stream_answer(
    gateway: JobsGateway,
    request: web.Request,
    caller: ApiCaller,
    job: Job,
    form: AnswerForm,
) -> web.StreamResponse:
    """Have ``job`` done, and write its answer while it comes.

    An error before the first piece is raised; a later one ends the stream.
    """
    response = web.StreamResponse(headers=responses.stream_headers(form.media))
    record = record_of(request)
    try:
        async with gateway.access.submit(job, caller, early=True) as reader:
            record.set_reader(reader)
            first = await first_pieces(reader)
            if first == []:
                await reader.outcome()  # an error is still this request's status
            if first is None:
                await gateway.jobs.wait_accepted(reader.job_id)
            else:
                record.first_output = gateway.clock.now()
            encoder = form.stream(reader.job_id, int(gateway.clock.wall()))
            encode: Callable[[Sequence[AnswerPiece]], bytes] = encoder.encode
            if form.names_workers:
                encode = _naming_workers(reader, encode)
            await response.prepare(request)
            keepalive = partial(_keepalive, gateway, reader.job_id, form)
            if first is None and (comment := await keepalive(early=False)):
                await responses.write(request, response, comment)
            whole = await responses.forward_pieces(
                request,
                response,
                reader,
                encode,
                first=first,
                keepalive=keepalive,
                watch=answer_moderator(gateway, job.owner),
            )
            if not whole:
                gateway.jobs.cancel(reader.job_id, BLOCKED)
                last = encoder.encode_end(FILTERED)
            else:
                last = await _encoded_end(record, job, encoder, reader)
        # Only now, so that the worker of an answer that was refused is stopped first.
        await responses.write(request, response, last, last=True)
    except responses.ClientGone:
        record.error = "client_gone"
    return response


async def run_whole(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller, job: Job
) -> tuple[JobId, Outcome, Usage]:
    """Have ``job`` done, and record its usage.

    With an idempotency key, the job that is returned may be an earlier one.
    """
    record = record_of(request)
    async with gateway.access.submit(job, caller, early=True) as reader:
        record.set_reader(reader)
        outcome = await reader.outcome()
    usage = record.usage = usage_of(job.work, outcome)
    shown = shown_outcome(gateway, job.owner, job.work, outcome)
    return reader.job_id, shown, usage


async def _keepalive(
    gateway: JobsGateway, job_id: JobId, form: AnswerForm, *, early: bool
) -> bytes:
    """Return what to write in a silence: what the job waits for, if comments can say.

    ``early``: the silence has just begun, because the job was requeued.
    """
    if form.keepalive is responses.SSE_KEEPALIVE:
        waits_for = await gateway.jobs.waits_for(job_id)
        if waits_for is not None:
            return f": waits for a worker, {ascii(waits_for)[1:-1]}\n\n".encode()
    return b"" if early else form.keepalive


async def first_pieces(reader: AnswerCursor) -> list[AnswerPiece] | None:
    """Return the first pieces, nothing at the end, or None if it takes too long."""
    late = False

    def end_wait() -> None:
        nonlocal late
        late = True
        reader.wake()

    # No asyncio.timeout, which takes ten times the calls.
    timer = asyncio.get_running_loop().call_later(HEADERS_AFTER, end_wait)
    try:
        while not (pieces := await reader.read(once=True)) and not late:
            if reader.is_over:
                return []
    finally:
        timer.cancel()
    return pieces or None


def _naming_workers(
    reader: AnswerCursor, encode: Callable[[Sequence[AnswerPiece]], bytes]
) -> Callable[[Sequence[AnswerPiece]], bytes]:
    """Return ``encode``, with a comment before what another worker writes.

    Clients of server-sent events ignore comments.  The response's headers are written
    next, and name the worker of now.
    """
    answer = reader.answer
    named = answer.worker_id, answer.lease

    def encode_named(pieces: Sequence[AnswerPiece]) -> bytes:
        nonlocal named
        if (writes := (answer.worker_id, answer.lease)) == named:
            return encode(pieces)
        named = writes
        lines = "".join(f": {name}: {text}\n" for name, text in worker_headers(reader))
        return f"{lines}\n".encode() + encode(pieces)

    return encode_named


async def _encoded_end(
    record: RequestRecord, job: Job, encoder: StreamEncoder, reader: AnswerCursor
) -> bytes:
    """Return the end of the stream, from which clients see whether it is whole."""
    try:
        outcome = await reader.outcome()
    except errors.ShoalError as error:
        record.error = error_status(error).code
        errors.release_frames(error)
        return encoder.encode_error(error)
    record.usage = usage_of(job.work, outcome)
    return encoder.encode_end(outcome)


def check_work(gateway: JobsGateway, owner: str, work: Inference, field: str) -> None:
    """Raise InvalidRequest if the work matches the moderation list.

    ``field`` is the body's field with the texts that the model reads.
    """
    moderation = gateway.moderation_for(owner)
    if moderation is not None and moderation.blocks_work(work):
        raise errors.InvalidRequest(f"the {field} match the moderation list", field)


def answer_moderator(gateway: JobsGateway, owner: str) -> AnswerModerator | None:
    """Return a moderator for one streamed answer to ``owner``, if it is moderated."""
    moderation = gateway.moderation_for(owner)
    return None if moderation is None else moderation.moderate_answer()


def shown_outcome(
    gateway: JobsGateway, owner: str, work: Work, outcome: Outcome
) -> Outcome:
    """Return the outcome that is shown: filtered, if its text matches."""
    moderation = gateway.moderation_for(owner)
    if moderation is None or work.kind in NUMBER_KINDS:
        return outcome  # vectors and scores are no text
    return moderation.filter_outcome(outcome)


END_ERRORS: Mapping[JobState, type[errors.ShoalError]] = {
    JobState.FAILED: errors.JobError,
    JobState.CANCELLED: errors.Cancelled,
    JobState.EXPIRED: errors.TimedOut,
}


def stored_end(gateway: JobsGateway, stored: StoredJob) -> Outcome | errors.ShoalError:
    """Return the moderated outcome of a job that has ended, or why it has none."""
    job, outcome = stored.job, stored.outcome
    if outcome is None:
        return END_ERRORS[stored.state](stored.error or stored.state.value)
    return shown_outcome(gateway, job.owner, job.work, outcome)
