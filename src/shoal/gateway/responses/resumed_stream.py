"""Streams a stored response from any of its events on, while it comes or afterwards."""

from aiohttp import web

from shoal.coordinator.answer_reader import AnswerStream
from shoal.domain.errors import InvalidRequest, ShoalError, release_frames
from shoal.domain.moderation import BLOCKED, FILTERED
from shoal.domain.outcome import Outcome
from shoal.gateway.context import Gateway
from shoal.gateway.generation.moderation import answer_moderator
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.errors import error_status
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.responses import (
    SSE_KEEPALIVE,
    ClientGone,
    forward_pieces,
    stream_headers,
    write,
)
from shoal.gateway.responses.events import NUMBERS_PER_START, ResponseEventEncoder
from shoal.gateway.responses.stored_responses import (
    StoredResponse,
    find_response,
    starts_of,
)


async def stream_response(
    gateway: Gateway,
    request: web.Request,
    caller: ApiCaller,
    found: StoredResponse,
    after: int = -1,
) -> web.StreamResponse:
    """Write the events of a response that come ``after`` a number.

    The response goes on when the client leaves.

    Raises InvalidRequest if the number is of an answer that has since begun anew.
    """
    job_id = found.draft.job_id
    starts = await starts_of(gateway, job_id)
    if after >= 0 and after // NUMBERS_PER_START != starts:
        raise InvalidRequest(
            "starting_after: no event of this answer has the number; after a restart "
            "of the coordinator the answer begins anew: stream it from its beginning",
            "starting_after",
        )
    encoder = ResponseEventEncoder(found.draft, starts=starts, after=after)
    response = web.StreamResponse(headers=stream_headers())
    try:
        with gateway.hub.observe_job(job_id) as reader:
            await response.prepare(request)
            # What has begun is shown at once: the client learns the response's id.
            await write(request, response, encoder.encode(()))
            if reader is not None:
                last = await _follow(gateway, request, response, found, reader, encoder)
            else:
                last = await _ended(gateway, request, caller, found, encoder)
        await write(request, response, last, last=True)
    except ClientGone:
        record_of(request).error = "client_gone"
    return response


async def _follow(
    gateway: Gateway,
    request: web.Request,
    response: web.StreamResponse,
    found: StoredResponse,
    reader: AnswerStream,
    encoder: ResponseEventEncoder,
) -> bytes:
    """Write what a job writes; return the end of the stream."""
    whole = await forward_pieces(
        request,
        response,
        reader,
        encoder.encode,
        keepalive=lambda early: b"" if early else SSE_KEEPALIVE,
        watch=answer_moderator(gateway, found.owner),
    )
    if not whole:
        gateway.hub.cancel(reader.job_id, BLOCKED)
        return encoder.encode_end(FILTERED)
    try:
        return encoder.encode_end(await reader.outcome())
    except ShoalError as error:
        record_of(request).error = error_status(error).code
        release_frames(error)
        if reader.job_id in gateway.hub.pool.jobs:
            return encoder.encode_interruption(error)  # only this stream ends
        return encoder.encode_error(error)


async def _ended(
    gateway: Gateway,
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
