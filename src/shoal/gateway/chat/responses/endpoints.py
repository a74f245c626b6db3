"""OpenAI's Responses API: creates, shows, streams, cancels and deletes responses.

Source: OpenAI's API reference, "Responses".
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from shoal.coordinator.answer_reader import AnswerCursor
from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest, ShoalError, release_frames
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.moderation import BLOCKED, FILTERED
from shoal.domain.outcome import Outcome
from shoal.domain.work import Chat
from shoal.gateway.chat import job_answers
from shoal.gateway.chat.responses.body import CreateResponse, ResponseInputItem
from shoal.gateway.chat.responses.events import NUMBERS_PER_START, ResponseEventEncoder
from shoal.gateway.chat.responses.request import (
    ResponseRequest,
    decode_response_request,
)
from shoal.gateway.chat.responses.response_object import ResponseDraft, ResponseObject
from shoal.gateway.chat.responses.stored_responses import (
    StoredResponse,
    chat_of,
    find_response,
    starts_of,
    storable,
)
from shoal.gateway.context import JobsGateway
from shoal.gateway.http import responses
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.errors import error_status
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.request_record import record_of
from shoal.gateway.jobs.job_options import build_job
from shoal.pool.lifecycle import JobState

api = Operations()

LISTED_MAX = 100  # items in one answer
CANCELLED_BY_CLIENT = "the response was cancelled by its owner"


class ResponseQuery(msgspec.Struct, frozen=True):
    """Whether to stream the response, and after which event to begin.

    Other parameters are ignored.
    """

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0, le=2**53)] | UnsetType = UNSET


class InputItemQuery(msgspec.Struct, frozen=True):
    """A page of items: those that follow the item ``after``, in their ``order``."""

    limit: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


@api.post(
    "/v1/responses",
    "Create a response",
    Scope.USE,
    by_calls=True,
    answer=ResponseObject,
    body=CreateResponse,
    parts=(ResponseInputItem,),
    streams=responses.SSE_TYPE,
)
async def create_response(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    created = int(gateway.clock.wall())
    decode = partial(decode_response_request, created=created)
    decoded = storable(
        caller, await gateway.bodies.decode(request, caller.name, decode)
    )
    chat = await chat_of(gateway, caller, decoded)
    job_answers.check_work(gateway, caller.name, chat, "input")
    job = build_job(
        *(gateway, request, chat, caller),
        session=decoded.fields.prompt_cache_key or "",
        tier=decoded.fields.service_tier or "",
        left_out=decoded.left_out,
        whole=not decoded.stream,
        end_user=decoded.fields.safety_identifier or decoded.fields.user or "",
    )
    if decoded.stored:
        background = decoded.fields.background
        terms = replace(
            job.terms, api_fields=decoded.fields.encode(), detached=background
        )
        job = replace(job, terms=terms)
    if decoded.fields.background:
        return await _run_in_background(gateway, request, caller, job, decoded)
    form = _answer_form(decoded, job)
    if decoded.stream:
        return await job_answers.stream_answer(gateway, request, caller, job, form)
    return await job_answers.answer_whole(gateway, request, caller, job, form)


@api.get(
    "/v1/responses/{id}",
    "Show a response, or resume its stream",
    Scope.READ,
    by_calls=True,
    answer=ResponseObject,
    streams=responses.SSE_TYPE,
)
async def show_response(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller, query: ResponseQuery
) -> web.StreamResponse:
    found = await _requested_response(gateway, request, caller)
    if query.stream:
        after = -1 if query.starting_after is UNSET else query.starting_after
        return await stream_response(gateway, request, caller, found, after)
    if query.starting_after is not UNSET:
        field = "starting_after"
        raise InvalidRequest(f"{field}: only with stream=true", field)
    return _shown(found)


@api.delete(
    "/v1/responses/{id}", "Delete a response", Scope.USE, answer=DeletedResponse
)
async def delete_response(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    found = await _requested_response(gateway, request, caller)
    job_id = found.draft.job_id
    if found.end is None:
        await gateway.jobs.cancel_now(job_id, CANCELLED_BY_CLIENT)
    if not await gateway.store.delete_job(job_id):
        await _requested_response(gateway, request, caller)  # it may be gone already
        raise InvalidRequest(
            "the response is of a batch that has not ended: delete it after the batch"
        )
    deleted = DeletedResponse(request.match_info["id"])
    return responses.json_bytes_response(responses.encode_json(deleted))


@api.post(
    "/v1/responses/{id}/cancel",
    "Cancel a response",
    Scope.USE,
    by_calls=True,
    answer=ResponseObject,
)
async def cancel_response(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    found = await _requested_response(gateway, request, caller)
    if found.end is None:
        await gateway.jobs.cancel_now(found.draft.job_id, CANCELLED_BY_CLIENT)
        found = await _requested_response(gateway, request, caller)
    return _shown(found)


@api.get(
    "/v1/responses/{id}/input_items",
    "List the input of a response",
    Scope.READ,
    lists=True,
    answer=responses.ItemList[Mapping[str, Any]],
)
async def list_input_items(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller, query: InputItemQuery
) -> web.Response:
    found = await _requested_response(gateway, request, caller)
    items = found.draft.input_items()
    if query.order == "desc":
        items.reverse()
    if query.after is not UNSET:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise InvalidRequest(f"after: there is no item {query.after!r}", "after")
        items = items[ids.index(query.after) + 1 :]
    page = items[: query.limit]
    ids = [item["id"] for item in page]
    listed = responses.item_list(page, ids, len(items) > len(page))
    return responses.json_bytes_response(responses.encode_json(listed))


async def _requested_response(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> StoredResponse:
    """Return the response that the path names.  Raises NotFound."""
    found = await find_response(gateway, caller, request.match_info["id"])
    record_of(request).job_id = found.draft.job_id
    return found


async def _run_in_background(
    gateway: JobsGateway,
    request: web.Request,
    caller: ApiCaller,
    job: Job,
    decoded: ResponseRequest,
) -> web.StreamResponse:
    """Have ``job`` done without a client that waits; answer once it is accepted."""
    async with gateway.access.submit(job, caller) as reader:
        record_of(request).set_reader(reader)
        job_id = reader.job_id
    draft = _draft(decoded, job, job_id)
    if job_id == job.id:
        accepted = StoredResponse(draft, job.owner, JobState.QUEUED, None)
    else:  # an earlier one, of the same idempotency key
        accepted = await find_response(gateway, caller, draft.id)
    if decoded.stream:
        return await stream_response(gateway, request, caller, accepted)
    return _shown(accepted)


def _answer_form(decoded: ResponseRequest, job: Job) -> job_answers.AnswerForm:
    return job_answers.AnswerForm(
        lambda job_id, outcome, _: responses.encode_json(
            _draft(decoded, job, job_id).answered(outcome)
        ),
        lambda job_id, _: ResponseEventEncoder(_draft(decoded, job, job_id)),
    )


def _draft(decoded: ResponseRequest, job: Job, job_id: JobId) -> ResponseDraft:
    """Return the draft; with an idempotency key the job may be an earlier one."""
    work = job.work
    assert isinstance(work, Chat), "a response is the answer to a chat"
    return ResponseDraft(job_id, work, decoded.fields, decoded.stored)


def _shown(found: StoredResponse) -> web.Response:
    return responses.json_bytes_response(responses.encode_json(found.show()))


async def stream_response(
    gateway: JobsGateway,
    request: web.Request,
    caller: ApiCaller,
    found: StoredResponse,
    after: int = -1,
) -> web.StreamResponse:
    """Write the events of a response that come ``after`` a number.

    The response goes on when the client leaves.

    Raises InvalidRequest if the number is of an answer that has since started over.
    """
    job_id = found.draft.job_id
    starts = await starts_of(gateway, job_id)
    if after >= 0 and after // NUMBERS_PER_START != starts:
        raise InvalidRequest(
            "starting_after: no event of this answer has the number; after a restart "
            "of the coordinator the answer starts over: stream it from its beginning",
            "starting_after",
        )
    encoder = ResponseEventEncoder(found.draft, starts=starts, after=after)
    response = web.StreamResponse(headers=responses.stream_headers())
    try:
        with gateway.jobs.observe(job_id) as reader:
            await response.prepare(request)
            # The first events are sent at once: the client learns the response's id.
            await responses.write(request, response, encoder.encode(()))
            if reader is not None:
                last = await _follow(gateway, request, response, found, reader, encoder)
            else:
                last = await _ended(gateway, request, caller, found, encoder)
        await responses.write(request, response, last, last=True)
    except responses.ClientGone:
        record_of(request).error = "client_gone"
    return response


async def _follow(
    gateway: JobsGateway,
    request: web.Request,
    response: web.StreamResponse,
    found: StoredResponse,
    reader: AnswerCursor,
    encoder: ResponseEventEncoder,
) -> bytes:
    """Write what a job writes; return the end of the stream."""
    whole = await responses.forward_pieces(
        request,
        response,
        reader,
        encoder.encode,
        keepalive=_keepalive,
        watch=job_answers.answer_moderator(gateway, found.owner),
    )
    if not whole:
        gateway.jobs.cancel(reader.job_id, BLOCKED)
        return encoder.encode_end(FILTERED)
    try:
        return encoder.encode_end(await reader.outcome())
    except ShoalError as error:
        record_of(request).error = error_status(error).code
        release_frames(error)
        if gateway.jobs.is_open(reader.job_id):
            return encoder.encode_interruption(error)  # only this stream ends
        return encoder.encode_error(error)


async def _keepalive(*, early: bool) -> bytes:
    return b"" if early else responses.SSE_KEEPALIVE


async def _ended(
    gateway: JobsGateway,
    request: web.Request,
    caller: ApiCaller,
    found: StoredResponse,
    encoder: ResponseEventEncoder,
) -> bytes:
    """Return the rest of the stream of a response whose job has ended."""
    try:
        found = await find_response(gateway, caller, found.draft.id)
    except ShoalError as error:  # deleted meanwhile, or the store failed
        record_of(request).error = error_status(error).code
        release_frames(error)
        return encoder.encode_interruption(error)
    match found.end:
        case Outcome():
            return encoder.encode_end(found.end)
        case ShoalError():
            return encoder.encode_error(found.end)
        case None:
            raise AssertionError("a job that is not open has ended")
