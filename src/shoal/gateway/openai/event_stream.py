"""A job's answer as server-sent events, for the faces that stream as OpenAI does."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from aiohttp import web

from shoal.coordinator.answer_reader import AnswerStream
from shoal.domain.credentials import usage_of
from shoal.domain.errors import ShoalError, release_frames
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.moderation import BLOCKED, Moderation
from shoal.domain.outcome import AnswerPiece, Outcome
from shoal.gateway.context import Gateway
from shoal.gateway.http import errors
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.responses import (
    SSE_HEADERS,
    SSE_KEEPALIVE,
    ClientGone,
    forward_pieces,
    write,
)

HEADERS_AFTER = 10.0  # seconds for an error to become the status instead of an event


class ChunkEncoder(Protocol):
    """Writes the events of one answer."""

    def encode(self, pieces: Sequence[AnswerPiece]) -> bytes:
        """Write what came."""
        ...

    def encode_end(self, outcome: Outcome) -> bytes:
        """Write what comes after the last piece, up to [DONE]."""
        ...


async def stream_answer(
    gateway: Gateway,
    request: web.Request,
    caller: ApiCaller,
    job: Job,
    form: Callable[[JobId, int], ChunkEncoder],
    moderation: Moderation | None,
) -> web.StreamResponse:
    """Have ``job`` done, and write its answer while it comes.

    ``form`` takes the job's id and the time, in Unix seconds.  An error before the
    first piece is raised; a later one becomes an event, and no [DONE] follows.
    """
    response = web.StreamResponse(headers=SSE_HEADERS)
    record = record_of(request)
    try:
        async with gateway.access.submit(job, caller) as reader:
            record.set_reader(reader)
            first = await _first_pieces(reader)
            if first == []:
                await reader.outcome()  # an error is still this request's status
            if first is not None:
                record.first_output = gateway.clock.now()
            chunks = form(reader.job_id, int(gateway.clock.wall()))
            await response.prepare(request)
            if first is None:
                await write(request, response, SSE_KEEPALIVE)
            whole = await forward_pieces(
                request,
                response,
                reader,
                chunks.encode,
                first=first,
                keepalive=SSE_KEEPALIVE,
                watch=moderation.moderate_answer() if moderation else None,
            )
            if not whole:
                gateway.hub.cancel(reader.job_id, BLOCKED)
                last = chunks.encode_end(Outcome("", "content_filter"))
            else:
                last = await _encoded_end(request, job, chunks, reader)
        # Only now, so that the worker of an answer that was refused is stopped first.
        await write(request, response, last, last=True)
    except ClientGone:
        record.error = "client_gone"
    return response


async def _first_pieces(reader: AnswerStream) -> list[AnswerPiece] | None:
    """Return the first pieces, nothing at the end, or None if it takes too long."""
    try:
        async with asyncio.timeout(HEADERS_AFTER):
            return await reader.read()
    except TimeoutError:
        return None


async def _encoded_end(
    request: web.Request, job: Job, chunks: ChunkEncoder, reader: AnswerStream
) -> bytes:
    """Return the last event: without [DONE], the answer is not whole."""
    record = record_of(request)
    try:
        outcome = await reader.outcome()
    except ShoalError as error:
        record.error = errors.error_status(error).code
        release_frames(error)
        return b"data: " + errors.error_body(error) + b"\n\n"
    record.usage = usage_of(job.work, outcome)
    return chunks.encode_end(outcome)
