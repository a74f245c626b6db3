"""A job's answer as server-sent events, for the faces that stream as OpenAI does."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from aiohttp import web

from shoal.domain.credentials import usage_of
from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId
from shoal.domain.moderation import REFUSED, Moderation
from shoal.domain.outcome import Outcome, Piece
from shoal.domain.work import Job
from shoal.gateway import problems
from shoal.gateway.access import Caller
from shoal.gateway.chat_answer import KEEPALIVE
from shoal.gateway.parts import Gateway
from shoal.gateway.record import record_of
from shoal.gateway.stream import ClientGone, relay, write
from shoal.runtime.reading import Reader

HEADERS_AFTER = 10.0  # seconds for an error to become the status instead of an event

SSE = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # else nginx keeps tokens back
}


class Chunks(Protocol):
    """Writes the events of one answer."""

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """Write what came."""
        ...

    def end(self, outcome: Outcome) -> bytes:
        """Write what comes after the last piece, up to [DONE]."""
        ...


async def stream(
    gateway: Gateway,
    request: web.Request,
    caller: Caller,
    job: Job,
    form: Callable[[JobId, int], Chunks],
    moderation: Moderation | None,
) -> web.StreamResponse:
    """Have ``job`` done, and write its answer while it comes.

    ``form`` takes the job's id and the time, in Unix seconds.  An error before the
    first piece is raised; a later one becomes an event, and no [DONE] follows.
    """
    response = web.StreamResponse(headers=SSE)
    record = record_of(request)
    try:
        async with gateway.access.answering(job, caller) as reader:
            record.reading(reader)
            first = await _first(reader)
            if first == []:
                await reader.outcome()  # an error is still this request's status
            if first is not None:
                record.first_output = gateway.clock.now()
            chunks = form(reader.job_id, int(gateway.clock.wall()))
            await response.prepare(request)
            if first is None:
                await write(request, response, KEEPALIVE)
            whole = await relay(
                request,
                response,
                reader,
                chunks.pieces,
                first=first,
                keepalive=KEEPALIVE,
                watch=moderation.watch() if moderation else None,
            )
            if not whole:
                gateway.hub.withdraw(reader.job_id, REFUSED)
                last = chunks.end(Outcome("", "content_filter"))
            else:
                last = await _end(request, job, chunks, reader)
        # Only now, so that the worker of an answer that was refused is stopped first.
        await write(request, response, last, last=True)
    except ClientGone:
        record.error = "client_gone"
    return response


async def _first(reader: Reader) -> list[Piece] | None:
    """Return the first pieces, nothing at the end, or None if it takes too long."""
    try:
        async with asyncio.timeout(HEADERS_AFTER):
            return await reader.read()
    except TimeoutError:
        return None


async def _end(request: web.Request, job: Job, chunks: Chunks, reader: Reader) -> bytes:
    """Return the last event: without [DONE], the answer is not whole."""
    record = record_of(request)
    try:
        outcome = await reader.outcome()
    except ShoalError as error:
        record.error = problems.problem(error).code
        return b"data: " + problems.body(error) + b"\n\n"
    record.usage = usage_of(job.work, outcome)
    return chunks.end(outcome)
